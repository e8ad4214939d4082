"""Llama (and the models that use its architecture, SmolLM2 among them)."""

from jaxspec.config import AttentionConfig, LayerConfig, VerifierConfig
from jaxspec.verifiers.hf import Fields, activation, flat_rope, heads
from jaxspec.verifiers.names import ATTENTION, ENDS, MLP, PRE_NORMS, Table

TABLE = Table((*ENDS, *PRE_NORMS, *ATTENTION, *MLP))


def parse(fields: Fields) -> VerifierConfig:
    """A `LlamaConfig` of transformers."""
    width = fields.integer("hidden_size")
    query_heads, kv_heads = heads(fields)
    head_dim = fields.integer("head_dim", width // query_heads)
    max_positions = fields.integer("max_position_embeddings")
    rope = flat_rope(fields, head_dim, max_positions)
    bias = fields.flag("attention_bias", False)
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=rope,
                scale=head_dim**-0.5,
                kv_source=index,
                bias=bias,
                out_bias=bias,
            ),
            mlp_width=fields.integer("intermediate_size"),
            activation=activation(fields, "hidden_act", "silu"),
            mlp_bias=fields.flag("mlp_bias", False),
        )
        for index in range(fields.integer("num_hidden_layers"))
    )
    return VerifierConfig(
        family="llama",
        vocab_size=fields.integer("vocab_size"),
        width=width,
        layers=layers,
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=max_positions,
        tied=fields.flag("tie_word_embeddings", False),
    )

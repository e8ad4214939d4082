"""Gemma-3, the text model.

Multimodal files leave out of `text_config` what equals transformers' class defaults, so those defaults stand here.
"""

from jaxspec.config import AttentionConfig, LayerConfig, VerifierConfig
from jaxspec.verifiers.hf import (
    FULL,
    SLIDING,
    Fields,
    activation,
    check_groups,
    layer_types,
    refuse_bidirectional,
    rope_by_layer_type,
)
from jaxspec.verifiers.names import ATTENTION, ENDS, MLP, QK_NORMS, SANDWICH_NORMS, Table

TABLE = Table((*ENDS, *SANDWICH_NORMS, *ATTENTION, *QK_NORMS, *MLP))


def parse(fields: Fields) -> VerifierConfig:
    """A `Gemma3TextConfig` of transformers."""
    refuse_bidirectional(fields)
    if fields.get("attn_logit_softcapping") is not None:
        raise fields.error(
            "attn_logit_softcapping", "is set; transformers ignores it for Gemma-3, so its meaning is unsure"
        )
    count = fields.integer("num_hidden_layers", 26)
    width = fields.integer("hidden_size")
    query_heads, kv_heads = fields.integer("num_attention_heads", 8), fields.integer("num_key_value_heads", 4)
    check_groups(fields, query_heads, kv_heads)
    head_dim = fields.integer("head_dim", 256)
    max_positions = fields.integer("max_position_embeddings", 131072)
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    types = layer_types(fields, [SLIDING if (index + 1) % pattern else FULL for index in range(count)])
    window = fields.integer("sliding_window", 4096)
    # older files: one theta and one scaling for the full layers, a theta of their own for the sliding ones
    full = {"rope_theta": fields.number("rope_theta", 1e6), **(fields.get("rope_scaling") or {})}
    ropes = rope_by_layer_type(
        fields,
        {FULL: full, SLIDING: {"rope_theta": fields.number("rope_local_base_freq", 1e4)}},
        {FULL: head_dim, SLIDING: head_dim},
        max_positions,
    )
    bias = fields.flag("attention_bias", False)
    layers = tuple(
        LayerConfig(
            attention=AttentionConfig(
                heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=ropes[kind],
                scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
                kv_source=index,
                window=window if kind == SLIDING else None,
                qk_norm=True,
                bias=bias,
                out_bias=bias,
            ),
            mlp_width=fields.integer("intermediate_size"),
            activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            sandwich=True,
        )
        for index, kind in enumerate(types)
    )
    return VerifierConfig(
        family="gemma3",
        vocab_size=fields.integer("vocab_size", 262208),
        width=width,
        layers=layers,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied=fields.flag("tie_word_embeddings", True),
        norm_offset=1.0,
        embed_scale=width**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )

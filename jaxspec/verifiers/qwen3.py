"""Qwen3, dense and mixture of experts."""

from jaxspec.config import AttentionConfig, LayerConfig, MoeConfig, VerifierConfig
from jaxspec.verifiers.hf import FULL, SLIDING, Fields, activation, flat_rope, heads, layer_types
from jaxspec.verifiers.names import ATTENTION, ENDS, MLP, PRE_NORMS, QK_NORMS, Rule, Table

TABLE = Table((*ENDS, *PRE_NORMS, *ATTENTION, *QK_NORMS, *MLP))

MOE_TABLE = Table(
    (
        *TABLE.rules,
        Rule("layers.{i}.moe.router.weight", "layers.{i}.mlp.gate.weight"),
        Rule("layers.{i}.moe.gate.weight", "layers.{i}.mlp.experts.{e}.gate_proj.weight", layout="split"),
        Rule("layers.{i}.moe.up.weight", "layers.{i}.mlp.experts.{e}.up_proj.weight", layout="split"),
        Rule("layers.{i}.moe.down.weight", "layers.{i}.mlp.experts.{e}.down_proj.weight", layout="split"),
        Rule("layers.{i}.moe.gate.weight", "layers.{i}.mlp.experts.gate_up_proj", half=0, layout="packed"),
        Rule("layers.{i}.moe.up.weight", "layers.{i}.mlp.experts.gate_up_proj", half=1, layout="packed"),
        Rule("layers.{i}.moe.down.weight", "layers.{i}.mlp.experts.down_proj", layout="packed"),
        Rule("layers.{i}.moe.gate.weight", "layers.{i}.mlp.experts.gate_proj", layout="stacked"),
        Rule("layers.{i}.moe.up.weight", "layers.{i}.mlp.experts.up_proj", layout="stacked"),
        Rule("layers.{i}.moe.down.weight", "layers.{i}.mlp.experts.down_proj", layout="stacked"),
    ),
    layouts=("split", "packed", "stacked"),  # files by transformers 4 and 5, by transformers in packed form, GGUF
)


def parse(fields: Fields) -> VerifierConfig:
    """A `Qwen3Config` of transformers."""
    count = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    first_sliding = count if window is None else fields.count("max_window_layers", 28)
    types = layer_types(fields, [SLIDING if index >= first_sliding else FULL for index in range(count)])
    if SLIDING in types and window is None:
        raise fields.error("layer_types", "has sliding_attention but use_sliding_window is not true")
    windows = [window if kind == SLIDING else None for kind in types]
    return _verifier(fields, "qwen3", fields.integer("head_dim", 128), windows, [None] * count)


def parse_moe(fields: Fields) -> VerifierConfig:
    """A `Qwen3MoeConfig` of transformers. With `use_sliding_window` every layer slides."""
    count = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    # transformers 5 writes num_local_experts, published files have num_experts
    experts = fields.integer("num_local_experts" if fields.get("num_experts") is None else "num_experts")
    moe = MoeConfig(
        experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
    )
    if moe.top_k > experts:
        raise fields.error("num_experts_per_tok", f"is {moe.top_k}, more than the {experts} experts")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    moes = [None if index in dense or (index + 1) % step else moe for index in range(count)]
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    return _verifier(fields, "qwen3_moe", head_dim, [window] * count, moes)


def _verifier(
    fields: Fields, family: str, head_dim: int, windows: list[int | None], moes: list[MoeConfig | None]
) -> VerifierConfig:
    query_heads, kv_heads = heads(fields)
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
                window=window,
                qk_norm=True,
                bias=bias,
                out_bias=bias,
            ),
            mlp_width=None if moe else fields.integer("intermediate_size"),
            activation=activation(fields, "hidden_act", "silu"),
            moe=moe,
        )
        for index, (window, moe) in enumerate(zip(windows, moes, strict=True))
    )
    return VerifierConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        width=fields.integer("hidden_size"),
        layers=layers,
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=max_positions,
        tied=fields.flag("tie_word_embeddings", False),
    )

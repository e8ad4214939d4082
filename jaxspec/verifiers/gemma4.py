"""Gemma-4, the text model: dense (31B), mixture of experts (26B-A4B), per-layer embeddings with shared keys and values
(E2B, E4B), and the text part of the unified 12B, which is the dense shape.

Files may leave out what equals transformers' class defaults, so those defaults stand here.
"""

from typing import Any

from jaxspec.config import AttentionConfig, LayerConfig, MoeConfig, RopeConfig, VerifierConfig
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
from jaxspec.verifiers.names import ATTENTION, ENDS, MLP, QK_NORMS, SANDWICH_NORMS, Rule, Table

TABLE = Table(
    (
        *ENDS,
        *SANDWICH_NORMS,
        *ATTENTION,
        *QK_NORMS,
        *MLP,
        Rule("layers.{i}.scalar", "layers.{i}.layer_scalar"),
        Rule("layers.{i}.moe.router.weight", "layers.{i}.router.proj.weight"),
        Rule("layers.{i}.moe.router_scale", "layers.{i}.router.scale"),
        Rule("layers.{i}.moe.expert_scale", "layers.{i}.router.per_expert_scale"),
        Rule("layers.{i}.moe.gate.weight", "layers.{i}.experts.gate_up_proj", half=0),
        Rule("layers.{i}.moe.up.weight", "layers.{i}.experts.gate_up_proj", half=1),
        Rule("layers.{i}.moe.down.weight", "layers.{i}.experts.down_proj"),
        Rule("layers.{i}.moe_norm.weight", "layers.{i}.pre_feedforward_layernorm_2.weight"),
        Rule("layers.{i}.post_moe_norm.weight", "layers.{i}.post_feedforward_layernorm_2.weight"),
        Rule("layers.{i}.post_dense_norm.weight", "layers.{i}.post_feedforward_layernorm_1.weight"),
        Rule("layers.{i}.per_layer.gate.weight", "layers.{i}.per_layer_input_gate.weight"),
        Rule("layers.{i}.per_layer.projection.weight", "layers.{i}.per_layer_projection.weight"),
        Rule("layers.{i}.per_layer.norm.weight", "layers.{i}.post_per_layer_input_norm.weight"),
        Rule("per_layer_embed.weight", "embed_tokens_per_layer.weight", merge=1),
        Rule("per_layer_projection.weight", "per_layer_model_projection.weight", merge=0),
        Rule("per_layer_norm.weight", "per_layer_projection_norm.weight"),
    )
)

ROPE_DEFAULTS = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def parse(fields: Fields) -> VerifierConfig:
    """A `Gemma4TextConfig` of transformers."""
    return _verifier(
        fields,
        window=fields.integer("sliding_window", 512),
        max_positions=fields.integer("max_position_embeddings", 131072),
        per_layer_width=fields.count("hidden_size_per_layer_input", 256),
        moe=_moe(fields),
    )


def parse_unified(fields: Fields) -> VerifierConfig:
    """A `Gemma4UnifiedTextConfig` of transformers: no experts, no per-layer embeddings, other defaults."""
    return _verifier(
        fields,
        window=fields.integer("sliding_window", 1024),
        max_positions=fields.integer("max_position_embeddings", 262144),
        per_layer_width=0,
        moe=None,
    )


def _verifier(
    fields: Fields, window: int, max_positions: int, per_layer_width: int, moe: MoeConfig | None
) -> VerifierConfig:
    refuse_bidirectional(fields)
    count = fields.integer("num_hidden_layers", 30)
    width = fields.integer("hidden_size")
    types = layer_types(fields, [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(count)])
    types[-1] = FULL  # as transformers forces it
    attentions = _attentions(fields, types, window, max_positions)
    mlp_width = fields.integer("intermediate_size")
    wide = fields.flag("use_double_wide_mlp", False)
    layers = tuple(
        LayerConfig(
            attention=attention,
            mlp_width=2 * mlp_width if wide and attention.kv_source != index else mlp_width,
            activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            moe=moe,
            sandwich=True,
            scalar=True,
            per_layer_width=per_layer_width,
        )
        for index, attention in enumerate(attentions)
    )
    return VerifierConfig(
        family="gemma4",
        vocab_size=fields.integer("vocab_size", 262144),
        width=width,
        layers=layers,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied=fields.flag("tie_word_embeddings", True),
        embed_scale=width**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        per_layer_vocab_size=fields.integer("vocab_size_per_layer_input", 262144) if per_layer_width else 0,
    )


def _moe(fields: Fields) -> MoeConfig | None:
    if not fields.flag("enable_moe_block", False):
        return None
    # the first files named it expert_intermediate_size
    width_name = (
        "moe_intermediate_size" if fields.get("expert_intermediate_size") is None else "expert_intermediate_size"
    )
    moe = MoeConfig(
        experts=fields.integer("num_experts"),
        top_k=fields.integer("top_k_experts"),
        width=fields.integer(width_name),
        normalize=True,
        gemma_router=True,
    )
    if moe.top_k > moe.experts:
        raise fields.error("top_k_experts", f"is {moe.top_k}, more than the {moe.experts} experts")
    return moe


def _attentions(fields: Fields, types: list[str], window: int, max_positions: int) -> list[AttentionConfig]:
    """Attention of each layer: sliding and full layers differ in head width, kv heads, rope, and in whether values are
    keys.
    """
    query_heads = fields.integer("num_attention_heads", 8)
    sizes = _head_sizes(fields, types)
    for kv_heads, _ in sizes:
        check_groups(fields, query_heads, kv_heads)
    head_dims = {kind: head_dim for kind, (_, head_dim) in zip(types, sizes, strict=True)}
    ropes = _ropes(fields, head_dims, max_positions)
    values_are_keys = fields.flag("attention_k_eq_v", False)
    bias = fields.flag("attention_bias", False)
    return [
        AttentionConfig(
            heads=query_heads,
            kv_heads=sizes[source][0],
            head_dim=sizes[index][1],
            rope=ropes[types[index]],
            scale=1.0,
            kv_source=source,
            window=window if types[index] == SLIDING else None,
            qk_norm=True,
            v_norm=True,
            v_from_k=values_are_keys and types[index] == FULL,
            bias=bias,
            out_bias=bias,
        )
        for index, source in enumerate(_kv_sources(fields, types))
    ]


def _head_sizes(fields: Fields, types: list[str]) -> list[tuple[int, int]]:
    """(K, H) of each layer: published files name the full layers' sizes, transformers 5 saves `per_layer_config`
    instead.
    """
    kv_heads, head_dim = fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256)
    if fields.get("per_layer_config") is None:
        full_kv_heads = kv_heads
        if fields.flag("attention_k_eq_v", False):
            full_kv_heads = fields.integer("num_global_key_value_heads", kv_heads)
        full = (full_kv_heads, fields.integer("global_head_dim", 512))
        return [full if kind == FULL else (kv_heads, head_dim) for kind in types]
    overrides = fields.section("per_layer_config")
    sizes = [(kv_heads, head_dim)] * len(types)
    for key in overrides.data:
        if not key.isdecimal() or int(key) >= len(types):
            raise fields.error("per_layer_config", f"has key {key!r}; a layer index below {len(types)} is wanted")
        own = overrides.section(key)
        if unknown := set(own.data) - {"head_dim", "num_key_value_heads"}:
            raise own.error(min(unknown), "cannot differ by layer; only head_dim and num_key_value_heads can")
        sizes[int(key)] = (own.integer("num_key_value_heads", kv_heads), own.integer("head_dim", head_dim))
    for kind in set(types):
        if len({size for size, other in zip(sizes, types, strict=True) if other == kind}) > 1:
            raise fields.error("per_layer_config", f"gives layers of type {kind} different sizes")
    return sizes


def _ropes(fields: Fields, head_dims: dict[str, int], max_positions: int) -> dict[str, RopeConfig]:
    defaults: dict[str, dict[str, Any]] = {kind: ROPE_DEFAULTS[kind] for kind in head_dims}
    return rope_by_layer_type(fields, defaults, head_dims, max_positions)


def _kv_sources(fields: Fields, types: list[str]) -> list[int]:
    """The layer whose keys and values each layer reads: the last `num_kv_shared_layers` use the last unshared one of
    their type.
    """
    shared = fields.count("num_kv_shared_layers", 0)
    first = len(types) - shared
    last_of_type = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types) - set(last_of_type):
        raise fields.error(
            "num_kv_shared_layers", f"is {shared}: no layer of type {min(missing)} is left to make keys and values"
        )
    return [index if index < first else last_of_type[kind] for index, kind in enumerate(types)]

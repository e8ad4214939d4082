"""The part of a drafter's config that is a Hugging Face decoder config: its layers, read and written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.config import AttentionConfig, LayerConfig, RopeConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import FULL, SLIDING, Fields, activation, flat_rope, heads, layer_types

# transformers' class defaults, for configs that were saved without what equals them
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
QWEN3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
DEFAULT_THETA = 10000.0

# Keys that change what a drafter computes in a way that is not supported, with the values that change nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "attention_modes": (),
    "attention_sink_bias": (False,),
    "attention_sinks": (False,),
    "attention_value_scale": (1, 1.0),
    "bias": (False,),
    "conv_group_size": (),
    "conv_kernel_size": (),
    "enable_moe_block": (False,),
    "is_neox_style": (True,),
    "num_experts": (0,),
    "num_jacobi_passes": (),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0,),
    "projector_type": ("dflash", "dspark"),
    "pure_draft_prefix_len": (0,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "selector_rank": (),
    "selector_top_k": (),
    "shift_label": (False,),
    "swa_window_size": (),
    "use_swa": (False,),
    "xpress_rank": (),
}


@dataclass(frozen=True)
class Sight:
    """What the tokens of one layer see: as `causal`, `window` and `window_from_block` of AttentionConfig."""

    causal: bool = True
    window: int | None = None
    window_from_block: bool = False


def with_defaults(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """The fields, with `defaults` for those that are absent or null."""
    given = {name: value for name, value in fields.data.items() if value is not None}
    return Fields({**defaults, **given}, fields.where)


def refuse_unsupported(fields: Fields) -> None:
    """Raises InputError for a key that would change the drafts and that is not supported."""
    for name, neutral in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is None or value in neutral:
            continue
        if name == "quantization_config":
            raise fields.error(name, "is set; only bf16, f16 and f32 weights are supported")
        raise fields.error(name, f"is {value!r}, which is not supported and would change the drafts")
    target = fields.get("target_hidden_size")
    if target is not None and target != fields.integer("hidden_size"):
        raise fields.error("target_hidden_size", f"is {target}, not hidden_size {fields.integer('hidden_size')}")


def read_windows(fields: Fields, qwen3: bool) -> list[tuple[bool, int | None]]:
    """(sliding, window) of each layer. A Qwen3Config has a window only with `use_sliding_window`; its layers from
    `max_window_layers` on slide where `layer_types` is absent. Other configs take both keys as they are.
    """
    count = fields.integer("num_hidden_layers")
    wanted = not qwen3 or fields.flag("use_sliding_window", False)
    sized = fields if "sliding_window" in fields.data or not qwen3 else with_defaults(fields, {"sliding_window": 4096})
    window = sized.integer("sliding_window") if wanted and sized.get("sliding_window") is not None else None
    first = fields.count("max_window_layers", 28) if qwen3 and window is not None else count
    types = layer_types(fields, [SLIDING if index >= first else FULL for index in range(count)])
    return [(kind == SLIDING, window if kind == SLIDING else None) for kind in types]


def read_layers(fields: Fields, sights: Sequence[Sight], *, qk_norm: bool, wide_first: bool) -> tuple[LayerConfig, ...]:
    """Llama or Qwen3 layers. `wide_first`: the first layer's attention sees twice the width (EAGLE-3)."""
    width = fields.integer("hidden_size")
    query_heads, kv_heads = heads(fields)
    head_dim = fields.integer("head_dim", width // query_heads)
    rope = flat_rope(fields, head_dim, fields.integer("max_position_embeddings"))
    bias = fields.flag("attention_bias", False)
    return tuple(
        LayerConfig(
            attention=AttentionConfig(
                heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=rope,
                scale=head_dim**-0.5,
                kv_source=index,
                window=sight.window,
                qk_norm=qk_norm,
                bias=bias,
                out_bias=bias,
                causal=sight.causal,
                window_from_block=sight.window_from_block,
                in_width=2 * width if wide_first and index == 0 else None,
            ),
            mlp_width=fields.integer("intermediate_size"),
            activation=activation(fields, "hidden_act", "silu"),
            mlp_bias=fields.flag("mlp_bias", False),
        )
        for index, sight in enumerate(sights)
    )


def write_layers(config: DrafterConfig, what: str) -> dict[str, Any]:
    """The decoder fields of a config without its rope. `what` names the format where it cannot hold them."""
    first = config.layers[0]
    attention = first.attention
    windows = [layer.attention.window for layer in config.layers]
    if len({window for window in windows if window is not None}) > 1:
        raise InputError(f"{what} holds one sliding window for all layers; this drafter has {windows}")
    if first.mlp_width is None or first.moe is not None:
        raise InputError(f"{what} holds dense MLPs only")
    window = next((window for window in windows if window is not None), None)
    return {
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "head_dim": attention.head_dim,
        "hidden_act": first.activation,
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": first.mlp_width,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "max_position_embeddings": config.max_positions,
        "max_window_layers": len(config.layers),
        "mlp_bias": first.mlp_bias,
        "num_attention_heads": attention.heads,
        "num_hidden_layers": len(config.layers),
        "num_key_value_heads": attention.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": config.vocab_size,
    }


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` object of transformers 5, theta included."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.partial != 1.0:
        written["partial_rotary_factor"] = rope.partial
    if rope.kind in ("linear", "yarn", "llama3") or (rope.kind == "proportional" and rope.factor != 1.0):
        written["factor"] = rope.factor
    named = {
        "original_max_position_embeddings": rope.original_max_positions,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
    }
    if rope.kind == "yarn":
        named |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "truncate": rope.truncate,
        }
    return written | {name: value for name, value in named.items() if value is not None}


def write_flat_rope(rope: RopeConfig) -> dict[str, Any]:
    """The same as the flat keys of older configs: `rope_theta`, and `rope_scaling` (null where nothing is scaled)."""
    scaling = write_rope(rope)
    theta = scaling.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}

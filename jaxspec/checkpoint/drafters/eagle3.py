"""The flat EAGLE-3 format of yuhuili, SpecForge and others, and P-EAGLE's variant of it (SPEC 1a, 2a)."""

from collections.abc import Set
from typing import Any

from jaxspec.checkpoint.drafters.parsed import (
    Parsed,
    VerifierFacts,
    default_taps,
    extras,
    mask_token,
    own_embed_and_head,
    speculative_tokens,
    taps,
    vocabulary,
)
from jaxspec.checkpoint.drafters.transformer import (
    DEFAULT_THETA,
    LLAMA_DEFAULTS,
    Sight,
    read_layers,
    read_windows,
    refuse_unsupported,
    with_defaults,
    write_flat_rope,
    write_layers,
)
from jaxspec.drafters.config import DrafterConfig, EagleConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import Fields

NAME = "eagle3"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MASK_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")  # the order vLLM looks in
_DEFAULTS = {name: LLAMA_DEFAULTS[name] for name in ("max_position_embeddings", "rms_norm_eps")}


def read(fields: Fields, names: Set[str], num_layers: int | None) -> Parsed:
    """Arguments as in `speculators.read`. `eagle_config` counts where the top level lacks a key."""
    nested = {} if fields.get("eagle_config") is None else fields.section("eagle_config").data
    given = {name: value for name, value in fields.data.items() if value is not None}
    fields = with_defaults(Fields({**nested, **given}, fields.where), _DEFAULTS)
    model_type = fields.get("model_type")
    if model_type not in (None, "llama", "qwen3"):
        raise fields.error("model_type", f"is {model_type!r}; supported: llama, qwen3")
    refuse_unsupported(fields)
    window = fields.get("sliding_window")
    if window is not None and fields.get("layer_types") is None and fields.flag("use_sliding_window", True):
        raise fields.error("sliding_window", f"is {window}, but no layer_types says which layers slide")
    if not fields.flag("use_aux_hidden_state", True):
        raise fields.error("use_aux_hidden_state", "is false: a drafter on the last hidden state is not supported")
    own_embed, own_head = own_embed_and_head(names)
    if fields.flag("tie_word_embeddings", False) and own_embed and not own_head:
        raise fields.error("tie_word_embeddings", "is true without lm_head.weight, which is not supported")
    fields = _with_theta(fields)
    parallel = "mask_hidden" in names or any(fields.get(name) is not None for name in _MASK_NAMES)
    vocab_size, draft_vocab_size = vocabulary(fields, fields.integer("draft_vocab_size", fields.integer("vocab_size")))
    config = DrafterConfig(
        method="peagle" if parallel else "eagle3",
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        width=fields.integer("hidden_size"),
        taps=_read_taps(fields, num_layers),
        layers=read_layers(
            fields,
            [Sight(window=window) for _, window in read_windows(fields, qwen3="use_sliding_window" in fields.data)],
            qk_norm="layers.0.self_attn.q_norm.weight" in names,
            wide_first=True,
        ),
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
        own_embed=own_embed,
        own_head=own_head,
        logit_scale=fields.number("logit_scale", 1.0),
        mask_token=mask_token(fields, _MASK_NAMES, vocab_size) if parallel else None,
        eagle=_eagle(fields),
        speculative_tokens=speculative_tokens(fields, None),
    )
    return Parsed(config, VerifierFacts())


def write(config: DrafterConfig, verifier: VerifierFacts) -> dict[str, Any]:
    """A config.json as vLLM and SGLang read it; taps as aux ids, at top level and in `eagle_config`."""
    del verifier
    eagle = config.eagle
    if eagle is None:
        raise InputError(f"{NAME} holds EAGLE-3 and P-EAGLE drafters, not {config.method}")
    parallel = config.method == "peagle"
    data = {
        "architectures": ["PEagleDraftModel" if parallel else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        **write_layers(config, NAME),
        **write_flat_rope(config.layers[0].attention.rope),
        _TAPS: list(config.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            _TAPS: list(config.taps),
            "norm_before_fc": eagle.norm_before_fc,
        },
        "norm_before_residual": eagle.norm_before_residual,
        "norm_before_fc": eagle.norm_before_fc,
        "fc_norm": eagle.fc_norm,
        "norm_output": eagle.norm_output,
    }
    if parallel:
        data |= {"mask_token_id": config.mask_token, "ptd_token_id": config.mask_token}
    if config.logit_scale != 1.0:
        data["logit_scale"] = config.logit_scale
    return data | extras(config, None)


def _eagle(fields: Fields) -> EagleConfig:
    # The first EAGLE-3 files know none of these keys: their residual is the feature itself, which vLLM assumes too.
    eagle = EagleConfig(
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", fields.flag("use_aux_norm", False)),
        norm_output=fields.flag("norm_output", False),
    )
    if eagle.norm_before_fc and eagle.fc_norm:
        raise fields.error("norm_before_fc", "and fc_norm are both true; only one of them can be")
    return eagle


def _read_taps(fields: Fields, num_layers: int | None) -> tuple[int, ...]:
    if fields.get(_TAPS):
        return taps(fields, _TAPS, "aux", num_layers)
    if fields.get("target_layer_ids") is not None:
        return taps(fields, "target_layer_ids", "output", num_layers)
    return default_taps(fields, num_layers)


def _with_theta(fields: Fields) -> Fields:
    """The first EAGLE-3 files were trained with LlamaConfig's default theta, which they do not name."""
    parts = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    named = any(isinstance(part, dict) and part.get("rope_theta") is not None for part in parts)
    return fields if named else with_defaults(fields, {"rope_theta": DEFAULT_THETA})

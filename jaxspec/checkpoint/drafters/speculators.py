"""The format of vllm-project/speculators 0.9: all four methods, a nested decoder config (SPEC 0.4)."""

from collections.abc import Set
from typing import Any, get_args

from jaxspec.checkpoint.drafters.parsed import (
    Parsed,
    VerifierFacts,
    default_taps,
    extras,
    heads,
    mask_token,
    own_embed_and_head,
    taps,
    vocabulary,
)
from jaxspec.checkpoint.drafters.transformer import (
    DEFAULT_THETA,
    LLAMA_DEFAULTS,
    QWEN3_DEFAULTS,
    Sight,
    read_layers,
    read_windows,
    refuse_unsupported,
    with_defaults,
    write_layers,
    write_rope,
)
from jaxspec.drafters.config import BlockConfig, DrafterConfig, EagleConfig, Method
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import SLIDING, Fields, architectures

NAME = "speculators"
_ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
_TAPS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "peagle": "eagle_aux_hidden_state_layer_ids"}
_BLOCK_TAPS = "aux_hidden_state_layer_ids"
_DEFAULT_TOKENS = {"eagle3": 3, "peagle": 8}  # what speculators writes for these methods (SPEC 0.4)


def read(fields: Fields, names: Set[str], num_layers: int | None) -> Parsed:
    """`names`: the checkpoint's canonical tensor names; `num_layers`: the verifier's L where it is known."""
    method = fields.get("speculators_model_type")
    if method not in get_args(Method):
        raise fields.error("speculators_model_type", f"is {method!r}; supported: {', '.join(get_args(Method))}")
    layers = _decoder_fields(fields)
    model_type = layers.get("model_type")
    refuse_unsupported(Fields({**layers.data, **fields.data, "hidden_size": layers.get("hidden_size")}, fields.where))
    vocab_size, draft_vocab_size = vocabulary(layers, fields.integer("draft_vocab_size", 32000))
    tap_field = _TAPS.get(method, _BLOCK_TAPS)
    aux = (
        default_taps(fields, num_layers)
        if fields.get(tap_field) is None
        else taps(fields, tap_field, "aux", num_layers)
    )
    windows = read_windows(layers, qwen3=model_type == "qwen3")
    own_embed, own_head = own_embed_and_head(names)
    eagle = method in ("eagle3", "peagle")
    if eagle:
        sights = [Sight(window=window) for _, window in windows]
        # its embedding is trained, so the verifier's cannot stand in for it
        if not own_embed and fields.flag("embed_requires_grad", method == "peagle"):
            raise InputError(
                f"{fields.where}: embed_requires_grad is true, but the checkpoint holds no embed_tokens.weight"
            )
    else:
        # full layers see the whole block; so does a sliding layer without a window (speculators' mask)
        both_ways = fields.flag("sliding_window_non_causal", False)
        sights = [
            Sight(window is not None and not both_ways, window, window_from_block=window is not None)
            for _, window in windows
        ]
    config = DrafterConfig(
        method=method,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        width=layers.integer("hidden_size"),
        taps=aux,
        layers=read_layers(layers, sights, qk_norm=not eagle or model_type == "qwen3", wide_first=eagle),
        norm_eps=layers.positive("rms_norm_eps"),
        max_positions=layers.integer("max_position_embeddings"),
        own_embed=own_embed,
        own_head=own_head,
        mask_token=None if method == "eagle3" else mask_token(fields, ("mask_token_id",), vocab_size),
        eagle=_eagle(fields) if eagle else None,
        block=None if eagle else _block(fields, names, method),
        speculative_tokens=_speculative_tokens(fields),
    )
    return Parsed(config, _verifier(fields))


def write(config: DrafterConfig, verifier: VerifierFacts) -> dict[str, Any]:
    """The complete config.json, as speculators 0.9 reads it."""
    first = config.layers[0]
    layers = write_layers(config, NAME) | {"rope_parameters": write_rope(first.attention.rope)}
    eagle = config.eagle
    if eagle is not None and not first.attention.qk_norm:
        layers["model_type"] = "llama"
        if config.layers[0].attention.window is None and SLIDING not in layers["layer_types"]:
            del layers["layer_types"], layers["sliding_window"]
        del layers["use_sliding_window"], layers["max_window_layers"]
    else:
        layers["model_type"] = "qwen3"
    tokens = config.speculative_tokens or config.max_drafts or _DEFAULT_TOKENS[config.method]
    data = {
        "architectures": [_ARCHITECTURES[config.method]],
        "speculators_model_type": config.method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": layers,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        _TAPS.get(config.method, _BLOCK_TAPS): list(config.taps),
        "target_hidden_size": None,
    }
    if config.mask_token is not None:
        data["mask_token_id"] = config.mask_token
    if eagle is not None:
        data |= {
            "norm_before_residual": eagle.norm_before_residual,
            "norm_before_fc": eagle.norm_before_fc,
            "fc_norm": eagle.fc_norm,
            "norm_output": eagle.norm_output,
            "embed_requires_grad": config.method == "peagle" and config.own_embed,
        }
    if config.block is not None:
        data |= _written_block(config, config.block)
    return data | extras(config, tokens)


def _decoder_fields(fields: Fields) -> Fields:
    """`transformer_layer_config` with what transformers' class would add to it."""
    given = fields.section("transformer_layer_config")
    model_type = given.get("model_type") or "qwen3"
    if model_type not in ("llama", "qwen3"):
        raise given.error("model_type", f"is {model_type!r}; supported: llama, qwen3")
    merged = with_defaults(given, LLAMA_DEFAULTS if model_type == "llama" else QWEN3_DEFAULTS)
    data = {**merged.data, "model_type": model_type}
    rope = data.get("rope_parameters")
    if isinstance(rope, dict) and SLIDING in rope:  # speculators takes this entry for all layers
        rope = data["rope_parameters"] = rope[SLIDING]
    scaling = data.get("rope_scaling")
    if data.get("rope_theta") is None and not any(
        isinstance(part, dict) and part.get("rope_theta") is not None for part in (rope, scaling)
    ):
        data["rope_theta"] = DEFAULT_THETA
    return Fields(data, given.where)


def _eagle(fields: Fields) -> EagleConfig:
    eagle = EagleConfig(
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
    )
    if eagle.norm_before_fc and eagle.fc_norm:
        raise fields.error("norm_before_fc", "and fc_norm are both true; only one of them can be")
    return eagle


def _block(fields: Fields, names: Set[str], method: str) -> BlockConfig:
    size = fields.integer("block_size", 8)
    markov = confidence = None
    if method == "dspark":
        defaults = {"markov_rank": 256, "enable_confidence_head": True}
        markov, confidence = heads(fields, names, defaults, size)
    # DSpark files from before the field was there were trained without it, as vLLM reads them (SPEC 4a).
    return BlockConfig(size, fields.flag("sample_from_anchor", False), markov, confidence)


def _written_block(config: DrafterConfig, block: BlockConfig) -> dict[str, Any]:
    sliding = [layer.attention for layer in config.layers if layer.attention.window is not None]
    written: dict[str, Any] = {
        "block_size": block.size,
        "sample_from_anchor": block.sample_from_anchor,
        "sliding_window_non_causal": any(not attention.causal for attention in sliding),
    }
    if config.method == "dspark":
        confidence = block.confidence
        written |= {
            "markov_rank": 0 if block.markov is None else block.markov.rank,
            "markov_head_type": "vanilla" if block.markov is None else block.markov.kind,
            "enable_confidence_head": confidence is not None,
            "confidence_head_with_markov": confidence is not None and confidence.with_markov,
        }
    return written


def _speculative_tokens(fields: Fields) -> int | None:
    if fields.get("speculators_config") is None:
        return None
    section = fields.section("speculators_config")
    methods, default = section.get("proposal_methods"), section.get("default_proposal_method")
    if not isinstance(methods, list) or not methods or not all(isinstance(method, dict) for method in methods):
        return None
    named = [method for method in methods if default in (None, method.get("proposal_type"))]
    if not named:
        raise section.error("default_proposal_method", f"is {default!r}, which is none of its proposal_methods")
    proposal = Fields(named[0], f"{fields.where} speculators_config proposal_methods")
    return None if proposal.get("speculative_tokens") is None else proposal.integer("speculative_tokens")


def _verifier(fields: Fields) -> VerifierFacts:
    if fields.get("speculators_config") is None:
        return VerifierFacts()
    section = fields.section("speculators_config")
    if section.get("verifier") is None:
        return VerifierFacts()
    verifier = section.section("verifier")
    return VerifierFacts(verifier.get("name_or_path"), architectures(verifier.data))

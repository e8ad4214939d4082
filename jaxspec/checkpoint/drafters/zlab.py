"""z-lab's DFlash format, and SpecForge's DSpark in it: a flat Qwen3 config with `dflash_config` (SPEC 3a, 4a)."""

from collections.abc import Set
from typing import Any

from jaxspec.checkpoint.drafters.parsed import (
    Parsed,
    VerifierFacts,
    extras,
    heads,
    mask_token,
    own_embed_and_head,
    speculative_tokens,
    taps,
    vocabulary,
)
from jaxspec.checkpoint.drafters.transformer import (
    QWEN3_DEFAULTS,
    Sight,
    read_layers,
    read_windows,
    refuse_unsupported,
    with_defaults,
    write_flat_rope,
    write_layers,
)
from jaxspec.drafters.config import BlockConfig, DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import SLIDING, Fields, architectures
from jaxspec.verifiers.taps import default_output_ids

NAME = "z-lab"
_HEAD_DIM = {"head_dim": QWEN3_DEFAULTS["head_dim"]}
_BLOCK_SIZE = 16  # dflash 0.1 where no file says otherwise


def is_dspark(fields: Fields, names: Set[str]) -> bool:
    """Whether the file holds DSpark's heads: by its projector, its rank, its class or its tensors."""
    merged = _merged(fields)
    return (
        merged.get("projector_type") == "dspark"
        or merged.get("markov_rank") is not None
        or any("dspark" in str(name).lower() for name in architectures(fields.data))
        or any(name.startswith(("markov_head.", "confidence_head.")) for name in names)
    )


def read(fields: Fields, names: Set[str], num_layers: int | None) -> Parsed:
    """Every key is looked up in `dflash_config` first, then at top level. Arguments as in `speculators.read`."""
    spark = is_dspark(fields, names)
    merged = with_defaults(_merged(fields), _HEAD_DIM)
    model_type = merged.get("model_type")
    if model_type not in (None, "qwen3", "llama", "dflash", "dspark"):
        raise merged.error("model_type", f"is {model_type!r}; supported: qwen3")
    refuse_unsupported(merged)
    verifier_layers = num_layers
    if merged.get("num_target_layers") is not None:
        verifier_layers = merged.integer("num_target_layers")
    vocab_size, draft_vocab_size = vocabulary(merged, merged.integer("draft_vocab_size", merged.integer("vocab_size")))
    size = merged.integer("block_size") if spark else merged.integer("block_size", _BLOCK_SIZE)
    markov, confidence = heads(merged, names, None, size) if spark else (None, None)
    windows = read_windows(merged, qwen3=True)
    own_embed, own_head = own_embed_and_head(names)
    softcap = merged.optional_number("final_logit_softcapping")
    block = BlockConfig(size, merged.flag("sample_from_anchor", spark), markov, confidence)
    config = DrafterConfig(
        method="dspark" if spark else "dflash",
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        width=merged.integer("hidden_size"),
        taps=_taps(merged, verifier_layers),
        layers=read_layers(
            merged,
            [Sight(_causal(merged, sliding), window) for sliding, window in windows],
            qk_norm=True,
            wide_first=False,
        ),
        norm_eps=merged.positive("rms_norm_eps"),
        max_positions=merged.integer("max_position_embeddings"),
        own_embed=own_embed,
        own_head=own_head,
        embed_scale=merged.number("input_embedding_scale", 1.0),
        logit_scale=merged.number("output_multiplier", 1.0),
        logit_softcap=softcap if softcap and softcap > 0 else None,
        mask_token=mask_token(merged, ("mask_token_id", "dspark_noise_token_id"), vocab_size),
        block=block,
        speculative_tokens=speculative_tokens(merged, block.max_drafts),
    )
    return Parsed(config, VerifierFacts(num_layers=verifier_layers))


def write(config: DrafterConfig, verifier: VerifierFacts) -> dict[str, Any]:
    """The config.json of dflash 0.1. SpecForge's DSpark is read only: DeepSpec's and speculators' formats hold the same."""
    block = config.block
    if block is None or config.mask_token is None:
        raise InputError(f"{NAME} holds DFlash drafters, not {config.method}")
    if verifier.num_layers is None:
        raise InputError(f"{NAME} names the verifier's number of layers, which the source does not: give --verifier")
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [aux - 1 for aux in config.taps],
    }
    if config.embed_scale != 1.0:
        own["input_embedding_scale"] = config.embed_scale
    if config.logit_scale != 1.0:
        own["output_multiplier"] = config.logit_scale
    if config.logit_softcap is not None:
        own["final_logit_softcapping"] = config.logit_softcap
    layers = write_layers(config, NAME)
    data = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block.size,
        "dflash_config": own,
        "num_target_layers": verifier.num_layers,
        **layers,
        **write_flat_rope(config.layers[0].attention.rope),
    }
    causal = [layer.attention.causal for layer in config.layers]
    if causal != [kind == SLIDING for kind in layers["layer_types"]] and len(set(causal)) == 1:
        data["is_causal"] = causal[0]
    return data | extras(config, config.max_drafts)


def _merged(fields: Fields) -> Fields:
    own = {} if fields.get("dflash_config") is None else fields.section("dflash_config").data
    return Fields({**fields.data, **{name: value for name, value in own.items() if value is not None}}, fields.where)


def _causal(fields: Fields, sliding: bool) -> bool:
    """Within the block: `is_causal`, else `causal`, for all layers; else sliding layers are causal and full ones not."""
    for name in ("is_causal", "causal"):
        if fields.get(name) is not None:
            return fields.flag(name, False)
    return sliding


def _taps(fields: Fields, num_layers: int | None) -> tuple[int, ...]:
    if fields.get("target_layer_ids") is not None:
        return taps(fields, "target_layer_ids", "output", num_layers)
    if num_layers is None:
        raise InputError(f"{fields.where}: has neither target_layer_ids nor num_target_layers")
    return tuple(index + 1 for index in default_output_ids(num_layers, fields.integer("num_hidden_layers")))

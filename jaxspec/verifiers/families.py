"""From a Hugging Face `config.json` to a VerifierConfig, and the tensor-name table that goes with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxspec.config import VerifierConfig
from jaxspec.errors import InputError
from jaxspec.verifiers import gemma3, gemma4, llama, qwen3
from jaxspec.verifiers.hf import Fields, architectures
from jaxspec.verifiers.names import Table


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read. `nested`: the text model's fields stand under `text_config` (multimodal models)."""

    parse: Callable[[Fields], VerifierConfig]
    table: Table
    nested: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.parse, llama.TABLE),
    "qwen3": Family(qwen3.parse, qwen3.TABLE),
    "qwen3_moe": Family(qwen3.parse_moe, qwen3.MOE_TABLE),
    "gemma3_text": Family(gemma3.parse, gemma3.TABLE),
    "gemma3": Family(gemma3.parse, gemma3.TABLE, nested=True),
    "gemma4_text": Family(gemma4.parse, gemma4.TABLE),
    "gemma4": Family(gemma4.parse, gemma4.TABLE, nested=True),
    "gemma4_unified_text": Family(gemma4.parse_unified, gemma4.TABLE),
    "gemma4_unified": Family(gemma4.parse_unified, gemma4.TABLE, nested=True),
}

_DRAFTER_KEYS = {
    "dflash_config": "DFlash",
    "dspark_config": "DSpark",
    "dspark_target_layer_ids": "DSpark",
    "dspark_noise_token_id": "DSpark",
    "ptd_token_id": "P-EAGLE",
    "pard_token": "P-EAGLE",
    "eagle_config": "EAGLE-3",
    "eagle_aux_hidden_state_layer_ids": "EAGLE-3",
    "target_hidden_size": "EAGLE-3",
    "draft_vocab_size": "EAGLE-3",
    "markov_rank": "DSpark",
    "num_target_layers": "DFlash",
}
_DRAFTER_ARCHITECTURES = {
    "peagle": "P-EAGLE",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "eagle": "EAGLE-3",
    "speculator": "speculators",
}


def parse_config(data: dict[str, Any], where: str) -> tuple[VerifierConfig, Family]:
    """Reads the parsed `config.json`; `where` names the file in errors.

    Raises InputError for a drafter's config, a quantised model, an unknown `model_type`, and any missing or unsupported
    field.
    """
    if kind := drafter_kind(data):
        article = "an" if kind[0] == "E" else "a"
        raise InputError(f"{where}: this is {article} {kind} drafter, not a verifier; give it as --drafter")
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"{where}: model_type is {model_type!r}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    fields = Fields(data, where)
    if family.nested:
        text = fields.section("text_config")
        if data.get("tie_word_embeddings") is not None:  # the outer one decides, as in transformers
            text = Fields({**text.data, "tie_word_embeddings": data["tie_word_embeddings"]}, text.where)
        refuse_quantised(fields)
        fields = text
    refuse_quantised(fields)
    return family.parse(fields), family


def drafter_kind(data: dict[str, Any]) -> str | None:
    """The kind of drafter a config describes, None for anything else."""
    named = data.get("speculators_model_type")
    names = [named] if isinstance(named, str) else list(architectures(data))
    for name in names:
        for part, kind in _DRAFTER_ARCHITECTURES.items():
            if part in str(name).lower():
                return kind
    if named is not None:
        return f"speculators {named}"
    return next((kind for key, kind in _DRAFTER_KEYS.items() if key in data), None)


def refuse_quantised(fields: Fields) -> None:
    """Raises for weights that are not plain floats."""
    quantised = fields.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise fields.error(
            "quantization_config", f"names method {method!r}; only bf16, f16 and f32 weights are supported"
        )

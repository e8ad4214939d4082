"""The drafter formats, and which of them a checkpoint is in: by its config and its tensors, never by its path."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoint.drafters import deepspec, eagle3, speculators, zlab
from jaxspec.checkpoint.drafters.parsed import Parsed, VerifierFacts
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import Fields, architectures


@dataclass(frozen=True)
class Format:
    """How configs of one format are read and written.

    `read` takes the config's fields, the canonical names of the checkpoint's tensors, and the verifier's number of layers (None where
    it is not known). `write` gives the config.json.
    """

    name: str
    read: Callable[[Fields, Set[str], int | None], Parsed]
    write: Callable[[DrafterConfig, VerifierFacts], dict[str, Any]]


SPECULATORS = Format(speculators.NAME, speculators.read, speculators.write)
ZLAB = Format(zlab.NAME, zlab.read, zlab.write)
DEEPSPEC = Format(deepspec.NAME, deepspec.read, deepspec.write)
EAGLE3 = Format(eagle3.NAME, eagle3.read, eagle3.write)
FORMATS = {found.name: found for found in (SPECULATORS, ZLAB, DEEPSPEC, EAGLE3)}

_DEEPSPEC_CLASSES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen3Eagle3Model", "Gemma4Eagle3Model")


def find_format(fields: Fields, names: Set[str]) -> Format | None:
    """The format of a drafter; None where config and tensors are no drafter's.

    Every drafter projects features with `fc`. EAGLE's first layer has a norm for them, block drafters have one for all layers.
    DeepSpec and z-lab's flat files differ in what slot j predicts, so a DSpark without `dflash_config` counts as DeepSpec's unless it
    names SpecForge's class.
    """
    if fields.get("speculators_model_type") is not None:
        return SPECULATORS
    classes = architectures(fields.data)
    deepspec_class = any(name in _DEEPSPEC_CLASSES for name in classes)
    if "fc.weight" not in names:
        return None
    if "layers.0.hidden_norm.weight" in names:
        return DEEPSPEC if deepspec_class or fields.get("ttt_length") is not None else EAGLE3
    if "hidden_norm.weight" not in names:
        return None
    if deepspec_class:
        return DEEPSPEC
    if fields.get("dflash_config") is not None or "DSparkDraftModel" in classes:
        return ZLAB
    return DEEPSPEC if zlab.is_dspark(fields, names) else ZLAB


def detect_format(fields: Fields, names: Set[str]) -> Format:
    """As `find_format`; raises InputError where there is none."""
    found = find_format(fields, names)
    if found is not None:
        return found
    if any(name.startswith("layers.") for name in names) and "norm.weight" in names and "embed_tokens.weight" in names:
        raise InputError(f"{fields.where}: this is a model, not a drafter; give it as --model")
    raise InputError(
        f"{fields.where}: is no drafter of a known format ({', '.join(FORMATS)}): it has neither speculators_model_type nor "
        "the tensors fc.weight and hidden_norm.weight"
    )

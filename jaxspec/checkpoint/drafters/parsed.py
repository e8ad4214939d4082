"""What reading a drafter's config gives, and the pieces that the formats' readers share."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, get_args

from jaxspec.checkpoint.drafters.table import EMBED, HEAD
from jaxspec.drafters.config import ConfidenceConfig, DrafterConfig, MarkovConfig, MarkovKind
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import Fields
from jaxspec.verifiers.taps import TapConvention, aux_ids, default_aux_ids

NAMESPACE = "jaxspec"
_TEMPERATURES = "confidence_temperatures"
_TOKENS = "speculative_tokens"


@dataclass(frozen=True)
class VerifierFacts:
    """What a drafter's config says of its verifier; None and () where it does not. `num_layers` is L."""

    name: str | None = None
    architectures: tuple[str, ...] = ()
    num_layers: int | None = None


@dataclass(frozen=True)
class Parsed:
    """A drafter's config and its verifier."""

    config: DrafterConfig
    verifier: VerifierFacts


def own_embed_and_head(names: Set[str]) -> tuple[bool, bool]:
    """Whether the checkpoint holds an embedding and a head of its own."""
    return EMBED in names, HEAD in names


def taps(fields: Fields, name: str, convention: TapConvention, num_layers: int | None) -> tuple[int, ...]:
    """The aux ids of the list in field `name`. `num_layers`: the verifier's L where it is known."""
    ids = fields.get(name)
    if not isinstance(ids, list) or not all(isinstance(entry, int) for entry in ids):
        raise fields.error(name, f"is {ids!r}; a list of layer ids is wanted")
    try:
        return aux_ids(ids, convention, max([*ids, 0]) + 1 if num_layers is None else num_layers)
    except InputError as error:
        raise InputError(f"{fields.where}: {error}") from error


def default_taps(fields: Fields, num_layers: int | None) -> tuple[int, ...]:
    """The tap layers of a config that names none (SPEC 0.1)."""
    if num_layers is None:
        raise InputError(
            f"{fields.where}: names no tap layers; they follow from the verifier's number of layers: give the verifier"
        )
    return default_aux_ids(num_layers)


def vocabulary(fields: Fields, draft_vocab_size: int) -> tuple[int, int]:
    """V and Vd."""
    vocab_size = fields.integer("vocab_size")
    if draft_vocab_size > vocab_size:
        raise fields.error("draft_vocab_size", f"is {draft_vocab_size}, more than vocab_size {vocab_size}")
    return vocab_size, draft_vocab_size


def mask_token(fields: Fields, names: tuple[str, ...], vocab_size: int) -> int:
    """The mask token's id from the first of the fields `names` that is there."""
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        raise InputError(f"{fields.where}: has no mask token; {' or '.join(names)} is wanted")
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise fields.error(name, f"is {value!r}, not an id of the verifier's vocabulary, 0 to {vocab_size - 1}")
    return value


def heads(
    fields: Fields, names: Set[str], defaults: dict[str, Any] | None, block_size: int
) -> tuple[MarkovConfig | None, ConfidenceConfig | None]:
    """DSpark's sequential and confidence heads. `defaults`: values of absent fields; None takes them from the tensors."""
    if defaults is None:
        if fields.get("markov_rank") is None and "markov_head.markov_w1.weight" in names:
            raise InputError(f"{fields.where}: required field markov_rank is missing")
        defaults = {"markov_rank": 0, "enable_confidence_head": "confidence_head.proj.weight" in names}
    rank = fields.count("markov_rank", defaults["markov_rank"])
    kind = fields.get("markov_head_type") or "vanilla"
    if rank and kind not in get_args(MarkovKind):
        raise fields.error("markov_head_type", f"is {kind!r}; supported: {', '.join(get_args(MarkovKind))}")
    markov = MarkovConfig(kind, rank) if rank else None
    if not fields.flag("enable_confidence_head", defaults["enable_confidence_head"]):
        return markov, None
    with_markov = fields.flag("confidence_head_with_markov", True)
    if with_markov and markov is None:
        raise fields.error(
            "confidence_head_with_markov", "is true, but markov_rank is 0: there is no embedding for it to see"
        )
    return markov, ConfidenceConfig(with_markov, _temperatures(fields, block_size))


def speculative_tokens(fields: Fields, implied: int | None) -> int | None:
    """The recommended K of a format that has no field for it: jaxspec's own entry, else what the format implies."""
    if fields.get(NAMESPACE) is None:
        return implied
    own = fields.section(NAMESPACE)
    return implied if own.get(_TOKENS) is None else own.integer(_TOKENS)


def extras(config: DrafterConfig, implied_tokens: int | None) -> dict[str, Any]:
    """What the format has no field for, under jaxspec's own key: {} for nothing. `implied_tokens`: the K it implies."""
    own: dict[str, Any] = {}
    confidence = None if config.block is None else config.block.confidence
    if confidence is not None and confidence.temperatures:
        own[_TEMPERATURES] = list(confidence.temperatures)
    if config.speculative_tokens not in (None, implied_tokens):
        own[_TOKENS] = config.speculative_tokens
    return {NAMESPACE: own} if own else {}


def with_temperatures(data: dict[str, Any], temperatures: tuple[float, ...]) -> dict[str, Any]:
    """A config.json of any format with other temperatures of the confidence head, under jaxspec's own key."""
    return data | {NAMESPACE: (data.get(NAMESPACE) or {}) | {_TEMPERATURES: list(temperatures)}}


def _temperatures(fields: Fields, block_size: int) -> tuple[float, ...]:
    if fields.get(NAMESPACE) is None:
        return ()
    own = fields.section(NAMESPACE)
    values = own.get(_TEMPERATURES) or []
    positive = isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values)
    if not positive or len(values) not in (0, block_size, block_size - 1):
        raise own.error(_TEMPERATURES, f"is {values!r}; one positive number for each drafting slot is wanted")
    return tuple(float(value) for value in values)

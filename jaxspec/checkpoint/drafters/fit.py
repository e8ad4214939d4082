"""Making a drafter fit a format: what may be dropped, what must be lent, and a refusal for whatever would be lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from jaxspec.checkpoint.drafters.checks import check_verifier
from jaxspec.checkpoint.drafters.content import DrafterContent, Lender, as_host
from jaxspec.checkpoint.drafters.formats import DEEPSPEC, SPECULATORS, ZLAB, Format
from jaxspec.checkpoint.drafters.load import EMBED_PATH, HEAD_PATH, own_shapes
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.drafters.table import table
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import Fields
from jaxspec.verifiers.names import Path as ParameterPath
from jaxspec.verifiers.names import expand

DROPS: Mapping[str, str] = {
    "markov": "the sequential head",
    "confidence": "the confidence head",
    "embed": "the drafter's own embedding; the verifier's takes its place",
    "head": "the drafter's own output head; the verifier's takes its place",
    "window": "the way its sliding windows count, from the block (speculators) or from each token; the format's takes its place",
}
_LENT = {"embed": EMBED_PATH, "head": HEAD_PATH}


@dataclass(frozen=True)
class Fitted:
    """A drafter as the format holds it, its config.json, and what was done to it, in words."""

    content: DrafterContent
    data: dict[str, Any]
    notes: tuple[str, ...]


def fit(content: DrafterContent, target: Format, drop: Sequence[str] = (), verifier: Lender | None = None) -> Fitted:
    """Raises InputError where the format cannot hold the drafter, for a needed verifier that is not given, and for a `drop` that is
    not there.
    """
    facts, dropped = check_fit(content, target, drop, verifier)
    notes = [f"dropped {DROPS[name]}" for name in drop]
    lent, lending_notes = _embed_and_head(dropped, target, verifier)
    fitted = replace(lent, verifier=facts)
    return Fitted(fitted, target.write(fitted.config, facts), (*notes, *lending_notes))


def check_fit(
    content: DrafterContent, target: Format, drop: Sequence[str] = (), verifier: Lender | None = None
) -> tuple[VerifierFacts, DrafterContent]:
    """Raises InputError as `fit`, but for embedding and head, whose values it does not look at. Returns what is known of the verifier, and
    the content without the parts of `drop`."""
    facts = facts_of(content, verifier)
    dropped = apply_drops(content, drop, target)
    _refuse_known(dropped.config, target)
    _check_held(dropped.config, target, facts)
    return facts, dropped


def facts_of(content: DrafterContent, verifier: Lender | None) -> VerifierFacts:
    """What is known of the drafter's verifier, with `verifier` if that is given. Raises InputError where it is another's."""
    if verifier is not None:
        check_verifier(content.config, content.verifier.num_layers, verifier.config, f"--verifier {verifier.name}")
    return _facts(content.verifier, verifier)


def apply_drops(content: DrafterContent, drop: Sequence[str], target: Format | None) -> DrafterContent:
    """The content without the parts named in `drop`. `target`: the format to be written, None for one that holds everything."""
    config = content.config
    for name in drop:
        if name not in DROPS:
            raise InputError(f"--drop {name}: known are {', '.join(DROPS)}")
        without = _without(config, name, drop, target)
        if without == config:
            raise InputError(f"--drop {name}: this drafter has none: {DROPS[name]}")
        config = without
    own = own_shapes(config)
    return replace(
        content, config=config, parameters={path: v for path, v in content.parameters.items() if path in own}
    )


def _without(config: DrafterConfig, name: str, drop: Sequence[str], target: Format | None) -> DrafterConfig:
    block = config.block
    if name in _LENT:
        return replace(config, **{f"own_{name}": False})
    if block is None or (name == "window" and target is None):
        return config
    if name == "window":
        layers = tuple(
            replace(
                layer,
                attention=replace(
                    layer.attention,
                    window_from_block=layer.attention.window is not None and target is SPECULATORS,
                ),
            )
            for layer in config.layers
        )
        return replace(config, layers=layers)
    if name == "markov":
        if block.confidence is not None and block.confidence.with_markov and "confidence" not in drop:
            raise InputError(
                "--drop markov: the confidence head sees its embedding; drop both: --drop markov,confidence"
            )
        return replace(config, block=replace(block, markov=None))
    return replace(config, block=replace(block, confidence=None))


def _refuse_known(config: DrafterConfig, target: Format) -> None:
    """The refusals whose reason is better than a list of fields."""
    eagle, block = config.eagle is not None, config.block
    if target is ZLAB:
        if eagle:
            raise InputError(f"{target.name} holds DFlash drafters, not {config.method}")
        if block is not None and (block.markov is not None or block.confidence is not None):
            parts = [name for name in ("markov", "confidence") if getattr(block, name) is not None]
            raise InputError(
                f"{target.name} holds DFlash drafters, which have no {' and no '.join(DROPS[part][4:] for part in parts)}; to "
                f"write one without: --drop {','.join(parts)}"
            )
        if block is not None and block.sample_from_anchor:
            raise InputError(
                f"{target.name}: there the anchor's slot drafts nothing; in this drafter it does (sample_from_anchor)"
            )
    if target in (ZLAB, DEEPSPEC) and config.reduced_vocab:
        raise InputError(
            f"{target.name} has no d2t: it cannot hold a draft vocabulary of {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens"
        )
    if target is DEEPSPEC and config.method == "peagle":
        raise InputError(f"{target.name} holds DSpark, DFlash and EAGLE-3 drafters, not peagle")
    if config.layers[0].sandwich and target is not DEEPSPEC:
        raise InputError(f"{target.name} has no Gemma-4 layers; only {DEEPSPEC.name} holds this drafter")
    if target not in (SPECULATORS, DEEPSPEC, ZLAB) and not eagle:
        raise InputError(f"{target.name} holds EAGLE-3 and P-EAGLE drafters, not {config.method}")


def _embed_and_head(
    content: DrafterContent, target: Format, verifier: Lender | None
) -> tuple[DrafterContent, list[str]]:
    """With the verifier's where the format wants both, without copies of the verifier's where it wants none."""
    config, parameters, notes = content.config, dict(content.parameters), []
    # speculators 0.9 finds missing embeddings of EAGLE files by chance only: it looks for NaN in memory that is not initialised
    wanted = target is DEEPSPEC or (target is SPECULATORS and config.block is None)
    # speculators' block drafters borrow both, but for the head of a reduced vocabulary; it overwrites what a file holds
    unwanted = set(_LENT) if target is ZLAB or (target is SPECULATORS and config.block is not None) else set()
    if config.reduced_vocab:
        unwanted -= {"head"}
    for name, path in _LENT.items():
        if path not in parameters and wanted:
            if verifier is None:
                raise InputError(f"{target.name} holds the {name}, which this drafter borrows: give --verifier")
            value = verifier.read(path)
            rows = content.target_ids if name == "head" else None
            parameters[path] = value if rows is None else value[rows]
            notes.append(f"took the {name} from the verifier")
        elif path in parameters and name in unwanted:
            if verifier is not None and np.array_equal(as_host(parameters[path]), verifier.read(path)):
                del parameters[path]
                notes.append(f"left out the {name}: it equals the verifier's")
            elif verifier is not None or target is ZLAB:
                hint = "" if verifier is not None else " (--verifier shows whether it equals the verifier's)"
                raise InputError(
                    f"{target.name} puts the verifier's {name} in the place of a {config.method} drafter's own, and this drafter "
                    f"has one{hint}; to write it without: --drop {name}"
                )
            else:
                notes.append(f"kept the {name}; speculators itself puts the verifier's in its place")
    config = replace(config, own_embed=EMBED_PATH in parameters, own_head=HEAD_PATH in parameters)
    return replace(content, config=config, parameters=parameters), notes


def _facts(source: VerifierFacts, verifier: Lender | None) -> VerifierFacts:
    if verifier is None:
        return source
    given = verifier.facts
    return VerifierFacts(source.name or given.name, source.architectures or given.architectures, given.num_layers)


def _check_held(config: DrafterConfig, target: Format, facts: VerifierFacts) -> None:
    """Writes the config.json, reads it back and compares: whatever differs would be lost."""
    shapes = own_shapes(config)
    names = {link.name for link in expand(table(config), shapes, "")}
    where = f"as {target.name}"
    # whether the verifier's number of layers is known is another question
    data = target.write(config, replace(facts, num_layers=facts.num_layers or config.taps[-1] + 1))
    held = target.read(Fields(data, where), names, facts.num_layers).config
    lost = _differences(_essence(config), _essence(held), "")
    if lost:
        hint = (
            "; to write it all the same: --drop window" if all("window_from_block" in entry for entry in lost) else ""
        )
        raise InputError(f"{target.name} cannot hold this drafter: {', '.join(lost[:4])}{hint}")


def _essence(config: DrafterConfig) -> DrafterConfig:
    """Without what a format may say otherwise: a DSpark without heads is a DFlash, and K is only a recommendation."""
    block = config.block
    headless = config.method == "dspark" and block is not None and block.markov is None and block.confidence is None
    return replace(config, method="dflash" if headless else config.method, speculative_tokens=None)


def _differences(ours: Any, theirs: Any, name: str) -> list[str]:
    if is_dataclass(ours) and type(ours) is type(theirs):
        return [
            entry
            for field in fields(ours)
            for entry in _differences(
                getattr(ours, field.name), getattr(theirs, field.name), f"{name}.{field.name}".lstrip(".")
            )
        ]
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        return [
            entry
            for index, (our, their) in enumerate(zip(ours, theirs, strict=True))
            for entry in _differences(our, their, f"{name}[{index}]")
        ]
    return [] if ours == theirs else [f"its {name} is {ours!r}, and would be {theirs!r}"]


def parameter_paths(content: DrafterContent) -> list[ParameterPath]:
    """The content's parameters in the module's order."""
    return [path for path in own_shapes(content.config) if path in content.parameters]

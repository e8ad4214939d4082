"""Writing a drafter: the name table read in the other direction, a config.json of the format, maps as int64 and bool."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.config_json import to_json
from jaxspec.checkpoint.drafters.content import DrafterContent, Lender, as_host
from jaxspec.checkpoint.drafters.fit import DROPS, Fitted, apply_drops, check_fit, facts_of, fit, parameter_paths
from jaxspec.checkpoint.drafters.formats import EAGLE3, FORMATS, Format
from jaxspec.checkpoint.drafters.load import ORBAX, TARGET_IDS_PATH, OpenedDrafter
from jaxspec.checkpoint.drafters.parsed import with_temperatures
from jaxspec.checkpoint.drafters.table import table
from jaxspec.checkpoint.drafters.vocab import stored_maps
from jaxspec.checkpoint.orbax import replace_manifest, write_orbax
from jaxspec.checkpoint.write import MAX_SHARD_BYTES, new_directory, replace_json, write_json, write_tensors
from jaxspec.errors import InputError
from jaxspec.verifiers.names import Link, expand


def save_drafter(
    path: Path,
    content: DrafterContent,
    target: str,
    *,
    dtype: np.dtype | None = None,
    drop: Sequence[str] = (),
    verifier: Lender | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[str, ...]:
    """Writes the new directory `path` in format `target` (of `FORMATS`, or "orbax"); returns what was done to the drafter, in words.

    dtype: of every weight; None keeps each parameter's own. drop, verifier: see `fit.fit`. Raises InputError where the format cannot
    hold the drafter and where `path` exists.
    """
    if target == ORBAX:
        dropped = replace(apply_drops(content, drop, None), verifier=facts_of(content, verifier))
        with new_directory(path) as work:
            _write_orbax(work, dropped, dtype)
        return tuple(f"dropped {DROPS[name]}" for name in drop)
    found = FORMATS[target]
    fitted = fit(content, found, drop, verifier)
    with new_directory(path) as work:
        tensors = list(_stored_tensors(fitted.content, found, dtype))
        write_tensors(work, tensors, max_shard_bytes)
        write_json(work / "config.json", fitted.data | _dtype_entry(fitted, dtype))
    return fitted.notes


def check_savable(
    content: DrafterContent, target: str, *, drop: Sequence[str] = (), verifier: Lender | None = None
) -> None:
    """Raises InputError where `save_drafter` would because of the drafter's kind, without looking at its weights."""
    if target == ORBAX:
        facts_of(content, verifier)
        apply_drops(content, drop, None)
    else:
        check_fit(content, FORMATS[target], drop, verifier)


def store_temperatures(opened: OpenedDrafter, temperatures: tuple[float, ...]) -> None:
    """Stores the confidence head's temperatures, one for each draft, with the drafter, in place of those that are there: the file of its
    config is replaced whole, and no other file is touched. Raises InputError where it cannot be written.
    """
    block = opened.config.block
    if block is None or block.confidence is None:
        raise ValueError("this drafter has no confidence head")
    try:
        if opened.format == ORBAX:
            confidence = replace(block.confidence, temperatures=temperatures)
            config = replace(opened.config, block=replace(block, confidence=confidence))
            replace_manifest(opened.path, opened.raw_config | {"config": to_json(config)})
        else:
            replace_json(opened.path / "config.json", with_temperatures(opened.raw_config, temperatures))
    except OSError as error:
        raise InputError(f"{opened.path}: cannot be written: {error.strerror or error}") from error


def _stored_tensors(
    content: DrafterContent, target: Format, dtype: np.dtype | None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value) of every tensor of the file."""
    config = content.config
    shapes = {path: tuple(content.parameters[path].shape) for path in parameter_paths(content)}
    for link in expand(table(config), shapes, ""):
        value = _cast(as_host(content.parameters[link.path]), dtype)
        yield _name(link, target, len(config.layers)), np.ascontiguousarray(value.reshape(link.shape))
    if content.target_ids is not None:
        yield from stored_maps(content.target_ids, config.vocab_size).items()


def _name(link: Link, target: Format, layers: int) -> str:
    """EAGLE-3's one layer is called midlayer in its first format; P-EAGLE's several are not."""
    if target is EAGLE3 and layers == 1:
        return link.name.replace("layers.0.", "midlayer.", 1)
    return link.name


def _cast(value: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    return value if dtype is None else value.astype(dtype, copy=False)


def _dtype_entry(fitted: Fitted, dtype: np.dtype | None) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for value in fitted.content.parameters.values():
        name = str(dtype or value.dtype)
        sizes[name] = sizes.get(name, 0) + int(value.size)
    return {"dtype": max(sizes, key=lambda name: sizes[name])}


def _write_orbax(directory: Path, content: DrafterContent, dtype: np.dtype | None) -> None:
    arrays = {path: _cast(as_host(content.parameters[path]), dtype) for path in parameter_paths(content)}
    if content.target_ids is not None:
        arrays[TARGET_IDS_PATH] = content.target_ids
    manifest = {"config": to_json(content.config), "verifier": to_json(content.verifier)}
    write_orbax(directory, "drafter", manifest, arrays)

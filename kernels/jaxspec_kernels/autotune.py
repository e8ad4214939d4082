"""Block sizes found by trying them, kept in one file for each kind of device.

Nothing tunes by itself: `tune` measures and remembers, and from then on the kernels take what it found for those shapes.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import platformdirs

from jaxspec_kernels.implementation import has_gpu

C = TypeVar("C", bound=Any)  # a kernel's Config, a frozen dataclass


def tuned(kernel: str, shapes: str, default: C) -> C:
    """The config that `tune` has found for these shapes on this kind of device, else `default`."""
    if not has_gpu():
        return default
    found = _read(cache_file()).get(f"{kernel} {shapes}")
    try:
        return default if found is None else type(default)(**found)
    except TypeError:  # of a version with other fields
        return default


def tune(
    kernel: str, shapes: str, candidates: Sequence[C], run: Callable[[C], Callable[[], Any]], repeats: int = 20
) -> C:
    """Measure every candidate and remember the quickest.

    Args:
        kernel: its name.
        shapes: what the config is remembered under, as the kernel's `describe` has it.
        candidates: configs; those that do not compile are passed over. The first one wins ties, and must compile.
        run: compiles a config and returns what runs it, a fixed number of times if once is too short to time from the host.
        repeats: runs of each; the median counts.
    """
    best, least = candidates[0], float("inf")
    for config in candidates:
        try:
            once = run(config)
            jax.block_until_ready(once())
        except Exception:
            if config == candidates[0]:
                raise
            continue
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(once())
            seconds.append(time.perf_counter() - start)
        median = sorted(seconds)[repeats // 2]
        if median < least:
            best, least = config, median
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {**_read(file), f"{kernel} {shapes}": asdict(best)}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1))
    partial.replace(file)
    _read.cache_clear()
    return best


def cache_file() -> Path:
    """Where the default device's configs are kept."""
    kind = jax.devices()[0].device_kind.replace(" ", "_").replace("/", "_")
    return platformdirs.user_cache_path("jaxspec", appauthor=False) / "kernels" / f"{kind}.json"


@cache
def _read(file: Path) -> dict[str, dict[str, int]]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}

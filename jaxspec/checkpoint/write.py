"""Writing checkpoint directories: all or nothing, in one file or in shards with an index."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxspec.errors import InputError

MAX_SHARD_BYTES = 4_000_000_000
_FULL = {"No space left": errno.ENOSPC, "File too large": errno.EFBIG, "quota exceeded": errno.EDQUOT}


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to write into, beside `path`; renamed to `path` at the end, so that an interrupted run leaves none that looks
    complete. Raises InputError where `path` exists or cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise InputError(f"{path}: exists already")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield work
        work.chmod(0o755)
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_tensors(
    directory: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """`model.safetensors`, or shards of at most `max_shard_bytes` (a larger tensor has one to itself) and their index."""
    shard: dict[str, np.ndarray] = {}
    files: list[list[str]] = []
    size = total = 0
    for name, value in tensors:
        if shard and size + value.nbytes > max_shard_bytes:
            files.append(_write_shard(directory, len(files), shard))
            shard, size = {}, 0
        shard[name] = value
        size += value.nbytes
        total += value.nbytes
    files.append(_write_shard(directory, len(files), shard))
    _name_shards(directory, files, total)


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """One safetensors file. Raises OSError where it cannot be written, for which safetensors has an error of its own."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = next((n for text, n in _FULL.items() if text in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number) if number != errno.EIO else str(error), str(path)) from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A JSON file as Hugging Face writes them."""
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def replace_json(path: Path, data: dict[str, Any]) -> None:
    """Puts `data` in the place of a JSON file, whole or not at all. Raises OSError where it cannot be written."""
    work = path.with_name(f".{path.name}.part")
    try:
        write_json(work, data)
        shutil.copymode(path, work)
        with work.open("rb") as file:
            os.fsync(file.fileno())
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def _write_shard(directory: Path, index: int, tensors: dict[str, np.ndarray]) -> list[str]:
    path = directory / f"{index}.part"
    path.touch()
    mode = path.stat().st_mode  # the user's umask; save_file would leave 0600
    save_tensors(tensors, path)
    path.chmod(mode)
    return list(tensors)


def _name_shards(directory: Path, files: list[list[str]], total: int) -> None:
    if len(files) == 1:
        (directory / "0.part").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        shard = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"{index}.part").rename(directory / shard)
        weight_map.update(dict.fromkeys(names, shard))
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )

"""Reading safetensors files: headers checked against the file's size before anything else, tensors read one at a time.

The safetensors package writes our files; it is not used to read because its error for a short file names neither the
file nor how much is missing, and because reading into plain memory keeps a shard's pages from counting twice.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.source import StoredTensor
from jaxspec.errors import InputError

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}

MAP_DTYPES: dict[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What vocabulary maps are stored as; never weights."""

_READABLE = DTYPES | MAP_DTYPES
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the limit of the format's own implementation


@dataclass(frozen=True)
class Header:
    """Byte offset of each tensor in the file, and what it is."""

    tensors: dict[str, StoredTensor]
    offsets: dict[str, int]


class SafetensorsSource:
    """The tensors of a checkpoint directory: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    Raises InputError for a directory without either, a missing shard, and a file that is damaged or of another length
    than its header says.
    """

    def __init__(self, directory: Path):
        self.where = str(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self._offsets: dict[str, int] = {}
        index = directory / _INDEX
        try:
            self._open(directory, index)
        except OSError as error:
            raise InputError(f"{error.filename or directory}: cannot be read: {error.strerror or error}") from error

    def _open(self, directory: Path, index: Path) -> None:
        if (directory / _SINGLE).is_file():
            self._add(directory / _SINGLE)
        elif index.is_file():
            self._add_shards(index)
        else:
            found = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
            raise InputError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there; found: {found}")

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as stored: one of `DTYPES` or `MAP_DTYPES`."""
        stored = self.tensors[name]
        values = np.fromfile(
            stored.file, _READABLE[stored.dtype], count=math.prod(stored.shape), offset=self._offsets[name]
        )
        return values.reshape(stored.shape)

    def _add(self, path: Path) -> None:
        header = read_header(path)
        for name in header.tensors:
            if name in self.tensors:
                raise InputError(f"{path}: tensor {name} is also in {self.tensors[name].file.name}")
        self.tensors.update(header.tensors)
        self._offsets.update(header.offsets)

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(f"{index}: weight_map must be an object of tensor names and file names")
        for shard in sorted(set(weight_map.values())):
            path = index.parent / shard
            if Path(shard).name != shard or not path.is_file():
                raise InputError(f"{index}: shard {shard} is not there")
            self._add(path)
        for name, shard in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != shard:
                raise InputError(f"{index}: tensor {name} is not in {shard}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. Raises InputError naming the file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds a {type(data).__name__}; an object is wanted")
    return data


def read_header(path: Path) -> Header:
    """What a safetensors file holds, and where. Raises InputError where it is damaged or not as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if start.startswith(b"version "):
            raise InputError(f"{path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if len(start) < _LENGTH_BYTES:
            raise InputError(
                f"{path}: truncated: {_LENGTH_BYTES - len(start)} bytes of the header's length are missing"
            )
        length = int.from_bytes(start, "little")
        if length > _MAX_HEADER:
            raise InputError(f"{path}: is not a safetensors file: its header would be {length} bytes long")
        if length > size - _LENGTH_BYTES:
            raise InputError(f"{path}: truncated: {length + _LENGTH_BYTES - size} bytes of the header are missing")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors, offsets, end = {}, {}, 0
        for name, entry in entries.items():
            begin, stop = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
            if not all(type(number) is int and number >= 0 for number in (begin, stop, *shape)):
                raise ValueError(f"tensor {name} has shape {list(shape)} at {begin}..{stop}")
            tensors[name] = StoredTensor(shape, dtype, stop - begin, path)
            offsets[name] = _LENGTH_BYTES + length + begin
            end = max(end, stop)
            if dtype in _READABLE and stop - begin != math.prod(shape) * _READABLE[dtype].itemsize:
                raise InputError(f"{path}: tensor {name} of shape {list(shape)} and {dtype} has {stop - begin} bytes")
        at = 0
        for begin, stop, name in sorted((*entry["data_offsets"], name) for name, entry in entries.items()):
            if begin != at:
                raise ValueError(f"tensor {name} begins at {begin}, and the one before it ends at {at}")
            at = stop
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: its safetensors header is damaged: {error}") from error
    missing = _LENGTH_BYTES + length + end - size
    if missing > 0:
        raise InputError(f"{path}: truncated: {missing} bytes are missing of the {size + missing} its header describes")
    if missing < 0:
        raise InputError(f"{path}: {-missing} bytes too long for what its header describes")
    return Header(tensors, offsets)

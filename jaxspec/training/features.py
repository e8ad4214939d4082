"""The verifier's features: computed over packed rows, or written to disk once and read from there.

On disk features are addressed by content: every document has an entry under a hash of its tokens, so that more samples only add to a
directory. What the directory was made with stands in its index and is checked on every opening.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.config_json import to_json
from jaxspec.checkpoint.load import OpenedVerifier
from jaxspec.checkpoint.safetensors import DTYPES, read_header, read_json
from jaxspec.checkpoint.write import save_tensors
from jaxspec.errors import InputError
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.training.attention import Span, two_part_attention
from jaxspec.training.batch import Batch, Features
from jaxspec.training.packing import Packed, batches
from jaxspec.training.samples import Sample
from jaxspec.verifiers.decoder import Decoder

QUERY_BLOCK = 256  # queries whose scores are held at a time
SHARD_BYTES = 128_000_000
_INDEX = "features.json"
_VERSION = 1
_HASHED_TENSORS = 32

Compute = Callable[[Batch], Features]
"""Features of a batch, by a compiled program."""


def packed_features(decoder: Decoder, batch: Batch, taps: Sequence[int]) -> Features:
    """The features of a batch, every document as if it stood alone. taps: increasing aux ids."""
    config, x = decoder.config, decoder.embed(batch.tokens)
    per_layer = decoder.per_layer_inputs(batch.tokens, x) if config.per_layer_width else None
    rows, length = batch.tokens.shape
    size = min(QUERY_BLOCK, length)
    missing = -length % size

    def blocked(y: jax.Array) -> jax.Array:
        """[B, T, ...] -> [B, T / size, size, ...], padded."""
        y = jnp.pad(y, ((0, 0), (0, missing), *((0, 0),) * (y.ndim - 2)))
        return y.reshape(rows, -1, size, *y.shape[2:])

    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), batch.tokens.shape)
    start = index - batch.positions
    keys_values: dict[int, tuple[jax.Array, jax.Array]] = {}
    tapped = []
    for i, each in enumerate(decoder.layers):
        layer = cast(DecoderLayer, each)
        if i in taps:
            tapped.append(x)
        attention, sight = layer.attention, layer.attention.config
        with jax.named_scope(f"layer_{i}"):
            y = layer.input_norm(x)
            if sight.kv_source == i:
                keys_values[i] = attention.keys_values(y, batch.positions)
            first = start if sight.window is None else jnp.maximum(start, index - sight.window + 1)
            attended = two_part_attention(
                blocked(attention.queries(y, batch.positions)),
                keys_values[sight.kv_source],
                Span(blocked(first), blocked(index + 1)),
                scale=sight.scale,
                softcap=sight.softcap,
                chunk=1,
            )
            attended = attended.reshape(rows, length + missing, *attended.shape[3:])[:, :length]
            x = layer.finish(x, attention.o(attended), None if per_layer is None else per_layer[:, :, i])
    if len(decoder.layers) in taps:
        tapped.append(x)
    return Features(jnp.concatenate(tapped, axis=-1), x)


def fingerprint(opened: OpenedVerifier) -> str:
    """A hash of the verifier's config and of some of its weights, the same for the same checkpoint wherever it lies."""
    digest = hashlib.blake2b(json.dumps(to_json(opened.config), sort_keys=True).encode(), digest_size=16)
    by_hash = sorted(opened.source.tensors, key=lambda name: hashlib.blake2b(name.encode()).digest())
    for name in by_hash[:_HASHED_TENSORS]:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(opened.source.read(name)).view(np.uint8).data)
    return digest.hexdigest()


def key_of(tokens: np.ndarray) -> str:
    """Under which a document's features are stored: a hash of its tokens int32 [T]."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class FeatureSource:
    """What features were made with.

    `verifier`: its fingerprint. `taps`: aux ids in the order of their columns; the last stream stands behind them. `dtype`: of the files.
    """

    verifier: str
    taps: tuple[int, ...]
    width: int
    dtype: str

    def json(self) -> dict[str, Any]:
        """For the index."""
        return {
            "version": _VERSION,
            "verifier": self.verifier,
            "taps": list(self.taps),
            "width": self.width,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class _Entry:
    file: Path
    offset: int
    length: int


class FeatureStore:
    """A directory of features. Raises InputError where it is damaged or was made with another verifier or other taps."""

    def __init__(self, directory: Path, wanted: FeatureSource):
        """`wanted.taps` may be some of the directory's."""
        self.directory = directory
        index = directory / _INDEX
        if not index.is_file():
            raise InputError(
                f"data.features {directory}: has no {_INDEX}; --write-features writes features there, and without data.features they "
                "are computed while training"
            )
        found = read_json(index)
        self._source = _checked(found, wanted, index)
        width = wanted.width
        order = {tap: at for at, tap in enumerate(self._source.taps)}
        self._columns = [slice(order[tap] * width, (order[tap] + 1) * width) for tap in wanted.taps]
        self._stored_width = (len(self._source.taps) + 1) * width
        self._width = width
        self._dtype = DTYPES[_DTYPE_NAMES[self._source.dtype]]
        self._entries = _entries(directory, self._stored_width)

    def require(self, samples: Sequence[Sample]) -> None:
        """Raises InputError where features of a sample are missing."""
        lacking = [sample for sample in samples if key_of(sample.tokens) not in self._entries]
        if lacking:
            raise InputError(
                f"data.features {self.directory}: lacks {len(lacking)} of {len(samples)} samples, the first of them "
                f"{lacking[0].source}; --write-features adds them"
            )

    def read(self, key: str) -> np.ndarray:
        """A document's [T, (taps + 1) * D] as stored."""
        entry = self._entries[key]
        count = entry.length * self._stored_width
        values = np.fromfile(entry.file, self._dtype, count=count, offset=entry.offset)
        return values.reshape(entry.length, self._stored_width)

    def join(self, packed: Packed, samples: Sequence[Sample], own: Collection[int] | None = None) -> Features:
        """The features of a packed batch, in the dtype of the files; zeros where rows are padded. own: numbers of the rows that are wanted,
        if not all; the others stay zeros."""
        rows, length = packed.batch.tokens.shape
        taps = np.zeros((rows, length, len(self._columns) * self._width), self._dtype)
        last = np.zeros((rows, length, self._width), self._dtype)
        whole = len(self._columns) == len(self._source.taps)
        for row in range(rows) if own is None else own:
            at = 0
            for index in packed.indices[row]:
                stored = self.read(key_of(samples[index].tokens))
                stop = at + len(stored)
                if whole:
                    taps[row, at:stop] = stored[:, : -self._width]
                else:
                    np.concatenate([stored[:, part] for part in self._columns], axis=1, out=taps[row, at:stop])
                last[row, at:stop] = stored[:, -self._width :]
                at = stop
        return Features(cast(jax.Array, taps), cast(jax.Array, last))


def write_features(
    samples: Sequence[Sample],
    directory: Path,
    source: FeatureSource,
    compute: Compute,
    *,
    rows: int,
    length: int,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Adds the features of samples that the directory lacks; returns how many those were.

    Every file is written whole under another name first, so an interrupted run leaves nothing half done and the next one goes on.

    Args:
        compute: gives [rows, length] batches their features, with the taps of `source`.
        rows, length: of those batches.
        progress: called with (tokens done, tokens in all).

    Raises:
        InputError: the directory was made with something else, cannot be written, or the dtype cannot hold a feature.
    """
    index = directory / _INDEX
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not index.is_file():
            _write_whole(index, lambda path: path.write_text(json.dumps(source.json(), indent=2) + "\n", "utf-8"))
        found = _checked(read_json(index), source, index)
        if found != source:
            raise InputError(
                f"{index}: was made with taps {list(found.taps)} and {found.dtype}; nothing else can be added"
            )
        stored_width = (len(source.taps) + 1) * source.width
        there = _entries(directory, stored_width)
        todo: dict[str, Sample] = {}
        for sample in samples:
            key = key_of(sample.tokens)
            if key not in there:
                todo.setdefault(key, sample)
        total, done = sum(len(sample.tokens) for sample in todo.values()), 0
        dtype = DTYPES[_DTYPE_NAMES[source.dtype]]
        number = _next_shard(directory)
        tensors: dict[str, np.ndarray] = {}
        size = 0
        for key, values in _computed(todo, compute, rows, length):
            tensors[key] = _stored(values, dtype, todo[key])
            done += len(values)
            size += tensors[key].nbytes
            if size >= SHARD_BYTES or done == total:
                path = directory / f"features-{number:05d}.safetensors"
                _write_whole(path, lambda work, tensors=tensors: save_tensors(tensors, work))
                number, tensors, size = number + 1, {}, 0
            if progress is not None:
                progress(done, total)
    except OSError as error:
        raise InputError(f"data.features {directory}: cannot be written: {error.strerror or error}") from error
    return len(todo)


def _computed(todo: Mapping[str, Sample], compute: Compute, rows: int, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """(key, [T, (taps + 1) * D]) of every sample."""
    if not todo:
        return
    keys, samples = list(todo), list(todo.values())
    for packed in batches(samples, rows, length, shuffle=False):
        features = jax.device_get(compute(packed.batch))
        for row, documents in enumerate(packed.indices):
            at = 0
            for sample in documents:
                stop = at + len(samples[sample].tokens)
                yield keys[sample], np.concatenate([features.taps[row, at:stop], features.last[row, at:stop]], axis=-1)
                at = stop


def _stored(values: np.ndarray, dtype: np.dtype, sample: Sample) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast_values = values.astype(dtype)
    if not np.isfinite(cast_values).all():
        what = (
            "are NaN or Inf"
            if not np.isfinite(values).all()
            else f"don't fit into {dtype}; bfloat16 or float32 is wanted"
        )
        raise InputError(f"{sample.source}: its features {what}")
    return cast_values


_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _checked(found: Mapping[str, Any], wanted: FeatureSource, index: Path) -> FeatureSource:
    """What the index says. Raises InputError where that is not what is wanted."""
    try:
        version = found["version"]
        made = FeatureSource(found["verifier"], tuple(found["taps"]), found["width"], found["dtype"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{index}: is damaged: {error}") from error
    if version != _VERSION:
        raise InputError(f"{index}: version is {version!r}; this jaxspec reads {_VERSION}")
    if made.verifier != wanted.verifier or made.width != wanted.width:
        raise InputError(f"{index}: these features are another verifier's; name another directory, or remove this one")
    if not set(wanted.taps) <= set(made.taps):
        raise InputError(
            f"{index}: these features are of taps {list(made.taps)}; the drafter's are {list(wanted.taps)}"
        )
    return made


def _entries(directory: Path, stored_width: int) -> dict[str, _Entry]:
    entries = {}
    for file in _shard_files(directory):
        header = read_header(file)
        for key, stored in header.tensors.items():
            if len(stored.shape) != 2 or stored.shape[1] != stored_width:
                raise InputError(f"{file}: {key} is {list(stored.shape)}; [tokens, {stored_width}] is wanted")
            entries[key] = _Entry(file, header.offsets[key], math.prod(stored.shape[:1]))
    return entries


def _shard_files(directory: Path) -> Iterable[Path]:
    return sorted(directory.glob("features-*.safetensors"))


def _next_shard(directory: Path) -> int:
    numbers = [int(file.stem.rpartition("-")[2]) for file in _shard_files(directory)]
    return max(numbers, default=-1) + 1


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    work = path.with_name(f".{path.name}.part")
    try:
        work.touch()
        mode = work.stat().st_mode  # the user's umask; safetensors would leave 0600
        write(work)
        work.chmod(mode)
        with work.open("rb") as file:
            os.fsync(file.fileno())
        work.rename(path)
    finally:
        work.unlink(missing_ok=True)

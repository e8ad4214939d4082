"""From stored tensors to parameters: one at a time, checked to be finite, cast, and placed."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.checkpoint.safetensors import DTYPES
from jaxspec.checkpoint.source import Source
from jaxspec.errors import InputError
from jaxspec.sharding import ShapesAndAxes
from jaxspec.verifiers.names import Link
from jaxspec.verifiers.names import Path as ParameterPath

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after every tensor."""

Place = Callable[[np.ndarray, ParameterPath, tuple[str, ...]], jax.Array]
"""Takes a finished parameter, its path and its logical axes to the device or devices it shall live on."""

Links = Mapping[ParameterPath, Sequence[tuple[Link, str]]]
"""For every parameter its links, each with the stored tensor's name."""

_FINITE_CHUNK = 1 << 22  # elements checked at once, so that the check needs little memory


def flat_parameters(state: nnx.State) -> dict[ParameterPath, nnx.Variable]:
    """The parameters of a module's state by path, in order."""
    return {cast(ParameterPath, path): leaf for path, leaf in nnx.to_flat_state(state)}


def shapes_and_axes(parameters: Mapping[ParameterPath, nnx.Variable]) -> ShapesAndAxes:
    """Shape and logical axes of (abstract) parameters by path."""
    return {path: (tuple(leaf.shape), leaf.get_metadata()["axes"]) for path, leaf in parameters.items()}


def fill_parameters(
    parameters: Mapping[ParameterPath, nnx.Variable],
    links: Links,
    source: Source,
    progress: Progress | None,
    place: Place | None,
) -> dict[ParameterPath, nnx.Variable]:
    """The abstract `parameters` with their values: cast to each one's dtype, then placed (by default on JAX's default device).

    Raises InputError for a tensor with a NaN or an infinity.
    """
    reader = Reader(source, progress, {name for tied in links.values() for _, name in tied})
    filled = {}
    for path, leaf in parameters.items():
        value = reader.parameter(links[path], tuple(leaf.shape), np.dtype(leaf.dtype))
        filled[path] = leaf.replace((place or device_put)(value, path, leaf.get_metadata()["axes"]))
    return filled


class Reader:
    """Reads parameters from stored tensors, checks that they are finite, and reports progress.

    A stored tensor that fills two parameters (gate and up in one) is kept until the second is made.
    """

    def __init__(self, source: Source, progress: Progress | None, names: set[str]):
        self._source = source
        self._progress = progress
        self._total = sum(source.tensors[name].nbytes for name in names)
        self._done = 0
        self._kept: tuple[str, np.ndarray] | None = None

    def parameter(
        self, links: Sequence[tuple[Link, str]], shape: tuple[int, ...], dtype: np.dtype | None = None
    ) -> np.ndarray:
        """The parameter that `links` fill, cast to `dtype` (None: as stored)."""
        if len(links) == 1 and links[0][0].expert is None:
            value = self._part(*links[0]).reshape(shape)
            return value if dtype is None else value.astype(dtype, copy=False)
        dtype = dtype or DTYPES[self._source.tensors[links[0][1]].dtype]
        value = np.empty(shape, dtype)
        for link, name in links:
            value[link.expert] = self._part(link, name)
        return value

    def _part(self, link: Link, name: str) -> np.ndarray:
        if link.half is None:
            return self._read(name)
        values = self._kept[1] if self._kept is not None and self._kept[0] == name else self._read(name)
        self._kept = (name, values) if link.half == 0 else None
        middle = values.shape[1] // 2
        return np.ascontiguousarray(values[:, :middle] if link.half == 0 else values[:, middle:])

    def _read(self, name: str) -> np.ndarray:
        values = self._source.read(name)
        stored = self._source.tensors[name]
        if not _finite(values):
            raise InputError(f"{stored.file}: tensor {name} has NaN or Inf")
        self._done += stored.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return values


def _finite(values: np.ndarray) -> bool:
    flat = values.reshape(-1)
    return all(np.isfinite(flat[at : at + _FINITE_CHUNK]).all() for at in range(0, flat.size, _FINITE_CHUNK))


def device_put(value: np.ndarray, path: ParameterPath, axes: tuple[str, ...]) -> jax.Array:
    """The `Place` to JAX's default device."""
    return jax.device_put(value)


def stored_dtype(source: Source) -> np.dtype:
    """The dtype most bytes are stored in."""
    sizes = dict.fromkeys(DTYPES, 0)
    for tensor in source.tensors.values():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
    return DTYPES[max(sizes, key=lambda name: sizes[name])]


def default_dtype(stored: np.dtype) -> np.dtype:
    """The dtype to compute in where none is asked for: float32 on CPUs, else the stored one (bfloat16 for float16)."""
    if jax.default_backend() == "cpu" or stored == np.float32:
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16)


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    """A dtype asked for. Raises InputError for any but float32 and bfloat16."""
    found = jnp.dtype(dtype)
    if found == np.float16:
        raise InputError("dtype float16: models trained in bfloat16 overflow in it; use bfloat16 or float32")
    if found not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise InputError(f"dtype {found}: float32 or bfloat16 is wanted")
    return found

"""Loading a verifier: a directory, a hub id or a .gguf file becomes a filled Decoder, one tensor at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from jax.typing import DTypeLike

from jaxspec.checkpoint.eos import eos_ids
from jaxspec.checkpoint.gguf import GgufSource
from jaxspec.checkpoint.match import Match, match
from jaxspec.checkpoint.safetensors import DTYPES, SafetensorsSource, read_json
from jaxspec.checkpoint.source import Source
from jaxspec.config import VerifierConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.families import Family, parse_config
from jaxspec.verifiers.names import Link
from jaxspec.verifiers.names import Path as ParameterPath

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after every tensor."""

Place = Callable[[np.ndarray, ParameterPath, tuple[str, ...]], jax.Array]
"""Takes a finished parameter, its path and its logical axes to the device or devices it shall live on."""

_FINITE_CHUNK = 1 << 22  # elements checked at once, so that the check needs little memory
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class LoadedVerifier:
    """A verifier in memory.

    `tokenizer_source`: the directory with the tokenizer's files, or the .gguf file that holds it. `eos_ids`: every id
    that ends a text, from generation config, config and tokenizer together. `source_dtype`: what the weights were
    stored as. `hf_config`: the text model's fields as in a `config.json`. `left_out`: a summary of the tensors that are
    no part of the text model, "" for none.
    """

    config: VerifierConfig
    module: Decoder
    tokenizer_source: Path
    eos_ids: tuple[int, ...]
    path: Path
    source_dtype: np.dtype
    hf_config: dict[str, Any]
    left_out: str


def load_verifier(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
    place: Place | None = None,
) -> LoadedVerifier:
    """Loads a checkpoint directory, a hub id (honours HF_HUB_OFFLINE) or a .gguf file.

    dtype: float32 or bfloat16; None takes float32 on CPUs and the checkpoint's own elsewhere (bfloat16 for float16
    files). place: where a finished parameter goes, by default `jax.device_put`. Host memory beside the finished
    parameters stays at one parameter and one stored tensor.

    Raises InputError, one line, for everything that is wrong with the path, the config or the weights.
    """
    wanted = None if dtype is None else _checked_dtype(dtype)
    path = resolve(path_or_id)
    opened = _open_gguf(path) if path.is_file() else _open_directory(path)
    module, found, stored = _fill(opened, wanted, progress, place or _device_put)
    return LoadedVerifier(
        config=opened.config,
        module=module,
        tokenizer_source=opened.tokenizer_source,
        eos_ids=opened.eos_ids,
        path=path,
        source_dtype=stored,
        hf_config=opened.hf_config,
        left_out=found.left_out,
    )


def resolve(path_or_id: str | Path) -> Path:
    """A local directory or .gguf file; a hub id is looked up in the cache or downloaded. Raises InputError where there
    is neither.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise InputError(f"{path}: is a file, but not a .gguf; a directory, a hub id or a .gguf file is wanted")
    if path.is_absolute() or len(path.parts) != 2 or path.suffix == ".gguf" or path.parts[0] in (".", "..", "~"):
        raise InputError(f"{path_or_id}: no such directory or file, and not a hub id of the form owner/name")
    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path_or_id}: not a directory, and not found in the hub or its cache: {reason}") from error


def abstract_decoder(config: VerifierConfig, dtype: DTypeLike) -> Decoder:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def flat_parameters(state: nnx.State) -> dict[ParameterPath, nnx.Variable]:
    """The parameters of a module's state by path, in order."""
    return {cast(ParameterPath, path): leaf for path, leaf in nnx.to_flat_state(state)}


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose config is read and whose weights are not."""

    config: VerifierConfig
    family: Family
    source: Source
    hf_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    tokenizer_source: Path


def _open_gguf(path: Path) -> _Opened:
    source = GgufSource(path)
    config, family = parse_config(source.hf_config, str(path))
    tokenizer_source = path.parent if (path.parent / "tokenizer.json").is_file() else path
    return _Opened(config, family, source, source.hf_config, source.eos_ids, tokenizer_source)


def _open_directory(path: Path) -> _Opened:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path}: has no config.json")
    data = read_json(config_file)
    config, family = parse_config(data, str(config_file))
    text_config = data["text_config"] if family.nested else data
    return _Opened(config, family, SafetensorsSource(path), text_config, eos_ids(path, data), path)


def _fill(
    opened: _Opened, wanted: np.dtype | None, progress: Progress | None, place: Place
) -> tuple[Decoder, Match, np.dtype]:
    source, family = opened.source, opened.family
    stored = _stored_dtype(source)
    graph, state = nnx.split(abstract_decoder(opened.config, wanted or _default_dtype(stored)))
    parameters = flat_parameters(state)
    shapes = {path: tuple(leaf.shape) for path, leaf in parameters.items()}
    found = match(family.table, opened.config, shapes, source, family.nested)
    reader = _Reader(source, progress, {name for links in found.links.values() for _, name in links})
    filled = {}
    for path, leaf in parameters.items():
        value = reader.parameter(found.links[path], shapes[path], np.dtype(leaf.dtype))
        filled[path] = leaf.replace(place(value, path, leaf.get_metadata()["axes"]))
    return nnx.merge(graph, nnx.from_flat_state(filled)), found, stored


class _Reader:
    """Reads parameters from stored tensors, checks that they are finite, and reports progress.

    A stored tensor that fills two parameters (gate and up in one) is kept until the second is made.
    """

    def __init__(self, source: Source, progress: Progress | None, names: set[str]):
        self._source = source
        self._progress = progress
        self._total = sum(source.tensors[name].nbytes for name in names)
        self._done = 0
        self._kept: tuple[str, np.ndarray] | None = None

    def parameter(self, links: Sequence[tuple[Link, str]], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The parameter that `links` fill, cast to `dtype`."""
        if len(links) == 1 and links[0][0].expert is None:
            return self._part(*links[0]).astype(dtype, copy=False).reshape(shape)
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


def _device_put(value: np.ndarray, path: ParameterPath, axes: tuple[str, ...]) -> jax.Array:
    return jax.device_put(value)


def _stored_dtype(source: Source) -> np.dtype:
    """The dtype most bytes are stored in."""
    sizes = dict.fromkeys(DTYPES, 0)
    for tensor in source.tensors.values():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
    return DTYPES[max(sizes, key=lambda name: sizes[name])]


def _default_dtype(stored: np.dtype) -> np.dtype:
    if jax.default_backend() == "cpu" or stored == np.float32:
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16)


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    found = jnp.dtype(dtype)
    if found == np.float16:
        raise InputError("dtype float16: models trained in bfloat16 overflow in it; use bfloat16 or float32")
    if found not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise InputError(f"dtype {found}: float32 or bfloat16 is wanted")
    return found

"""Loading a verifier: a directory, a hub id or a .gguf file becomes a filled Decoder, one tensor at a time."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoint.eos import eos_ids
from jaxspec.checkpoint.fill import (
    Place,
    Progress,
    Reader,
    checked_dtype,
    default_dtype,
    fill_parameters,
    flat_parameters,
    shapes_and_axes,
    stored_dtype,
)
from jaxspec.checkpoint.gguf import GgufSource
from jaxspec.checkpoint.match import Match, head_is_embedding, match
from jaxspec.checkpoint.orbax import OrbaxSource, is_orbax, read_manifest, tie_own_names
from jaxspec.checkpoint.safetensors import SafetensorsSource, read_json
from jaxspec.checkpoint.source import Source
from jaxspec.config import VerifierConfig
from jaxspec.errors import InputError
from jaxspec.sharding import verifier_layout
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.families import Family, parse_config
from jaxspec.verifiers.hf import Fields
from jaxspec.verifiers.names import Path as ParameterPath

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "mask_embedding.pt"]


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
    mesh: Mesh | None = None,
) -> LoadedVerifier:
    """Loads a checkpoint directory (safetensors, or orbax as `jaxspec.convert` writes it), a hub id (honours HF_HUB_OFFLINE) or a
    .gguf file.

    dtype: float32 or bfloat16; None takes float32 on CPUs and the checkpoint's own elsewhere (bfloat16 for float16
    files). place: where a finished parameter goes, by default `jax.device_put`. mesh: the devices to split it over, in
    place of `place`. Host memory beside the finished parameters stays at one parameter and one stored tensor.

    Raises InputError, one line, for everything that is wrong with the path, the config or the weights, and for a mesh
    that the model cannot be split over.
    """
    wanted = None if dtype is None else checked_dtype(dtype)
    opened = open_verifier(path_or_id)
    source = opened.source
    stored = stored_dtype(source)
    config, dtype = opened.config, wanted or default_dtype(stored)
    graph, state = nnx.split(abstract_decoder(config, dtype))
    parameters = flat_parameters(state)
    found = opened.tie(parameters)
    if mesh is not None:
        layout = verifier_layout(mesh, config, shapes_and_axes(parameters))
        config, place = layout.fitted(config), layout.place
        graph = nnx.graphdef(abstract_decoder(config, dtype))
    filled = fill_parameters(parameters, found.links, source, progress, place)
    return LoadedVerifier(
        config=config,
        module=nnx.merge(graph, nnx.from_flat_state({path: filled[path] for path in parameters})),
        tokenizer_source=opened.tokenizer_source,
        eos_ids=opened.eos_ids,
        path=opened.path,
        source_dtype=stored,
        hf_config=opened.hf_config,
        left_out=found.left_out,
    )


@dataclass(frozen=True)
class OpenedVerifier:
    """A checkpoint whose config is read and whose weights are not."""

    config: VerifierConfig
    family: Family
    source: Source
    hf_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    tokenizer_source: Path
    path: Path

    def tie(self, parameters: dict[ParameterPath, nnx.Variable]) -> Match:
        """Finds the tensors of the (abstract) parameters; see `match`."""
        shapes = {path: tuple(leaf.shape) for path, leaf in parameters.items()}
        if isinstance(self.source, OrbaxSource):
            return tie_own_names(shapes, self.source, set())
        return match(self.family.table, self.config, shapes, self.source, self.family.nested)

    def read(self, path: ParameterPath) -> np.ndarray:
        """One parameter as stored."""
        parameters = flat_parameters(nnx.state(abstract_decoder(self.config, np.float32)))
        links = self.tie(parameters).links[path]
        reader = Reader(self.source, None, {name for _, name in links})
        return reader.parameter(links, tuple(parameters[path].shape))


def open_verifier(path_or_id: str | Path) -> OpenedVerifier:
    """Reads the config and finds the tensors of what `load_verifier` loads."""
    path = resolve(path_or_id)
    if path.is_file():
        return _open_gguf(path)
    return _open_orbax(path) if is_orbax(path) else _open_directory(path)


def resolve(path_or_id: str | Path, revision: str | None = None) -> Path:
    """A local directory or .gguf file; a hub id, at a branch, tag or commit if `revision` names one, is looked up in the cache or
    downloaded. Raises InputError where there is neither, and for a revision of what is no hub id.
    """
    if not str(path_or_id):
        raise InputError("the path is empty; a directory, a hub id or a .gguf file is wanted")
    path = _readable(Path(path_or_id))
    if path.exists() and revision is not None:
        raise InputError(f"{path}: is local and has no revision {revision!r}; only a hub id has one")
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise InputError(f"{path}: is a file, but not a .gguf; a directory, a hub id or a .gguf file is wanted")
    if path.is_absolute() or len(path.parts) != 2 or path.suffix == ".gguf" or path.parts[0] in (".", "..", "~"):
        raise InputError(f"{path_or_id}: no such directory or file, and not a hub id of the form owner/name")
    try:
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path_or_id}: not a directory, and not found in the hub or its cache: {reason}") from error


def _readable(path: Path) -> Path:
    """The path with its ~ replaced. Raises InputError where it is there and cannot be read."""
    try:
        path = path.expanduser()
        if path.is_dir():
            os.scandir(path).close()
            (path / "config.json").exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return path


def abstract_decoder(config: VerifierConfig, dtype: DTypeLike) -> Decoder:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def _open_gguf(path: Path) -> OpenedVerifier:
    source = GgufSource(path)
    config, family = parse_config(source.hf_config, str(path))
    tokenizer_source = path.parent if (path.parent / "tokenizer.json").is_file() else path
    return OpenedVerifier(config, family, source, source.hf_config, source.eos_ids, tokenizer_source, path)


def _open_directory(path: Path) -> OpenedVerifier:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path}: has no config.json")
    data = read_json(config_file)
    config, family = parse_config(data, str(config_file))
    text_config = data["text_config"] if family.nested else data
    source = SafetensorsSource(path)
    if config.tied and not head_is_embedding(source):  # as transformers, which then does not tie them
        config = replace(config, tied=False)
    return OpenedVerifier(config, family, source, text_config, eos_ids(path, data), path, path)


def _open_orbax(path: Path) -> OpenedVerifier:
    manifest = Fields(read_manifest(path, "verifier"), str(path))
    hf_config = manifest.section("config").data
    config, family = parse_config(hf_config, manifest.where)
    ids = tuple(manifest.get("eos_ids") or ())
    return OpenedVerifier(config, family, OrbaxSource(path), hf_config, ids, path, path)

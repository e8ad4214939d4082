"""Orbax directories: parameters under their paths in the module, beside a manifest that says what they are.

For use by JAX programs: `arrays` is an ordinary orbax checkpoint of one flat dictionary.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.match import Match, tie
from jaxspec.checkpoint.safetensors import DTYPES, MAP_DTYPES, read_json
from jaxspec.checkpoint.source import StoredTensor
from jaxspec.checkpoint.write import replace_json, write_json
from jaxspec.errors import InputError
from jaxspec.verifiers.names import Link
from jaxspec.verifiers.names import Path as ParameterPath

Kind = Literal["verifier", "drafter"]

_MANIFEST = "jaxspec.json"
_ARRAYS = "arrays"
_VERSION = 1
_DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | MAP_DTYPES).items()}


def is_orbax(directory: Path) -> bool:
    """Whether `directory` is one of these."""
    return (directory / _MANIFEST).is_file()


def kind_of(directory: Path) -> str | None:
    """What the manifest says that the directory holds."""
    return read_json(directory / _MANIFEST).get("kind")


def write_orbax(
    directory: Path, kind: Kind, manifest: dict[str, Any], arrays: Mapping[ParameterPath, np.ndarray | jax.Array]
) -> None:
    """Writes parameters, in their dtypes, and manifest into an existing directory."""
    tree = {name_of(path): value for path, value in arrays.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((directory / _ARRAYS).absolute(), args=ocp.args.PyTreeSave(tree))
    write_json(directory / _MANIFEST, {"version": _VERSION, "kind": kind, **manifest})


def read_manifest(directory: Path, kind: Kind) -> dict[str, Any]:
    """The manifest. Raises InputError where it is damaged, of a newer version, or of the other kind."""
    where = directory / _MANIFEST
    manifest = read_json(where)
    if manifest.get("version") != _VERSION:
        raise InputError(f"{where}: version is {manifest.get('version')!r}; this jaxspec reads {_VERSION}")
    if manifest.get("kind") != kind:
        flag = "--drafter" if manifest.get("kind") == "drafter" else "--model"
        raise InputError(f"{where}: this is a {manifest.get('kind')}, not a {kind}; give it as {flag}")
    return manifest


def replace_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Puts another manifest beside the arrays. Raises OSError where it cannot be written."""
    replace_json(directory / _MANIFEST, manifest)


class OrbaxSource:
    """The parameters of an orbax directory, read one at a time. Raises InputError where it is damaged."""

    def __init__(self, directory: Path):
        self.where = str(directory)
        self._path = (directory / _ARRAYS).absolute()
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        try:
            metadata = self._checkpointer.metadata(self._path).item_metadata
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from error
        if metadata is None:
            raise InputError(f"{self._path}: is not an orbax checkpoint")
        self.tensors = {name: self._stored(entry.shape, np.dtype(entry.dtype)) for name, entry in metadata.tree.items()}

    def read(self, name: str) -> np.ndarray:
        """The parameter `name` as stored."""
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        arguments = ocp.args.PyTreeRestore(item={name: 0}, restore_args={name: as_numpy}, partial_restore=True)
        try:
            return self._checkpointer.restore(self._path, args=arguments)[name]
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _stored(self, shape: tuple[int, ...], dtype: np.dtype) -> StoredTensor:
        name = _DTYPE_NAMES.get(dtype, str(dtype))
        return StoredTensor(tuple(shape), name, math.prod(shape) * dtype.itemsize, self._path)

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self._path}: cannot be read (damaged or incomplete): {str(error).splitlines()[0]}")


def tie_own_names(shapes: Mapping[ParameterPath, tuple[int, ...]], source: OrbaxSource, beside: set[str]) -> Match:
    """As `match.tie`, for parameters stored under their own paths; `beside`: what else may be there."""
    links = [(Link(name_of(path), shape, path), name_of(path)) for path, shape in shapes.items()]
    return tie(links, source, lambda name: name in beside)


def name_of(path: ParameterPath) -> str:
    """('layers', 0, 'norm') -> "layers.0.norm"."""
    return ".".join(map(str, path))

"""Loading a drafter: a directory or hub id of any format becomes a filled module."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec import demo
from jaxspec.checkpoint.config_json import from_json
from jaxspec.checkpoint.drafters.checks import check_verifier
from jaxspec.checkpoint.drafters.formats import detect_format
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.drafters.table import CanonicalSource, ignored, table
from jaxspec.checkpoint.drafters.vocab import read_target_ids
from jaxspec.checkpoint.fill import (
    Links,
    Place,
    Progress,
    checked_dtype,
    default_dtype,
    device_put,
    fill_parameters,
    flat_parameters,
    shapes_and_axes,
    stored_dtype,
)
from jaxspec.checkpoint.load import LoadedVerifier, resolve
from jaxspec.checkpoint.match import tie
from jaxspec.checkpoint.orbax import OrbaxSource, is_orbax, name_of, read_manifest, tie_own_names
from jaxspec.checkpoint.safetensors import SafetensorsSource, read_json
from jaxspec.checkpoint.source import Source
from jaxspec.drafters.build import build_drafter
from jaxspec.drafters.config import DrafterConfig
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.peagle import PEagle
from jaxspec.errors import InputError
from jaxspec.sharding import drafter_layout
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.hf import Fields
from jaxspec.verifiers.names import Path as ParameterPath
from jaxspec.verifiers.names import expand

ORBAX = "orbax"

DrafterModule = Eagle3 | PEagle | DFlash | DSpark

EMBED_PATH: ParameterPath = ("vocabulary", "embed", "weight")
HEAD_PATH: ParameterPath = ("vocabulary", "head", "weight")
TARGET_IDS_PATH: ParameterPath = ("vocabulary", "target_ids")


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter in memory.

    `format`: what the checkpoint was stored in. `raw_config`: its config.json. `verifier`: what the checkpoint says of the verifier
    that it was made for. `borrowed`: what the verifier lent, of "embed" and "head"; their arrays are the verifier's own where the
    dtypes agree. `source_dtype`: what most weights were stored as.
    """

    config: DrafterConfig
    module: DrafterModule
    format: str
    path: Path
    raw_config: dict[str, Any]
    verifier: VerifierFacts
    borrowed: tuple[str, ...]
    source_dtype: np.dtype


@dataclass(frozen=True)
class OpenedDrafter:
    """A checkpoint whose config is read and whose tensors are known, all of them accounted for, but not read.

    `links`: where each of its own parameters comes from. `target_ids`: int32 [Vd], None for the whole vocabulary.
    """

    config: DrafterConfig
    format: str
    path: Path
    raw_config: dict[str, Any]
    verifier: VerifierFacts
    source: Source
    links: Links
    target_ids: np.ndarray | None


def load_drafter(
    path_or_id: str | Path,
    *,
    verifier: LoadedVerifier | None,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    place: Place | None = None,
    mesh: Mesh | None = None,
) -> LoadedDrafter:
    """Loads a checkpoint directory or a hub id, at `revision` if given; its format is found from its config and tensors.

    verifier: the model it drafts for; None only for drafters that hold an embedding and a head of their own. dtype: float32 or
    bfloat16; None takes the verifier's. place: where a finished parameter goes, by default `jax.device_put`. mesh: the devices of its
    verifier, to split it over (`sharding.drafter_layout`), in place of `place`; what the verifier lends is then shared as it lies there.

    Raises InputError, one line, for everything that is wrong with the path, the config or the weights, and for a drafter of another
    verifier.
    """
    opened = open_drafter(path_or_id, None if verifier is None else verifier.config.num_layers, revision)
    config = opened.config
    if verifier is not None:
        check_verifier(config, opened.verifier.num_layers, verifier.config, str(opened.path))
    borrowed = tuple(name for name, own in (("embed", config.own_embed), ("head", config.own_head)) if not own)
    if borrowed and verifier is None:
        raise InputError(
            f"{opened.path}: holds no {' and no '.join(borrowed)} of its own: give the verifier it belongs to"
        )
    stored = stored_dtype(opened.source)
    if dtype is not None:
        wanted = checked_dtype(dtype)
    else:
        wanted = default_dtype(stored) if verifier is None else np.dtype(verifier.module.embed.weight[...].dtype)
    graph, state = nnx.split(abstract_drafter(config, wanted))
    parameters = flat_parameters(state)
    layout = None if mesh is None else drafter_layout(mesh, config, shapes_and_axes(parameters))
    if layout is not None:
        config, place = layout.fitted(config), layout.place
        graph = nnx.graphdef(abstract_drafter(config, wanted))
    own = {path: leaf for path, leaf in parameters.items() if path in opened.links}
    filled = fill_parameters(own, opened.links, opened.source, progress, place)
    if opened.target_ids is not None:
        leaf = parameters[TARGET_IDS_PATH]
        axes = leaf.get_metadata()["axes"]
        filled[TARGET_IDS_PATH] = leaf.replace((place or device_put)(opened.target_ids, TARGET_IDS_PATH, axes))
    if verifier is not None:
        lent = {EMBED_PATH: verifier_embed(verifier.module), HEAD_PATH: verifier_head(verifier.module)}
        for path in lent.keys() - opened.links.keys():
            array = _lent(lent[path], path, opened.target_ids, wanted)
            if layout is not None and (layout.replicated or array is not lent[path]):
                array = layout.place(array, path, parameters[path].get_metadata()["axes"])
            filled[path] = parameters[path].replace(array)
    module = nnx.merge(graph, nnx.from_flat_state({path: filled[path] for path in parameters}))
    return LoadedDrafter(
        config=config,
        module=module,
        format=opened.format,
        path=opened.path,
        raw_config=opened.raw_config,
        verifier=opened.verifier,
        borrowed=borrowed,
        source_dtype=stored,
    )


def open_drafter(
    path_or_id: str | Path, verifier_layers: int | None = None, revision: str | None = None
) -> OpenedDrafter:
    """Reads a checkpoint's config, finds its format, and ties its tensors to parameters without reading them.

    path_or_id: also the name of one of the demo model's (`demo.drafter`). verifier_layers: the verifier's L, needed for drafters that
    name no tap layers. Raises InputError for everything that is wrong.
    """
    path = resolve(demo.drafter(path_or_id) or path_or_id, revision)
    if path.is_file():
        raise InputError(f"{path}: a drafter is a directory or a hub id, not a .gguf file")
    if is_orbax(path):
        return _open_orbax(path)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path}: has no config.json")
    if (path / "mask_embedding.pt").exists():
        raise InputError(
            f"{path / 'mask_embedding.pt'}: a mask slot's embedding of its own is not supported; without the file the mask token's is used"
        )
    data = read_json(config_file)
    source = CanonicalSource(SafetensorsSource(path))
    fields = Fields(data, str(config_file))
    names = source.tensors.keys()
    found = detect_format(fields, names)
    parsed = found.read(fields, names, verifier_layers)
    config = parsed.config
    _check_temperatures(config, str(config_file))
    target_ids = read_target_ids(source, config)
    links = expand(table(config), own_shapes(config), "")
    tied = tie([(link, link.name) for link in links], source, ignored)
    return OpenedDrafter(config, found.name, path, data, parsed.verifier, source, tied.links, target_ids)


def _open_orbax(path: Path) -> OpenedDrafter:
    manifest = read_manifest(path, "drafter")
    config = from_json(DrafterConfig, manifest.get("config"), f"{path} config")
    verifier = from_json(VerifierFacts, manifest.get("verifier"), f"{path} verifier")
    _check_temperatures(config, f"{path} config")
    source = OrbaxSource(path)
    map_name = name_of(TARGET_IDS_PATH)
    try:
        shapes = own_shapes(config)
    except ValueError as error:  # parts that do not go together
        raise InputError(f"{path} config: {error}") from error
    tied = tie_own_names(shapes, source, {map_name} if config.reduced_vocab else set())
    if config.reduced_vocab and map_name not in source.tensors:
        raise InputError(f"{path}: the draft vocabulary is reduced, but {map_name} is missing")
    target_ids = source.read(map_name) if config.reduced_vocab else None
    return OpenedDrafter(config, ORBAX, path, manifest, verifier, source, tied.links, target_ids)


def _check_temperatures(config: DrafterConfig, where: str) -> None:
    block = config.block
    given = 0 if block is None or block.confidence is None else len(block.confidence.temperatures)
    if block is not None and 0 < given < block.max_drafts:
        raise InputError(
            f"{where}: has {given} confidence temperatures, and the block drafts {block.max_drafts}; one for each is wanted"
        )


def abstract_drafter(config: DrafterConfig, dtype: DTypeLike) -> DrafterModule:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build_drafter(config, rngs=nnx.Rngs(0), dtype=dtype))


@lru_cache(maxsize=8)
def own_shapes(config: DrafterConfig) -> Mapping[ParameterPath, tuple[int, ...]]:
    """Shape of every parameter that a checkpoint of the drafter holds, by path."""
    state = nnx.state(abstract_drafter(config, jnp.float32))
    lent = {TARGET_IDS_PATH}
    lent |= set() if config.own_embed else {EMBED_PATH}
    lent |= set() if config.own_head else {HEAD_PATH}
    shapes = {path: tuple(leaf.shape) for path, leaf in flat_parameters(state).items() if path not in lent}
    return MappingProxyType(shapes)


def verifier_embed(module: Decoder) -> jax.Array:
    """The verifier's token embedding, [V, D]."""
    return module.embed.weight[...]


def verifier_head(module: Decoder) -> jax.Array:
    """The verifier's output head, [V, D]; its embedding where they are tied."""
    return module.embed.weight[...] if module.head is None else module.head.weight[...]


def _lent(array: jax.Array, path: ParameterPath, target_ids: np.ndarray | None, dtype: np.dtype) -> jax.Array:
    """The verifier's array as the drafter uses it: the head's rows of the draft vocabulary, in the drafter's dtype."""
    if path == HEAD_PATH and target_ids is not None:
        array = array[target_ids]
    return array if array.dtype == dtype else array.astype(dtype)

"""A drafter as something to write: its config and its own parameters, whatever they came from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.checkpoint.drafters.load import (
    EMBED_PATH,
    HEAD_PATH,
    TARGET_IDS_PATH,
    LoadedDrafter,
    OpenedDrafter,
    own_shapes,
)
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.fill import Reader, flat_parameters
from jaxspec.checkpoint.load import OpenedVerifier
from jaxspec.config import VerifierConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.verifiers.names import Path as ParameterPath

Parameter = np.ndarray | jax.Array


@dataclass(frozen=True)
class DrafterContent:
    """What a drafter checkpoint holds.

    `parameters`: by path, in the module's shapes, exactly those that the config owns; each in a dtype of its own. `target_ids`: int32
    [Vd], None for the whole vocabulary.
    """

    config: DrafterConfig
    parameters: Mapping[ParameterPath, Parameter]
    target_ids: np.ndarray | None
    verifier: VerifierFacts


@dataclass(frozen=True)
class Lender:
    """A verifier's config, and its embedding and head, [V, D] each, read when asked for. `name`: how it was asked for."""

    name: str
    config: VerifierConfig
    facts: VerifierFacts
    read: Callable[[ParameterPath], np.ndarray]


def content_of(loaded: LoadedDrafter) -> DrafterContent:
    """The content of a drafter in memory, without what it borrows."""
    values = {path: leaf[...] for path, leaf in flat_parameters(nnx.state(loaded.module)).items()}
    target_ids = np.asarray(values[TARGET_IDS_PATH]) if TARGET_IDS_PATH in values else None
    own = {path: values[path] for path in own_shapes(loaded.config)}
    return DrafterContent(loaded.config, own, target_ids, loaded.verifier)


def read_content(opened: OpenedDrafter) -> DrafterContent:
    """The content of a checkpoint, every tensor as stored. Raises InputError for a NaN or an infinity."""
    reader = Reader(opened.source, None, {name for links in opened.links.values() for _, name in links})
    shapes = own_shapes(opened.config)
    parameters = {path: reader.parameter(opened.links[path], shape) for path, shape in shapes.items()}
    return DrafterContent(opened.config, parameters, opened.target_ids, opened.verifier)


def lender(opened: OpenedVerifier, name: str, architectures: tuple[str, ...]) -> Lender:
    """What `opened` lends. `name`: how it was asked for, by directory or hub id."""

    def read(path: ParameterPath) -> np.ndarray:
        tied = path == HEAD_PATH and opened.config.tied
        return opened.read(("embed", "weight") if path == EMBED_PATH or tied else ("head", "weight"))

    return Lender(name, opened.config, VerifierFacts(name, architectures, opened.config.num_layers), read)


def as_host(value: Any) -> np.ndarray:
    """A parameter in host memory."""
    return np.asarray(jax.device_get(value))

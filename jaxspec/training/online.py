"""The frozen verifier within the step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.checkpoint.fill import default_dtype, flat_parameters, stored_dtype
from jaxspec.checkpoint.load import abstract_decoder, load_verifier
from jaxspec.checkpoint.orbax import name_of
from jaxspec.config import VerifierConfig
from jaxspec.sharding import put, split
from jaxspec.training.batch import Batch, Features
from jaxspec.training.features import packed_features
from jaxspec.training.setup import VerifierSide
from jaxspec.verifiers.names import Path as ParameterPath


class VerifierParts:
    """Puts a verifier together from its leaves, inside a compiled function."""

    def __init__(self, config: VerifierConfig, dtype: jnp.dtype, taps: Sequence[int]):
        """dtype: of its weights. taps: aux ids of the features."""
        self._graph, state = nnx.split(abstract_decoder(config, dtype))
        self._variables = flat_parameters(state)
        self._taps = tuple(taps)

    def features(self, leaves: Sequence[jax.Array], batch: Batch) -> Features:
        """The features of a batch. leaves: those of `load_leaves`, passed in."""
        pairs = zip(self._variables.items(), leaves, strict=True)
        state: dict[Any, nnx.Variable] = {path: variable.replace(value) for (path, variable), value in pairs}
        decoder = nnx.merge(self._graph, nnx.from_flat_state(state))
        return packed_features(decoder, batch, self._taps)

    def abstract_leaves(self, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        """What `load_leaves` gives, without the values."""
        return [
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=split(mesh, leaf.get_metadata()["axes"], leaf.shape, _named(path))
            )
            for path, leaf in self._variables.items()
        ]


def verifier_dtype(side: VerifierSide, asked: str | None) -> jnp.dtype:
    """The dtype of a recipe's verifier: `asked`, else float32 on CPUs, else the checkpoint's."""
    return jnp.dtype(asked) if asked is not None else jnp.dtype(default_dtype(stored_dtype(side.opened.source)))


def load_leaves(side: VerifierSide, dtype: jnp.dtype, mesh: Mesh) -> list[jax.Array]:
    """The verifier's leaves on the devices."""

    def place(value: np.ndarray, path: ParameterPath, axes: tuple[str, ...]) -> jax.Array:
        return put(value, split(mesh, axes, value.shape, _named(path)))

    module = load_verifier(side.path, dtype=dtype, place=place).module
    return [leaf[...] for leaf in flat_parameters(nnx.state(module)).values()]


def _named(path: ParameterPath) -> str:
    return f"the verifier's {name_of(path)}"

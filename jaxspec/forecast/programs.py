"""An engine's programs on shapes alone: lowered for some device, run nowhere, no weight allocated."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxspec.checkpoint.drafters.load import abstract_drafter
from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.checkpoint.load import abstract_decoder
from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.loop import MAX_CYCLES
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import MIN_STOP_IDS, Key, Programs
from jaxspec.decoding.sampling import SamplingRows
from jaxspec.decoding.state import DecodeState, Requests
from jaxspec.drafters.config import DrafterConfig
from jaxspec.sharding import Layout
from jaxspec.sharding import rows as row_sharding

Module = TypeVar("Module", bound=nnx.Module)

# Lowers a jitted function for arguments given as arrays or shapes.
Lower = Callable[[jax.stages.Wrapped, tuple[Any, ...]], jax.stages.Lowered]


def lower_here(jitted: jax.stages.Wrapped, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
    """For the devices that the arguments lie on; without any, for JAX's default device."""
    return jitted.lower(*jax.tree.map(lambda leaf: on(lies(leaf), leaf), arguments))


def lies(leaf: Any) -> NamedSharding | None:
    """Where an array or shape lies on a mesh; None where that is not said."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def on(sharding: NamedSharding | None, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, lying there."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class AbstractPrograms(Programs):
    """Programs that are lowered instead of run, and give the shapes of their results.

    Attributes:
        decoder: the verifier, with shapes in place of weights.
        drafter: likewise, or None.
        lowered: what has been lowered so far, by the program's name.
    """

    def __init__(
        self,
        verifier: VerifierConfig,
        drafter: DrafterConfig | None,
        plan: Plan,
        dtype: DTypeLike,
        lower: Lower = lower_here,
        mesh: Mesh | None = None,
        drafter_replicated: bool = False,
    ):
        """Of these models with weights and caches of `dtype`; on a mesh, as they run there (`Layout.fitted`)."""
        self.decoder = abstract_decoder(verifier, dtype)
        self.drafter = None if drafter is None else abstract_drafter(drafter, dtype)
        if mesh is not None:
            self.decoder = _laid_out(self.decoder, Layout(mesh))
            self.drafter = self.drafter and _laid_out(self.drafter, Layout(mesh, drafter_replicated))
        super().__init__(verifier, self.decoder, self.drafter, plan, mesh=mesh)
        self._lower = lower
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def place(self, rows: Any) -> Any:
        """Arrays of B rows in front as shapes that lie where the rows of a batch do; without a mesh as they are."""
        mesh = self.mesh
        return rows if mesh is None else jax.tree.map(lambda leaf: on(row_sharding(mesh), leaf), rows)

    def _program(self, key: Key, build: Callable[[], jax.stages.Wrapped], arguments: tuple[object, ...]) -> Any:
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            lowered = self.lowered[str(key[0])] = self._lower(build(), arguments)
        return lambda *_: lowered.out_info

    def lower_all(self, batch: int, capacity: int, prefill: int) -> dict[str, jax.stages.Lowered]:
        """What the engine compiles to answer B = `batch` greedy prompts with caches of S = `capacity` slots: the empty caches, a prefill
        call of T = `prefill` tokens, and the decode loop round the cycle."""
        tokens = np.zeros((batch, prefill + 1), np.int32)
        rows: Any = np.zeros(batch, np.int32)  # only its shape counts, as everywhere here
        cache, draft = self.empty(rows, capacity)
        cache, draft = self.prefill(cache, draft, tokens, rows)
        sampling = jax.eval_shape(lambda: SamplingRows.of([SamplingParams()] * batch, [0] * batch))
        stop_ids: Any = np.zeros((batch, MIN_STOP_IDS), np.int32)
        rows, requests = self.place((rows, Requests(sampling, rows, stop_ids)))
        self.decode(DecodeState(cache, rows, rows, rows, None, draft), requests, MAX_CYCLES)
        return self.lowered


def _laid_out(module: Module, layout: Layout) -> Module:
    """An abstract module whose shapes lie where its weights would."""
    graph, state = nnx.split(module)
    where = {
        path: layout.where(leaf.shape, path, leaf.get_metadata()["axes"])
        for path, leaf in flat_parameters(state).items()
    }
    return nnx.merge(graph, nnx.map_state(lambda path, leaf: leaf.replace(on(where[path], leaf)), state))

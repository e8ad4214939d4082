"""A run's compiled programs, and where their arguments lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from jaxspec.checkpoint.orbax import name_of
from jaxspec.config import VerifierConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.sharding import by_rows, put, split, spread, whole
from jaxspec.training.batch import Batch, Features
from jaxspec.training.memory import hand_back
from jaxspec.training.objective_of import Plan
from jaxspec.training.objectives.base import Target
from jaxspec.training.online import VerifierParts
from jaxspec.training.optimizer import build_optimizer, muon_matrices
from jaxspec.training.recipe import OptimizerRecipe
from jaxspec.training.step import DrafterParts, Frozen, StepReport, TrainState, accept_step, train_step
from jaxspec.verifiers.names import Path as ParameterPath

Place = Callable[[Any, NamedSharding], Any]
"""Puts an array where it shall lie; `abstract` only says what and where it would be."""

HEAD_AXES = ("vocab", "embed")


def abstract(value: Any, sharding: NamedSharding) -> Any:
    """The `Place` of a run that is compiled and not started."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


class Programs:
    """`step(state, frozen, batch, features)` and `accepts(params, frozen, batch, features, anchors)`, compiled on first use.

    Features are None where the verifier runs within the step. Several processes give the step what they ask for as a last argument, int32
    [devices], and its report has the highest: in a program of its own, beside the step, its exchanges could mix with the step's. `rate` is
    the learning rate of a step, counted from 0.
    """

    def __init__(
        self,
        config: DrafterConfig,
        trainable: Sequence[ParameterPath],
        plan: Plan,
        recipe: OptimizerRecipe,
        *,
        steps: int,
        seed: int,
        dtype: jnp.dtype,
        mesh: Mesh,
        verifier: VerifierParts | None,
    ):
        self.mesh = mesh
        self.parts = DrafterParts(config, dtype)
        self._trainable = {name_of(path): path for path in sorted(trainable, key=name_of)}
        self._axes = self.parts.axes()
        optimizer = build_optimizer(recipe, steps, muon_matrices(self.parts.module(), self._trainable))
        self._transform, self.rate = optimizer.transform, optimizer.rate
        online = None if verifier is None else by_rows(verifier.features, mesh)
        step = train_step(self.parts, plan.objective, self._transform, seed, online)

        def told(
            state: TrainState, frozen: Frozen, batch: Batch, features: Features | None, *asked: jax.Array
        ) -> tuple[TrainState, StepReport]:
            state, report = step(state, frozen, batch, features)
            return state, replace(report, asked=jnp.max(asked[0]) if asked else None)

        placed = jax.tree.map(lambda leaf: leaf.sharding, self.state(self._shapes(), abstract))
        self.step: Any = jax.jit(told, donate_argnums=0, out_shardings=(placed, whole(mesh)))
        self.accepts = jax.jit(accept_step(self.parts, plan.objective, online), out_shardings=whole(mesh))

    def compile_step(
        self, state: TrainState, frozen: Frozen, batch: Batch, features: Features | None, *asked: jax.Array
    ) -> Compiled:
        """Compiles `step` for arguments like these before it runs, and frees what compiling leaves behind: hundreds of MB on a CPU, which
        would stand beside the step's own memory."""
        self.step = compiled = self.step.lower(state, frozen, batch, features, *asked).compile()
        hand_back()
        return compiled

    def state(self, values: Mapping[str, Any], place: Place = put) -> TrainState:
        """The state before the first step. values: of the trained leaves by name."""
        params = {name: place(values[name], self._lies(name, values[name].shape)) for name in self._trainable}
        made = jax.eval_shape(self._transform.init, params)
        where = jax.tree.map_with_path(self._beside_its_parameter, made)
        if place is abstract:
            optimizer = jax.tree.map(abstract, made, where)
        else:
            optimizer = jax.jit(self._transform.init, out_shardings=where)(params)
        return TrainState(place(np.int32(0), whole(self.mesh)), params, optimizer)

    def frozen(
        self, values: Mapping[str, Any], target: Target, verifier: Sequence[Any] | None, place: Place = put
    ) -> Frozen:
        """What no step changes. values: of the drafter's other leaves; target: on the host; verifier: its leaves, placed."""
        placed = Target(
            place(target.norm, whole(self.mesh)),
            place(target.head, split(self.mesh, HEAD_AXES, target.head.shape, "the head")),
            None if target.draft_ids is None else place(target.draft_ids, whole(self.mesh)),
            target.eps,
            target.offset,
            target.softcap,
        )
        leaves = {
            # the same array once, where the drafter's head is the verifier's
            name: placed.head if value is target.head else place(value, self._lies(name, value.shape))
            for name, value in values.items()
        }
        return Frozen(leaves, placed, verifier)

    def abstract_arguments(self, config: VerifierConfig, verifier: VerifierParts | None) -> tuple[TrainState, Frozen]:
        """What `step` takes before the batch, without values: to compile a run for devices that need not be there."""
        target = verifier_target(config, self.parts.config.draft_vocab_size, self.parts.dtype)
        untrained = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (shape, dtype) in self.parts.leaves().items()
            if name not in self._trainable
        }
        leaves = None if verifier is None else verifier.abstract_leaves(self.mesh)
        return self.state(self._shapes(), abstract), self.frozen(untrained, target, leaves, abstract)

    def _beside_its_parameter(self, path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Where a leaf of the optimizer's state lies: moments, which have their parameter's name and shape, as it does, and split along
        `data` too, since only the update looks at them."""
        name = getattr(path[-1], "key", None) if path else None
        if name in self._trainable and leaf.shape == self.parts.leaves()[name][0]:
            return spread(self._lies(name, leaf.shape), leaf.shape)
        return whole(self.mesh)

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        leaves = self.parts.leaves()
        return {name: jax.ShapeDtypeStruct(leaves[name][0], jnp.float32) for name in self._trainable}

    def _lies(self, name: str, shape: Sequence[int]) -> NamedSharding:
        return split(self.mesh, self._axes[name], shape, f"the drafter's {name}")


def verifier_target(config: VerifierConfig, size: int, dtype: jnp.dtype) -> Target:
    """The shapes of a verifier's last step over a draft vocabulary of `size`."""
    reduced = size < config.vocab_size
    ids = jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32) if reduced else None
    norm, head = jax.ShapeDtypeStruct((config.width,), dtype), jax.ShapeDtypeStruct((size, config.width), dtype)
    return Target(norm, head, ids, config.norm_eps, config.norm_offset, config.logit_softcap)  # pyright: ignore[reportArgumentType]

"""The compiled programs of a run: one train step, and what validation needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jaxspec.checkpoint.drafters.load import DrafterModule, abstract_drafter
from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.checkpoint.orbax import name_of
from jaxspec.drafters.config import DrafterConfig
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Metrics, Objective, Target, terms_of

Arrays = Mapping[str, jax.Array]
"""Leaves of the drafter by name."""

OnlineFeatures = Callable[[Any, Batch], Features]
"""From the verifier's leaves and a batch, inside the step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Fields:
        step: int32 scalar, steps taken.
        params: the trained leaves by name, float32.
        optimizer: the optimizer's state.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepReport:
    """What a step says of itself.

    Fields:
        loss: float32 scalar. terms: float32 [n], its parts.
        gradient_norm: float32 scalar, before clipping.
        metrics: of the step's anchors.
        asked: int32 scalar, what the processes ask for (`stop.Stop`); None alone.
    """

    loss: jax.Array
    terms: jax.Array
    gradient_norm: jax.Array
    metrics: Metrics
    asked: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What a run never changes.

    Fields:
        leaves: of the drafter, by name: the rest of it, in the dtype of the step.
        target: the verifier's last step.
        verifier: its leaves, where features are made in the step; else None.
    """

    leaves: dict[str, jax.Array]
    target: Target
    verifier: Any = None


class DrafterParts:
    """Puts a drafter together from its leaves, inside a compiled function."""

    def __init__(self, config: DrafterConfig, dtype: jnp.dtype):
        """dtype: what it computes in."""
        self.config, self.dtype = config, dtype
        self._graph, state = nnx.split(abstract_drafter(config, dtype))
        self._variables = flat_parameters(state)

    def module(self) -> DrafterModule:
        """With shapes in place of arrays."""
        state: dict[Any, nnx.Variable] = dict(self._variables)
        return nnx.merge(self._graph, nnx.from_flat_state(state))

    def leaves(self) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Shape and dtype of every leaf by name."""
        return {name_of(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in self._variables.items()}

    def axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of every leaf by name."""
        return {name_of(path): leaf.get_metadata()["axes"] for path, leaf in self._variables.items()}

    def merge(self, params: Arrays, frozen: Arrays) -> DrafterModule:
        """The module of trained leaves, cast, and frozen ones."""
        leaves = {**frozen, **{name: value.astype(self.dtype) for name, value in params.items()}}
        state: dict[Any, nnx.Variable] = {
            path: variable.replace(leaves[name_of(path)]) for path, variable in self._variables.items()
        }
        return nnx.merge(self._graph, nnx.from_flat_state(state))


def train_step(
    parts: DrafterParts,
    objective: Objective,
    transform: optax.GradientTransformation,
    seed: int,
    online: OnlineFeatures | None,
) -> Callable[[TrainState, Frozen, Batch, Features | None], tuple[TrainState, StepReport]]:
    """The step, to be compiled: over micro-batches stacked along a first axis [A, B, T], as over one batch of A * B rows.

    Its random choices follow from (seed, step, micro-batch) alone. Features are given, or made by `online`.
    """

    def choices_of(step: jax.Array, number: jax.Array, batch: Batch) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), number)
        return objective.choose(key, batch)

    def step(
        state: TrainState, frozen: Frozen, batches: Batch, features: Features | None
    ) -> tuple[TrainState, StepReport]:
        count = batches.tokens.shape[0]
        numbers = jnp.arange(count, dtype=jnp.int32)

        def weights_of(part: tuple[jax.Array, Batch]) -> jax.Array:
            number, batch = part
            return objective.weights(batch, choices_of(state.step, number, batch))

        weights = jnp.sum(lax.map(weights_of, (numbers, batches)), axis=0)  # [n]

        def one(part: tuple[jax.Array, Batch, Features | None]) -> tuple[Arrays, jax.Array, Metrics]:
            number, batch, given = part
            choices = choices_of(state.step, number, batch)
            if given is None:
                assert online is not None, "there are no features"
                given = online(frozen.verifier, batch)
            cast = jax.tree.map(lambda x: lax.stop_gradient(x.astype(parts.dtype)), given)

            def loss(params: Arrays) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
                drafter = parts.merge(params, frozen.leaves)
                sums, metrics = objective.sums(drafter, frozen.target, batch, cast, choices)
                terms = terms_of(sums, weights)
                return jnp.sum(terms), (terms, metrics)

            gradients, (terms, metrics) = jax.grad(loss, has_aux=True)(state.params)
            return gradients, terms, metrics

        parts_of_step = (numbers, batches, features)
        if count == 1:
            gradients, terms, metrics = one(jax.tree.map(lambda x: x[0], parts_of_step))
        else:
            first = one(jax.tree.map(lambda x: x[0], parts_of_step))

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, one(part)), None

            (gradients, terms, metrics), _ = lax.scan(add, first, jax.tree.map(lambda x: x[1:], parts_of_step))
        updates, optimizer = transform.update(dict(gradients), state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        report = StepReport(jnp.sum(terms), terms, optax.tree.norm(gradients), metrics)
        return TrainState(state.step + 1, params, optimizer), report  # pyright: ignore[reportArgumentType]

    return step


def accept_step(
    parts: DrafterParts, objective: Objective, online: OnlineFeatures | None
) -> Callable[[Arrays, Frozen, Batch, Features | None, jax.Array], jax.Array]:
    """Validation's step, to be compiled: anchors int32 [B, A] -> bool [B, A, K], as `Objective.accepts`."""

    def accepts(
        params: Arrays, frozen: Frozen, batch: Batch, features: Features | None, anchors: jax.Array
    ) -> jax.Array:
        if features is None:
            assert online is not None, "there are no features"
            features = online(frozen.verifier, batch)
        cast = jax.tree.map(lambda x: x.astype(parts.dtype), features)
        return objective.accepts(parts.merge(params, frozen.leaves), batch, cast, anchors)

    return accepts

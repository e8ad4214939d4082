"""AdamW, or Muon with AdamW beside it, from optax; schedules and clipping."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import jax
import optax
from flax import nnx
from optax import contrib

from jaxspec.layers.linear import Linear
from jaxspec.training.recipe import OptimizerRecipe
from jaxspec.verifiers.names import Path as ParameterPath

# Scales Muon's orthogonal updates to AdamW's usual size (arXiv 2502.16982; torch's "match_rms_adamw").
MUON_RMS = 0.2

_VOCABULARY = (("vocabulary",), ("markov", "w1"), ("markov", "w2"))


@dataclass(frozen=True)
class Optimizer:
    """`transform` makes updates of gradients; `rate` is the learning rate of a step, counted from 0."""

    transform: optax.GradientTransformation
    rate: optax.Schedule


def build_optimizer(
    recipe: OptimizerRecipe, steps: int, matrices: Mapping[str, contrib.MuonDimensionNumbers]
) -> Optimizer:
    """The optimizer of a run of `steps` steps. matrices: Muon's parameters by name (`muon_matrices`), unused by AdamW."""
    rate = schedule(recipe, recipe.lr, steps)
    beta1, beta2 = recipe.betas
    adam_rate = rate if recipe.name == "adamw" or recipe.adam_lr is None else schedule(recipe, recipe.adam_lr, steps)
    adam = optax.adamw(adam_rate, b1=beta1, b2=beta2, weight_decay=recipe.weight_decay)
    if recipe.name == "muon":
        muon = contrib.muon(
            rate,
            beta=recipe.momentum,
            weight_decay=recipe.muon_weight_decay,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=lambda params: _numbers(cast(Mapping[str, jax.Array], params), matrices),
        )

        def labels(params: Mapping[str, jax.Array]) -> dict[str, str]:
            return {name: "muon" if name in matrices else "adam" for name in params}

        # contrib.muon has an Adam of its own for the rest, but with Nesterov momentum.
        transform = optax.partition({"muon": muon, "adam": adam}, labels)
    else:
        transform = adam
    if recipe.clip is not None:
        transform = optax.chain(optax.clip_by_global_norm(recipe.clip), transform)
    return Optimizer(_unstrict(transform), rate)


def schedule(recipe: OptimizerRecipe, peak: float, steps: int) -> optax.Schedule:
    """The learning rate: linear from 0 to `peak` over the warm-up, then as the recipe says down to `floor * peak` at step `steps`."""
    warmup = round(recipe.warmup * steps) if recipe.warmup < 1 else int(recipe.warmup)
    rest = max(steps - warmup, 1)
    match recipe.schedule:
        case "constant":
            course = optax.constant_schedule(peak)
        case "linear":
            course = optax.linear_schedule(peak, recipe.floor * peak, rest)
        case "cosine":
            course = optax.cosine_decay_schedule(peak, rest, recipe.floor)
    if not warmup:
        return course
    # The first step already moves: the rate of step s of the warm-up is (s + 1) / warmup.
    rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rising, course], [warmup])


def muon_matrices(
    module: nnx.Module, trainable: Mapping[str, ParameterPath]
) -> dict[str, contrib.MuonDimensionNumbers]:
    """The parameters that Muon moves, with their input and output dimensions: matrices of linear layers, larger than a vector, that don't
    stand for tokens (SPEC 7). trainable: path of each parameter's name."""
    in_dims = {path: part.in_dims for path, part in nnx.iter_graph(module) if isinstance(part, Linear)}
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(module))}
    found = {}
    for name, path in trainable.items():
        dims = in_dims.get(path[:-1])
        if dims is None or path[-1] != "weight" or any(path[: len(part)] == part for part in _VOCABULARY):
            continue
        shape = shapes[cast(tuple, path)]
        split = len(shape) - dims
        inputs, outputs = tuple(range(split, len(shape))), tuple(range(split))
        if min(_size(shape, inputs), _size(shape, outputs)) > 1:
            found[name] = contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)
    return found


def _unstrict(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax mixes Python numbers, counters and arrays: it needs JAX's standard promotion, whatever the process has chosen."""

    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return transform.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return transform.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _numbers(
    params: Mapping[str, jax.Array], matrices: Mapping[str, contrib.MuonDimensionNumbers]
) -> dict[str, contrib.MuonDimensionNumbers | optax.MaskedNode]:
    return {
        name: matrices[name] if name in matrices else cast(optax.MaskedNode, value) for name, value in params.items()
    }


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    size = 1
    for axis in axes:
        size *= shape[axis]
    return size

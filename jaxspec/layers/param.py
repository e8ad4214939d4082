"""How every parameter of the project is made: shape, logical axes and initialiser in one line."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

INIT_STDDEV = 0.02


def normal_param(rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str], dtype: DTypeLike) -> nnx.Param:
    """A weight drawn from N(0, 0.02^2). `axes` names one logical axis a dimension (for sharding)."""
    _check(shape, axes)
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), tuple(shape), dtype), axes=tuple(axes))


def constant_param(value: float, shape: Sequence[int], axes: Sequence[str], dtype: DTypeLike) -> nnx.Param:
    """A parameter that starts as a constant: norm weights, biases, scales."""
    _check(shape, axes)
    return nnx.Param(jnp.full(tuple(shape), value, dtype), axes=tuple(axes))


def _check(shape: Sequence[int], axes: Sequence[str]) -> None:
    if len(shape) != len(axes):
        raise ValueError(f"shape {tuple(shape)} and logical axes {tuple(axes)} differ in rank")

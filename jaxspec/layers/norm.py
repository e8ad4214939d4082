"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxspec.layers.param import constant_param


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x [..., D] of any float dtype -> float32 [..., D] with mean square 1 (arXiv 1910.07467)."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """rms_normalize(x) * (weight + offset), computed in float32, returned in x's dtype."""

    def __init__(self, width: int, eps: float, *, offset: float = 0.0, axis: str = "embed", dtype: DTypeLike):
        self.eps = eps
        self.offset = offset
        self.weight = constant_param(1.0 - offset, (width,), (axis,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., width] -> [..., width]."""
        weight = self.weight[...].astype(jnp.float32) + self.offset
        y = rms_normalize(x, self.eps) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)
        return y.astype(x.dtype)

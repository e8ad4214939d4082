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
        self.heads = axis == "head_dim"
        self.weight = constant_param(1.0 - offset, (width,), (axis,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., width] -> [..., width]."""
        weight = self.weight[...].astype(jnp.float32) + self.offset
        # As rows of one axis: XLA's CPU reductions behind this norm's gradient take ten times as long over two. Heads stay on an axis of
        # their own, which devices may share.
        rows = x if self.heads else x.reshape(-1, x.shape[-1])
        y = rms_normalize(rows, self.eps) * weight.reshape((1,) * (rows.ndim - 1) + weight.shape)
        return y.reshape(x.shape).astype(x.dtype)

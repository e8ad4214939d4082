"""The linear layer. Its weight keeps PyTorch's order, [*out, *in], so that importing a checkpoint is a reshape."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.layers.param import constant_param, normal_param
from jaxspec_kernels.projection import project


class Linear(nnx.Module):
    """y = x W^T (+ b) with W [*out, *in]."""

    def __init__(
        self,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        in_axes: Sequence[str],
        out_axes: Sequence[str],
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        self.in_dims = len(in_shape)
        self.weight = normal_param(rngs, (*out_shape, *in_shape), (*out_axes, *in_axes), dtype)
        self.bias = constant_param(0.0, out_shape, out_axes, dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [*rows, *in] -> [*rows, *out]."""
        y = project(x, self.weight[...], self.in_dims)
        if self.bias is not None:
            bias = self.bias[...]
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y

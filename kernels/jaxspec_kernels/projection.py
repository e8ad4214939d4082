"""The matrix product of activations with a weight.

Weights keep PyTorch's order, [*out, *in], so that importing a checkpoint is a reshape. Which operand comes first is a property of the
platform, decided here and nowhere else.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

# Above this many rows the CPU's product is bound by arithmetic, not by reading the weight, and both forms cost the same.
CPU_WEIGHT_FIRST_ROWS = 64
CPU_PADDED_ROWS = range(5, 17)  # of these, numbers between powers of two cost more than the next power


def project(x: jax.Array, weight: jax.Array, in_dims: int = 1) -> jax.Array:
    """Contract the last `in_dims` dimensions of x with the last `in_dims` dimensions of weight.

    x [*rows, *in], weight [*out, *in], same dtype -> [*rows, *out], same dtype. float32 is computed in full float32 on every
    platform (no TF32); bfloat16 accumulates in float32.
    """
    in_shape = weight.shape[weight.ndim - in_dims :]
    out_shape = weight.shape[: weight.ndim - in_dims]
    rows_shape = x.shape[: x.ndim - in_dims]
    if x.shape[x.ndim - in_dims :] != in_shape:
        raise ValueError(f"x {x.shape} does not end with the weight's input dimensions {in_shape}")
    rows = math.prod(rows_shape)
    x_2d = x.reshape(rows, math.prod(in_shape))
    w_2d = weight.reshape(math.prod(out_shape), math.prod(in_shape))
    if rows <= CPU_WEIGHT_FIRST_ROWS:
        y = lax.platform_dependent(x_2d, w_2d, cpu=_weight_first, default=_rows_first)
    else:
        y = _rows_first(x_2d, w_2d)
    return y.reshape(*rows_shape, *out_shape)


def _rows_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, in] . weight [out, in] -> [M, out]."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=_precision(x))


def _weight_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product as weight . x, then transposed.

    XLA's CPU dot reads a few rows of the left operand against all of the right one: with the weight on the left 8 rows cost 1.4 times
    one row, on the right 2 to 3 times. The barrier keeps XLA from folding the transpose back into the product. Its kernels have 4, 8 or 16
    rows: 6 cost 1.6 times 8, and 15 cost 1.4 times 16.
    """
    rows = x.shape[0]
    if rows in CPU_PADDED_ROWS:
        x = jnp.pad(x, ((0, (1 << (rows - 1).bit_length()) - rows), (0, 0)))
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), precision=_precision(x))
    return lax.optimization_barrier(y)[:, :rows].T


def _precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == "float32" else lax.Precision.DEFAULT

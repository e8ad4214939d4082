"""What the kernels take from Pallas and its Triton back end; no other file imports either.

JAX has deprecated that back end since 0.11, yet it is the one that compiles for sm_80. Its compiler parameters are always given: they
also tell JAX which back end is meant, and their defaults differ between versions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

program_id = pl.program_id
rows = pl.ds  # (start, size): a slice whose start may be traced; it may run past the array where a mask covers that


def launch(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run `kernel` once for each point of `grid` (at most three axes, the first one fastest).

    The kernel takes a reference to each argument, whole, and then one to each output. `aliases` {argument: output}: the output begins
    as the argument and takes its buffer over.
    """
    return pl.pallas_call(
        kernel,
        out_shape=tuple(out),
        grid=grid,
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arguments)


def load(ref: Any, mask: jax.Array | None = None, other: float = 0.0) -> jax.Array:
    """The reference's values where `mask`, `other` elsewhere. What is masked is not read: NaN in it does no harm."""
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=other)


def store(ref: Any, values: jax.Array, mask: jax.Array) -> None:
    """Write where `mask`; the rest of the reference stays."""
    plt.store(ref, values.astype(ref.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a [M, D] . b [D, M'] (`transposed`: b [M', D]) -> float32 [M, M']; float32 operands without TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == "float32" else None
    return plt.dot(a, b, trans_b=transposed, precision=precision)

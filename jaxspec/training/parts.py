"""Rows worked on some at a time, so that what is large on the way is small, and made again in the backward pass, not kept."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

# Most floats of the largest array that a part makes: on CPUs about what the caches hold, elsewhere enough to keep the device busy.
CPU_FLOATS, FLOATS = 1 << 21, 1 << 26

Out = TypeVar("Out")


def in_parts(f: Callable[..., Out], rows: tuple[Any, ...], size: int | None, floats: int) -> Out:
    """f(*rows), `size` rows at a time.

    Args:
        f: pytrees of arrays [B, n, ...] -> a pytree of arrays [B, n, ...], each row on its own. It gets rows of zeros, too.
        rows: f's arguments, arrays [B, N, ...].
        size: n; None: as many as make an array of CPU_FLOATS or FLOATS.
        floats: of the largest array that f makes, for each of the N rows.
    """
    batch, count = jax.tree.leaves(rows)[0].shape[:2]
    if size is None:
        most = CPU_FLOATS if jax.default_backend() == "cpu" else FLOATS
        parts = math.ceil(count / max(1, most // floats))
        size = math.ceil(count / parts)  # parts alike, so that little is padded
    if count <= size:
        return f(*rows)
    missing = -count % size

    def split(x: jax.Array) -> jax.Array:
        """[B, N, ...] -> [N / n, B, n, ...]."""
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def joined(x: jax.Array) -> jax.Array:
        """[N / n, B, n, ...] -> [B, N, ...]."""
        return x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :count]

    inner = jax.checkpoint(f, prevent_cse=False)  # a loop's two passes share nothing anyway
    return jax.tree.map(joined, lax.map(lambda part: inner(*part), jax.tree.map(split, rows)))

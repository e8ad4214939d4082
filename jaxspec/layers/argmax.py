"""The most likely token: the first maximum over a vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128


def argmax(x: jax.Array) -> jax.Array:
    """x float32 [..., V] -> int32 [...], the index of the largest value, the lowest one among equals.

    A row of nothing but NaN or -inf gives 0. In a row that holds some NaN the result is within range and not defined further.
    """
    return _plain(x) if x.shape[-1] <= CHUNK else lax.platform_dependent(x, cpu=_chunked, default=_plain)


def _plain(x: jax.Array) -> jax.Array:
    return lax.argmax(x, x.ndim - 1, jnp.int32)


def _chunked(x: jax.Array) -> jax.Array:
    """XLA's CPU argmax takes one number at a time, its maximum takes whole vectors: so the largest of the chunks' maxima names the chunk
    (the first one among equals), and an argmax within that chunk the index.

    The vocabulary comes first here, as it does in the product that makes logits on a CPU: so nothing is left to transpose.
    """
    size = x.shape[-1]
    first = x.reshape(-1, size).T  # [V, rows]
    whole = size - size % CHUNK
    maxima = jnp.max(first[:whole].reshape(whole // CHUNK, CHUNK, first.shape[1]), axis=1)
    if whole < size:
        maxima = jnp.concatenate([maxima, jnp.max(first[whole:], axis=0, keepdims=True)])
    maxima = jnp.where(jnp.isnan(maxima), -jnp.inf, maxima)  # XLA's CPU maximum lets a NaN pass, or doesn't
    start = CHUNK * lax.argmax(maxima, 0, jnp.int32)  # [rows]
    ids = start[None] + jnp.arange(CHUNK, dtype=jnp.int32)[:, None]
    chunk = jnp.take_along_axis(first, ids, axis=0, mode="fill", fill_value=-jnp.inf)  # what lies past V comes last
    return (start + lax.argmax(chunk, 0, jnp.int32)).reshape(x.shape[:-1])

"""Attention to a span of a shared context, by tiles: those that no query of a chunk sees are never touched.

Documents are packed in rows, and a query sees its own document at most. Forward and backward pass go over tiles of the context as
FlashAttention does (arXiv 2205.14135, algorithms 1 and 4; 2307.08691), with the softmax kept up to date on the way, but from the chunk's
first tile in sight to its last one, which only the run time knows. One chunk of one row after another: for CPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 128  # positions of the context
QUERIES = 64  # slots of a chunk

Arrays = tuple[jax.Array, ...]


class _Rows(NamedTuple):
    """Rows cut in chunks of M queries and the context in tiles.

    Fields:
        q: [B, C, K, G, M, H].
        k, v: [B, K, T', H].
        first, stop: int32 [B, C, M].
        low, high: int32 [B, C], tiles in sight: low <= tile < high.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    first: jax.Array
    stop: jax.Array
    low: jax.Array
    high: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    scale: float,
    softcap: float | None,
    blocks: int | None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(softcap(scale q k^T) + mask) v, and the log of the softmax's denominator.

    Args:
        q: [B, A, S, N, H], the S slots of A blocks a row.
        k, v: [B, T, K, H].
        first, stop: int32 [B, A, S]; a slot sees first <= t < stop.
        scale: on the scores.
        softcap: cap on the scaled scores.
        blocks: in a chunk; None: as many as make QUERIES slots.

    Returns:
        float32 [B, A, S, N, H], zeros for a slot that sees nothing; float32 [B, A, S, N], -inf for such a slot.
    """
    out, log_total = _forward(q, k, v, first, stop, scale, softcap, blocks)[0]
    return out, log_total


def _forward(*given: Any) -> tuple[Arrays, Arrays]:
    """What `context_attention` takes -> its result, and what the way back needs."""
    q, k, v, first, stop, scale, softcap, blocks = given
    order = _order(first, stop)
    rows, joined = _cut(q, k, v, first, stop, blocks, order)

    def chunk(row: _Rows) -> Arrays:
        def tile(index: jax.Array, carry: Arrays) -> Arrays:
            top, total, out = carry
            scores = _scores(row, index, scale, softcap)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            safe = jnp.where(jnp.isfinite(higher), higher, 0.0)
            weights = jnp.exp(scores - safe[..., None])
            fade = jnp.exp(top - safe)
            added = product("kgmt,kth->kgmh", weights.astype(v.dtype), _tile(row.v, index))
            return higher, total * fade + jnp.sum(weights, axis=-1), out * fade[..., None] + added

        zero = jnp.zeros(row.q.shape[:-1], jnp.float32)
        carry = (zero - jnp.inf, zero, jnp.zeros(row.q.shape, jnp.float32))
        top, total, out = lax.fori_loop(row.low, row.high, tile, carry)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        return out / safe[..., None], jnp.where(some, top + jnp.log(safe), -jnp.inf)

    def of_row(row: _Rows) -> Arrays:
        return lax.map(lambda cut: chunk(row._replace(**cut)), _chunked(row))

    out, log_total = lax.map(of_row, rows)
    result = joined(out), joined(log_total)
    return result, (q, k, v, first, stop, *result)


def _backward(
    scale: float, softcap: float | None, blocks: int | None, kept: Arrays, given: Arrays
) -> tuple[jax.Array | None, ...]:
    q, k, v, first, stop, out, log_total = kept
    d_out, d_log_total = given
    order = _order(first, stop)
    rows, joined = _cut(q, k, v, first, stop, blocks, order)
    # d score = weight * (d weight - sum of weight * d weight), and the denominator's own share.
    mean = jnp.sum(d_out * out, axis=-1) - d_log_total
    seen = jnp.where(jnp.isfinite(log_total), log_total, 0.0)

    def cut(x: jax.Array) -> jax.Array:
        return _chunks(x, k.shape[2], blocks, order)

    beside = cut(d_out.astype(v.dtype)), cut(mean), cut(seen)

    def of_row(part: tuple[_Rows, Arrays]) -> Arrays:
        row, beside = part

        def chunk(carry: Arrays, given: tuple[dict[str, jax.Array], Arrays]) -> tuple[Arrays, jax.Array]:
            here, (d_out, mean, log_total) = row._replace(**given[0]), given[1]

            def tile(index: jax.Array, carry: Arrays) -> Arrays:
                dq, dk, dv = carry
                scores = _scores(here, index, scale, softcap)
                weights = jnp.exp(scores - log_total[..., None])
                d_scores = weights * (product("kgmh,kth->kgmt", d_out, _tile(here.v, index)) - mean[..., None])
                if softcap is not None:
                    slope = 1 - (jnp.where(jnp.isfinite(scores), scores, 0.0) / softcap) ** 2
                    d_scores = d_scores * slope
                d_scores = (d_scores * scale).astype(q.dtype)
                dq = dq + product("kgmt,kth->kgmh", d_scores, _tile(here.k, index))
                dk = _add(dk, index, product("kgmt,kgmh->kth", d_scores, here.q))
                return dq, dk, _add(dv, index, product("kgmt,kgmh->kth", weights.astype(v.dtype), d_out))

            zero = jnp.zeros(here.q.shape, jnp.float32)
            dq, dk, dv = lax.fori_loop(here.low, here.high, tile, (zero, *carry))
            return (dk, dv), dq

        zero = jnp.zeros(row.k.shape, jnp.float32)
        (dk, dv), dq = lax.scan(chunk, (zero, zero), (_chunked(row), beside))
        return dq, dk, dv

    dq, dk, dv = lax.map(of_row, (rows, beside))
    length = k.shape[1]
    return (
        joined(dq).astype(q.dtype),
        dk.swapaxes(1, 2)[:, :length].astype(k.dtype),
        dv.swapaxes(1, 2)[:, :length].astype(v.dtype),
        None,
        None,
    )


context_attention.defvjp(_forward, _backward)


def _scores(row: _Rows, tile: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Of a chunk with a tile of the context, -inf out of sight: float32 [K, G, M, TILE]."""
    scores = capped(product("kgmh,kth->kgmt", row.q, _tile(row.k, tile)), scale, softcap)
    at = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)[None]
    seen = (at >= row.first[:, None]) & (at < row.stop[:, None])
    return jnp.where(seen[None, None], scores, -jnp.inf)


def capped(scores: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scores of any shape, scaled and capped."""
    return scores * scale if softcap is None else softcap * jnp.tanh(scores * scale / softcap)


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum in float32: of float32 in full, of bfloat16 with sums in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _tile(x: jax.Array, index: jax.Array) -> jax.Array:
    """[K, T', H] -> [K, TILE, H]."""
    return lax.dynamic_slice_in_dim(x, index * TILE, TILE, axis=1)


def _add(x: jax.Array, index: jax.Array, tile: jax.Array) -> jax.Array:
    """[K, T', H] with [K, TILE, H] added in its place."""
    return lax.dynamic_update_slice_in_dim(x, _tile(x, index) + tile, index * TILE, axis=1)


def _order(first: jax.Array, stop: jax.Array) -> jax.Array:
    """int32 [B, A], blocks by where they stand in the context, so that a chunk sees little of it."""
    return jnp.argsort(jnp.max(jnp.where(stop > first, stop, 0), axis=2), axis=1, stable=True)


def _chunked(row: _Rows) -> dict[str, jax.Array]:
    """What differs between a row's chunks."""
    return {"q": row.q, "first": row.first, "stop": row.stop, "low": row.low, "high": row.high}


def _cut(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, stop: jax.Array, blocks: int | None, order: jax.Array
) -> tuple[_Rows, Callable[[jax.Array], jax.Array]]:
    """Rows in chunks, and what puts [B, C, K, G, M, ...] together again: [B, A, S, N, ...]."""
    batch, _, slots, heads = q.shape[:4]

    def tiles(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0))).swapaxes(1, 2)

    def spans(x: jax.Array) -> jax.Array:
        return _chunks(x[..., None], 1, blocks, order)[:, :, 0, 0]

    first, stop = spans(first), spans(stop)
    some = stop > first
    low = jnp.min(jnp.where(some, first, k.shape[1]), axis=2) // TILE
    high = -(-jnp.max(jnp.where(some, stop, 0), axis=2) // TILE)
    back = jnp.argsort(order, axis=1)

    def joined(x: jax.Array) -> jax.Array:
        chunks, per_chunk = x.shape[1], x.shape[4] // slots
        x = x.reshape(*x.shape[:4], per_chunk, slots, *x.shape[5:])
        x = jnp.moveaxis(x, (2, 3), (4, 5))  # [B, C, n, S, K, G, ...]
        x = x.reshape(batch, chunks * per_chunk, slots, heads, *x.shape[6:])
        return _take(x, back)

    return _Rows(_chunks(q, k.shape[2], blocks, order), tiles(k), tiles(v), first, stop, low, high), joined


def _chunks(x: jax.Array, groups: int, blocks: int | None, order: jax.Array) -> jax.Array:
    """[B, A, S, N, ...] -> [B, C, K, G, M, ...], blocks in that order, K `groups` of the N heads; what is added is zeros."""
    batch, count, slots, heads = x.shape[:4]
    size = min(count, blocks or max(1, QUERIES // slots))
    x = _take(x, order)
    x = jnp.pad(x, ((0, 0), (0, -count % size), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(batch, -1, size, slots, groups, heads // groups, *x.shape[4:])
    x = jnp.moveaxis(x, (4, 5), (2, 3))  # [B, C, K, G, n, S, ...]
    return x.reshape(*x.shape[:4], size * slots, *x.shape[6:])


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """[B, A', ...] by int32 [B, A] -> [B, A, ...]."""
    order = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, order, axis=1, mode="clip")

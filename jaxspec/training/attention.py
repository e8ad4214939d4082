"""Attention of training blocks in two parts: a shared context prefix, and the block itself, in one softmax.

The context's keys and values are made once and shared by every block, and a block never meets another one: A blocks of S slots over T
positions of context cost A * S * (T + S) scores, not (A * S)^2 or A * S * (T + A * S).
"""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.training.context_attention import capped, context_attention, product
from jaxspec.training.parts import in_parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """The part of the context that a query sees: positions first <= t < stop of its row, int32 [B, A, S] or broadcastable to it."""

    first: jax.Array
    stop: jax.Array


def two_part_attention(
    q: jax.Array,
    context: tuple[jax.Array, jax.Array],
    span: Span,
    own: tuple[jax.Array, jax.Array] | None = None,
    own_mask: jax.Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """softmax(softcap(scale q [k_context; k_own]^T) + mask) [v_context; v_own], in float32.

    Args:
        q: [B, A, S, N, H], the S slots of A blocks a row.
        context: keys and values [B, T, K, H].
        span: what each slot sees of the context.
        own: keys and values [B, A, J, K, H] of the block itself; None: the context is all there is.
        own_mask: bool [S, J], what a slot sees of its own block; None: everything.
        scale: on the scores.
        softcap: cap on the scaled scores.
        chunk: blocks whose scores are there at a time; None: as many as `in_parts` allows.

    Returns:
        [B, A, S, N, H] in q's dtype; zeros for a slot that sees nothing.
    """
    slots = q.shape[1:3]
    span = Span(*(jnp.broadcast_to(bound, (q.shape[0], *slots)) for bound in (span.first, span.stop)))
    if skips():
        k, v = context
        attended = context_attention(q, k, v, span.first, span.stop, scale, softcap, chunk)
        return _with_own(q, *cast(tuple[jax.Array, jax.Array], attended), own, own_mask, scale, softcap)

    def attend(q: jax.Array, span: Span, own: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        return _attend(q, context, span, own, own_mask, scale, softcap)

    seen = context[0].shape[1] + (0 if own is None else own[0].shape[2])
    scores = q.shape[0] * q.shape[2] * q.shape[3] * seen  # of one block in every row
    return in_parts(attend, (q, span, own), chunk, scores)


def skips() -> bool:
    """Whether what a chunk of queries doesn't see is passed over. Elsewhere tiles one after another would leave a device idle; on several
    devices, the rows lie apart."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _with_own(
    q: jax.Array,
    attended: jax.Array,
    log_total: jax.Array,
    own: tuple[jax.Array, jax.Array] | None,
    own_mask: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """What the context gives [B, A, S, N, H], with the log of its softmax's denominator [B, A, S, N], and the block's own part."""
    if own is None:
        return attended.astype(q.dtype)
    k, v = own
    grouped = (*q.shape[:3], k.shape[3], -1)
    scores = _own_scores(q.reshape(*grouped, q.shape[-1]), k, own_mask, scale, softcap)  # [B, A, S, K, G, J]
    context = log_total.reshape(grouped)
    top = lax.stop_gradient(jnp.maximum(context, jnp.max(scores, axis=-1)))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    of_context, of_own = jnp.exp(context - top), jnp.exp(scores - top[..., None])
    total = of_context + jnp.sum(of_own, axis=-1)
    out = of_context[..., None] * attended.reshape(*grouped, q.shape[-1])
    out = out + product("baskgj,bajkh->baskgh", of_own.astype(v.dtype), v)
    return (out / jnp.where(total > 0, total, 1.0)[..., None]).reshape(q.shape).astype(q.dtype)


def _attend(
    q: jax.Array,
    context: tuple[jax.Array, jax.Array],
    span: Span,
    own: tuple[jax.Array, jax.Array] | None,
    own_mask: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    batch, blocks, slots, heads, width = q.shape
    k, v = context
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, blocks, slots, kv_heads, heads // kv_heads, width)
    at = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None]
    seen = (at >= span.first[..., None]) & (at < span.stop[..., None])  # [B, A, S, T]
    scores = capped(product("baskgh,btkh->bkgast", grouped, k), scale, softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if own is not None:
        block = _own_scores(grouped, own[0], own_mask, scale, softcap)
        scores = jnp.concatenate([scores, jnp.moveaxis(block, (3, 4), (1, 2))], axis=-1)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    out = product("bkgast,btkh->baskgh", weights[..., : k.shape[1]], v)
    if own is not None:
        out = out + product("bkgasj,bajkh->baskgh", weights[..., k.shape[1] :], own[1])
    return out.reshape(q.shape).astype(q.dtype)


def _own_scores(q: jax.Array, k: jax.Array, mask: jax.Array | None, scale: float, softcap: float | None) -> jax.Array:
    """q [B, A, S, K, G, H], k [B, A, J, K, H], mask bool [S, J] -> float32 [B, A, S, K, G, J]."""
    scores = capped(product("baskgh,bajkh->baskgj", q, k), scale, softcap)
    return scores if mask is None else jnp.where(mask[None, None, :, None, None], scores, -jnp.inf)

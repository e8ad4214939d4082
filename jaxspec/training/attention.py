"""Attention of training blocks in two parts: a shared context prefix, and the block itself, in one softmax.

The context's keys and values are made once and shared by every block, and a block never meets another one: A blocks of S slots over T
positions of context cost A * S * (T + S) scores, not (A * S)^2 or A * S * (T + A * S).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

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

    def attend(q: jax.Array, span: Span, own: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        return _attend(q, context, span, own, own_mask, scale, softcap)

    seen = context[0].shape[1] + (0 if own is None else own[0].shape[2])
    scores = q.shape[0] * q.shape[2] * q.shape[3] * seen  # of one block in every row
    return in_parts(attend, (q, span, own), chunk, scores)


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
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    grouped = q.reshape(batch, blocks, slots, kv_heads, heads // kv_heads, width)

    def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def capped(scores: jax.Array) -> jax.Array:
        return scores * scale if softcap is None else softcap * jnp.tanh(scores * scale / softcap)

    at = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None]
    seen = (at >= span.first[..., None]) & (at < span.stop[..., None])  # [B, A, S, T]
    scores = jnp.where(seen[:, None, None], capped(product("baskgh,btkh->bkgast", grouped, k)), -jnp.inf)
    if own is not None:
        block = capped(product("baskgh,bajkh->bkgasj", grouped, own[0]))
        if own_mask is not None:
            block = jnp.where(own_mask[None, None, None, None], block, -jnp.inf)
        scores = jnp.concatenate([scores, block], axis=-1)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    out = product("bkgast,btkh->baskgh", weights[..., : k.shape[1]], v)
    if own is not None:
        out = out + product("bkgasj,bajkh->baskgh", weights[..., k.shape[1] :], own[1])
    return out.reshape(q.shape).astype(q.dtype)

"""How many drafts are worth verifying, by DSpark's confidences (arXiv 2607.05147, section 5.2).

Both rules decide on draft k by what is known before draft k was drawn (c_k sees the tokens up to k - 1): so they don't bias the output.
"""

import jax
import jax.numpy as jnp


def keep_confident(confidence: jax.Array, threshold: float) -> jax.Array:
    """Drafts before the first one of confidence below `threshold`: float32 [B, K] -> int32 [B]."""
    return jnp.sum(jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1), axis=1)


def keep_scheduled(confidence: jax.Array, running: jax.Array, steps_per_s: jax.Array) -> jax.Array:
    """The hardware-aware prefix scheduler (algorithm 1).

    Drafts of all running rows are taken in order of falling survival, the product of a row's confidences so far, as long as the expected
    tokens a second (R + the survivals taken) * steps_per_s(R + drafts taken) rise with every one; the first that doesn't raise them ends
    it, since looking further would let a draft's fate depend on later ones.

    Args:
        confidence: float32 [B, K].
        running: bool [B]; the others keep none.
        steps_per_s: float32 [N], engine steps a second at n = 1 .. N tokens a verify pass; N >= B * (K + 1).

    Returns:
        int32 [B], drafts kept.
    """
    batch, drafts = confidence.shape
    assert steps_per_s.shape[0] >= batch * (drafts + 1), "the cost curve ends too early"
    survival = jnp.where(running[:, None], jnp.cumprod(confidence, axis=1), -1.0)
    flat = survival.T.reshape(-1)  # slot by slot, so that of equal survivals a row's earlier draft comes first
    order = jnp.argsort(-flat, stable=True)
    ranked = flat[order]
    rows = jnp.sum(running.astype(jnp.int32))
    taken = jnp.arange(batch * drafts + 1, dtype=jnp.int32)
    expected = rows.astype(jnp.float32) + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.maximum(ranked, 0.0))])
    rate = expected * steps_per_s[jnp.maximum(rows + taken - 1, 0)]
    rises = (rate[1:] > rate[:-1]) & (ranked >= 0)
    number = jnp.sum(jnp.cumprod(rises.astype(jnp.int32)))
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    return jnp.sum((rank < number).reshape(drafts, batch), axis=0).astype(jnp.int32)

"""How far a draft distribution q is from the verifier's p, position by position, and how much each slot of a block weighs.

Both come as logits over the draft vocabulary; the verifier is frozen, so no gradient flows to its side. Definitions are those of
speculators 0.9 (losses/eager.py), which tests/test_losses.py compares with. A = sum_v min(p_v, q_v) is the probability that rejection
sampling accepts a draft.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

# Loss names and what each weighs; the loss is the weighted sum.
Mixture = Mapping[str, float]

# Below this acceptance nla is flat.
MIN_ACCEPTANCE = 1e-5
# How fast lk_hybrid goes over from KL to TV as acceptance grows (arXiv 2602.23881).
HYBRID_RATE = 3.0


def position_loss(name: str, logits: jax.Array, target: jax.Array) -> jax.Array:
    """The loss `name`, one of LOSSES, at each position.

    logits, target: [..., Vd] of any float dtype, computed in float32. Returns float32 [...]. Nothing [..., Vd] is kept for the backward
    pass but the two arguments.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; one of {', '.join(LOSSES)}")

    def rows(x: jax.Array) -> jax.Array:
        # XLA's CPU reductions over the last of three axes take eight times as long as over that of two.
        return _float32(x).reshape(-1, x.shape[-1])

    loss = jax.checkpoint(LOSSES[name], prevent_cse=False)  # what is made again in the same part is made once
    return loss(rows(logits), lax.stop_gradient(rows(target))).reshape(logits.shape[:-1])


def mixture_loss(mixture: Mixture, logits: jax.Array, target: jax.Array) -> jax.Array:
    """The weighted sum of the mixture's losses: [..., Vd] twice -> float32 [...]."""
    total = jnp.zeros(logits.shape[:-1], jnp.float32)
    for name, weight in mixture.items():
        total = total + weight * position_loss(name, logits, target)
    return total


def ce_on_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy: logits [..., Vd] and draft ids int32 [...] -> float32 [...]. A label outside the vocabulary has a logit of 0."""
    logits = _float32(logits)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # A masked sum, not a gather: its gradient is elementwise (no scatter), and it stays so when the vocabulary is sharded.
    chosen = jnp.sum(jnp.where(ids == labels[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def acceptance(logits: jax.Array, target: jax.Array) -> jax.Array:
    """A = sum_v min(p_v, q_v): [..., Vd] twice -> float32 [...]."""
    p, q = jax.nn.softmax(_float32(target), axis=-1), jax.nn.softmax(_float32(logits), axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def fixed_decay(slots: int, gamma: float, first: int) -> jax.Array:
    """Weight exp(-(k - first) / gamma) of slot k of a block, 0 before slot `first`, the first one that drafts: float32 [slots]."""
    slot = jnp.arange(slots, dtype=jnp.float32) - first
    return jnp.where(slot < 0, 0.0, jnp.exp(-slot / gamma))


def dpace(ce: jax.Array, mask: jax.Array, alpha: float) -> jax.Array:
    """D-PACE: a slot weighs as much as the drafts that hang on it are likely to be reached (SPEC 3e).

    With the smoothed confidence s_k = (1 - alpha) exp(-ce_k) + alpha, 1 where masked out, slot k weighs sum_{j >= k} prod_{i <= j} s_i
    over the slots j that count. No gradient.

    Args:
        ce: float [..., S], cross-entropy of each slot.
        mask: bool [..., S], the slots that count; the others weigh 0.
        alpha: in [0, 1].

    Returns:
        float32 [..., S].
    """
    confidence = jnp.exp(-lax.stop_gradient(_float32(ce)))
    smooth = jnp.where(mask, (1 - alpha) * confidence + alpha, 1.0)
    reached = jnp.where(mask, jnp.cumprod(smooth, axis=-1), 0.0)
    return jnp.where(mask, lax.cumsum(reached, axis=reached.ndim - 1, reverse=True), 0.0)


def _kl(logits: jax.Array, target: jax.Array) -> jax.Array:
    """KL(p || q)."""
    log_p = jax.nn.log_softmax(target, axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(logits, axis=-1)), axis=-1)


def _reverse_kl(logits: jax.Array, target: jax.Array) -> jax.Array:
    """KL(q || p)."""
    return _kl(target, logits)


def _js(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Half of KL(p || m) + KL(q || m), m being the mean of p and q."""
    log_p, log_q = jax.nn.log_softmax(target, axis=-1), jax.nn.log_softmax(logits, axis=-1)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * jnp.sum(jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m), axis=-1)


def _ce(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Cross-entropy on the verifier's most likely token."""
    return ce_on_labels(logits, lax.argmax(target, target.ndim - 1, jnp.int32))


def _tv(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Total variation, 1 - A."""
    return 1.0 - acceptance(logits, target)


def _nla(logits: jax.Array, target: jax.Array) -> jax.Array:
    """-log A."""
    return -jnp.log(jnp.maximum(acceptance(logits, target), MIN_ACCEPTANCE))


def _lk_hybrid(logits: jax.Array, target: jax.Array) -> jax.Array:
    """KL while drafts are rejected, TV once they are accepted (arXiv 2602.23881)."""
    accepted = acceptance(logits, target)
    weight = jnp.exp(-HYBRID_RATE * lax.stop_gradient(accepted))
    return weight * _kl(logits, target) + (1.0 - weight) * (1.0 - accepted)


LOSSES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "ce": _ce,
    "tv": _tv,
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)

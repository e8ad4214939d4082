"""Which drafts stay, and the token behind them: the rules that keep the verifier's distribution exactly.

All rules work on K drafts of which a row's first `kept` count. p is the verifier's distribution after a slot's prefix, q the one that the
slot's draft was drawn from; a greedy draft has a point mass for q. Everything is compared in verifier ids.
"""

from dataclasses import dataclass
from enum import StrEnum

import jax
import jax.numpy as jnp

from jaxspec.decoding.randomness import Purpose, draw_keys, slot_uniforms, uniform
from jaxspec.decoding.sampling import SamplingRows, any_drawn, draw, sample, support_of, vocabulary_first
from jaxspec.decoding.support import Support
from jaxspec.layers.argmax import argmax


class Rule(StrEnum):
    """How drafts are accepted."""

    STANDARD = "standard"  # each draft by itself (arXiv 2211.17192, algorithm 1)
    BLOCK = "block"  # the longest prefix that the joint probability carries (arXiv 2403.10444, algorithm 2)
    SYNTHETIC = "synthetic"  # by given rates, whatever the tokens: for timing only, not lossless


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """K drafts a row, as the rules see them.

    Fields:
        tokens: int32 [B, K], verifier ids.
        ids: int32 [B, K], the same in the draft vocabulary.
        log_q: float32 [B, K, Vd], log-probabilities that they were drawn from; None: each is a point mass.
        target_ids: int32 [Vd], verifier ids of the draft ids; None: the same ids.
        kept: int32 [B], 0 .. K, drafts that the verifier has seen. It must not depend on the drafts behind them.
    """

    tokens: jax.Array
    ids: jax.Array
    log_q: jax.Array | None
    target_ids: jax.Array | None
    kept: jax.Array

    def probability(self) -> jax.Array:
        """q of every draft, float32 [B, K]."""
        if self.log_q is None:
            return jnp.ones(self.tokens.shape, jnp.float32)
        return jnp.exp(jnp.take_along_axis(self.log_q, self.ids[..., None], axis=-1)[..., 0])


@dataclass(frozen=True)
class Verified:
    """The verifier's distributions p behind the anchor and behind each draft.

    Fields:
        logits: float32 [V, B (K + 1)], slot by slot within each row.
        support: of [B, K + 1] slots.
    """

    logits: jax.Array
    support: Support

    def probability(self, tokens: jax.Array) -> jax.Array:
        """p of tokens int32 [B, K], each behind the slots before its own -> float32 [B, K]."""
        support = jax.tree.map(lambda leaf: leaf[:, :-1], self.support)
        return jnp.exp(support.log_probs_of(self.logits[tokens, self._columns()[:, :-1]], tokens))

    def log_probs(self, slot: jax.Array) -> jax.Array:
        """Of a whole vocabulary at one slot a row: int32 [B] -> float32 [B, V]."""
        slot = slot[:, None]
        support = jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, slot, axis=1)[:, 0], self.support)
        column = jnp.take_along_axis(self._columns(), slot, axis=1)[:, 0]
        return support.log_probs(jnp.take(self.logits, column, axis=1, mode="clip").T)

    def _columns(self) -> jax.Array:
        """Of each slot: int32 [B, K + 1]."""
        return jnp.arange(self.logits.shape[1], dtype=jnp.int32).reshape(self.support.peak.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """accepted: int32 [B], 0 .. kept. token: int32 [B], what follows the accepted drafts: the bonus token, or a rejected draft's
    replacement."""

    accepted: jax.Array
    token: jax.Array


def accept(
    logits: jax.Array,
    drafts: Drafts,
    rows: SamplingRows,
    position: jax.Array,
    rule: Rule,
    synthetic_rates: jax.Array | None = None,
) -> Verdict:
    """Apply `rule`. A batch of greedy rows costs one argmax a slot.

    Args:
        logits: float32 [B, K + 1, V], the verifier's after the anchor and after each draft, penalties already applied; rows behind
            `kept` hold anything finite.
        drafts: what was drafted.
        rows: sampling parameters [B].
        position: int32 [B], absolute position of each row's anchor.
        rule: which rule; SYNTHETIC needs `synthetic_rates` float32 [K], the probability that a draft is accepted when those before it
            are.
    """
    if drafts.tokens.shape[1] == 0:
        none = jnp.zeros_like(position)
        return Verdict(none, sample(logits[:, 0], rows, position, none))
    if rule is Rule.SYNTHETIC:
        assert synthetic_rates is not None
        chance = _uniform(rows, position, drafts.tokens.shape[1]) < synthetic_rates[None]
        accepted = _leading(chance, drafts.kept)
        return Verdict(accepted, sample(_row(logits, accepted), rows, position, accepted))

    slots = logits.shape[:2]

    def greedily(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        best = argmax(logits.T).reshape(slots)  # [B, K + 1]
        accepted = _leading(best[:, :-1] == drafts.tokens, drafts.kept)
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]

    def sampled(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        judge = _judge_block if rule is Rule.BLOCK else _judge_each
        u = _uniform(rows, position, drafts.tokens.shape[1])

        def reached(support: Support) -> jax.Array:
            accepted, _ = judge(Verified(logits, support), drafts, u)
            return jnp.arange(slots[1], dtype=jnp.int32)[None] <= accepted[:, None]

        # Block verification looks at every slot, the standard rule at none behind a rejected draft.
        p = Verified(logits, support_of(logits.reshape(-1, *slots), rows, None if rule is Rule.BLOCK else reached))
        accepted, weight = judge(p, drafts, u)
        weights = jnp.exp(p.log_probs(accepted))  # [B, V]
        residual = _residual(weights, drafts, accepted, weight)
        rejected = accepted < drafts.kept
        # Rounding may leave no residual: then the draft's replacement comes from p.
        some = jnp.sum(residual, axis=-1) > 0
        weights = jnp.where((rejected & some)[:, None], residual, weights)
        return accepted, _draw(weights, rejected, rows, position, accepted)

    return Verdict(*jax.lax.cond(any_drawn(rows), sampled, greedily, vocabulary_first(logits)))


def _judge_each(p: Verified, drafts: Drafts, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept draft x while u q(x) < p(x), u float32 [B, K]. Returns the number accepted [B], and the weight of p in the residual [B]: 1."""
    accepted = _leading(u * drafts.probability() < p.probability(drafts.tokens), drafts.kept)
    return accepted, jnp.ones(accepted.shape, jnp.float32)


def _judge_block(p: Verified, drafts: Drafts, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept the longest prefix i with u_i <= h_i, where r_i = min(r_{i-1} p(x_i) / q(x_i), 1) and h_i = R_i / (R_i + 1 - r_i), R_i the
    mass of max(r_i p - q, 0) behind prefix i; h = r for the whole of what was kept. Returns it, and r of the accepted prefix."""
    of_p, of_q = p.probability(drafts.tokens), drafts.probability()
    accepted = jnp.zeros_like(drafts.kept)
    ratio = weight = jnp.ones(accepted.shape, jnp.float32)
    drafted = drafts.tokens.shape[1]
    for i in range(1, drafted + 1):
        ratio = jnp.minimum(ratio * of_p[:, i - 1] / of_q[:, i - 1], 1.0)
        mass = jnp.zeros_like(ratio)
        if i < drafted:
            slot = jnp.full_like(accepted, i)
            mass = jnp.sum(_residual(jnp.exp(p.log_probs(slot)), drafts, slot, ratio), axis=-1)
        # R = 0 with r = 1 is a prefix behind which p equals q: nothing is left to gain by a shorter one.
        threshold = jnp.where(mass + 1.0 - ratio > 0, mass / (mass + 1.0 - ratio), 1.0)
        threshold = jnp.where(drafts.kept == i, ratio, threshold)
        take = (u[:, i - 1] <= threshold) & (i <= drafts.kept) & (ratio > 0)
        accepted = jnp.where(take, i, accepted)
        weight = jnp.where(take, ratio, weight)
    return accepted, weight


def _residual(p: jax.Array, drafts: Drafts, slot: jax.Array, weight: jax.Array) -> jax.Array:
    """max(weight p - q, 0) over verifier ids, q being that of the draft in `slot` int32 [B]; p float32 [B, V] -> [B, V]."""
    slot = jnp.minimum(slot, drafts.tokens.shape[1] - 1)
    rows = jnp.arange(p.shape[0], dtype=jnp.int32)
    left = weight[:, None] * p
    if drafts.log_q is None:
        left = left.at[rows, drafts.tokens[rows, slot]].add(-1.0)
    else:
        q = jnp.exp(drafts.log_q[rows, slot])  # [B, Vd]
        left = left - q if drafts.target_ids is None else left.at[:, drafts.target_ids].add(-q)
    return jnp.maximum(left, 0.0)


def _draw(
    weights: jax.Array, rejected: jax.Array, rows: SamplingRows, position: jax.Array, slot: jax.Array
) -> jax.Array:
    """One token a row from weights float32 [B, V]: what replaces a draft where rejected bool [B], else the bonus token; slot int32 [B]."""
    purpose = jnp.where(rejected, jnp.uint32(Purpose.RESIDUAL), jnp.uint32(Purpose.SAMPLE))
    return draw(weights, uniform(draw_keys(rows.seeds, position, slot, purpose)))


def _uniform(rows: SamplingRows, position: jax.Array, drafted: int) -> jax.Array:
    """u in [0, 1) for every slot, float32 [B, K]."""
    return slot_uniforms(rows.seeds, position, jnp.arange(drafted, dtype=jnp.int32), Purpose.ACCEPT)


def _leading(good: jax.Array, kept: jax.Array) -> jax.Array:
    """How many of the first `kept` are good before the first that isn't: bool [B, K], int32 [B] -> int32 [B]."""
    counts = jnp.arange(good.shape[1], dtype=jnp.int32)[None] < kept[:, None]
    return jnp.sum(jnp.cumprod((good & counts).astype(jnp.int32), axis=1), axis=1)


def _row(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, T, V], index int32 [B] -> [B, V]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]

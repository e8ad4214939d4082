"""From logits to token ids, row by row: penalties, temperature, min-p, top-k, top-p, draw.

The order is vLLM's (v1/sample/sampler.py and v1/worker/gpu/sample/sampler.py, read at 3e342658 and 0120ce5a): repetition, frequency and
presence penalty, temperature, min-p, top-k, top-p. transformers applies min-p last, which gives another top-p set.

Functions take logits of any rank [B, ..., V], so that they serve one token a row as well as the T positions of a block; parameters are
one value a row [B].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.decoding.params import GREEDY_BELOW, SamplingParams
from jaxspec.decoding.randomness import Purpose, draw_keys, seed_words, uniform
from jaxspec.decoding.support import Support, find_support
from jaxspec.layers.argmax import argmax

# Of a vocabulary of up to a million tokens the likeliest alone reaches it; float32 holds no arbitrarily small one.
LEAST_TOP_P = 1e-6

CHUNK = 128  # tokens of a vocabulary that are drawn among together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of a batch, one value a row; `SamplingParams` says what each does.

    All float32 [B] but: top_k int32 [B] (<= 0: off), seeds uint32 [B, 2] (`randomness.seed_words`).
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seeds: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> "SamplingRows":
        """The requests in row order; `seeds` replaces `SamplingParams.seed`, which may be None."""

        def floats(values: list[float]) -> jax.Array:
            return jnp.array(values, jnp.float32)

        return cls(
            temperature=floats([p.temperature for p in params]),
            top_k=jnp.array([min(p.top_k, 2**31 - 1) for p in params], jnp.int32),
            top_p=floats([max(p.top_p, LEAST_TOP_P) for p in params]),
            min_p=floats([p.min_p for p in params]),
            repetition_penalty=floats([p.repetition_penalty for p in params]),
            presence_penalty=floats([p.presence_penalty for p in params]),
            frequency_penalty=floats([p.frequency_penalty for p in params]),
            seeds=jnp.array(seed_words(seeds)),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """What the penalties look at. prompt: bool [B, V], the token stands in the prompt; output: int32 [B, V], times in the answer."""

    prompt: jax.Array
    output: jax.Array

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], vocab_size: int) -> "TokenCounts":
        """Prompts in row order, with an empty answer."""
        seen = np.zeros((len(prompts), vocab_size), bool)
        for row, prompt in enumerate(prompts):
            seen[row, np.asarray(prompt, np.int64)] = True
        return cls(jnp.array(seen), jnp.array(np.zeros(seen.shape, np.int32)))

    def add(self, tokens: jax.Array, committed: jax.Array) -> "TokenCounts":
        """Count one more answer token a row: tokens int32 [B], where committed bool [B]."""
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return TokenCounts(self.prompt, self.output.at[rows, tokens].add(committed.astype(jnp.int32)))


def penalize(logits: jax.Array, counts: TokenCounts, rows: SamplingRows) -> jax.Array:
    """Apply repetition, frequency and presence penalty.

    Args:
        logits: float32 [B, ..., V].
        counts: arrays of the same rank as logits, broadcastable to them.
        rows: parameters [B].

    Returns:
        float32 [B, ..., V].
    """
    seen = jnp.logical_or(counts.prompt, counts.output > 0)
    repetition = jnp.where(seen, _spread(rows.repetition_penalty, logits), jnp.float32(1))
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - _spread(rows.frequency_penalty, logits) * counts.output.astype(jnp.float32)
    return logits - _spread(rows.presence_penalty, logits) * (counts.output > 0).astype(jnp.float32)


# Which slots bool [B, T] a result depends on, by supports [B, T] of which those behind the first that it names wrongly may hold nothing.
Reached = Callable[[Support], jax.Array]


def support_of(logits: jax.Array, rows: SamplingRows, reached: Reached | None = None) -> Support:
    """Temperature, min-p, top-k and top-p: the distributions that tokens are drawn from.

    A greedy row's is a point mass on the most likely token (the lowest id among equals). Among equal logits at a cut the lowest ids stay,
    so that exactly top_k tokens stay, and top-p keeps the smallest set.

    Args:
        logits: float32 [V, B, ...], the vocabulary first, penalties already applied.
        rows: parameters [B].
        reached: says of slots [B, T] which matter, once those before are known: a CPU goes from slot to slot, as far as any row comes.
            The others may hold nothing.

    Returns:
        A support for each of the slots [B, ...].
    """
    slots = logits.shape[1:]
    greedy = rows.temperature < GREEDY_BELOW

    def find(logits: jax.Array, wanted: jax.Array | None = None) -> Support:
        """Of logits float32 [V, B, ...]."""
        slots = logits.shape[1:]

        def each(values: jax.Array, of_greedy: int) -> jax.Array:
            values = jnp.where(greedy, jnp.full_like(values, of_greedy), values)
            return jnp.repeat(values, math.prod(slots[1:]), total_repeat_length=math.prod(slots))

        filters = each(rows.temperature, 1), each(rows.top_k, 1), each(rows.top_p, 1), each(rows.min_p, 0)
        found = find_support(logits.reshape(logits.shape[0], -1), *filters, wanted)
        return jax.tree.map(lambda leaf: leaf.reshape(slots), found)

    if reached is None:
        return find(logits)

    def as_reached(logits: jax.Array) -> Support:
        def goes_on(found: tuple[jax.Array, Support]) -> jax.Array:
            slot, support = found
            return (slot < slots[1]) & jnp.any(_slot(reached(support), jnp.minimum(slot, slots[1] - 1)))

        def next_slot(found: tuple[jax.Array, Support]) -> tuple[jax.Array, Support]:
            slot, support = found
            new = find(lax.optimization_barrier(_slot(logits, slot, 2)), _slot(reached(support), slot))
            return slot + 1, jax.tree.map(lambda all_, one: all_.at[:, slot].set(one), support, new)

        return lax.while_loop(goes_on, next_slot, (jnp.int32(0), Support.nothing(slots)))[1]

    return lax.platform_dependent(logits, cpu=as_reached, default=find)


def _slot(x: jax.Array, slot: jax.Array, axis: int = 1) -> jax.Array:
    """One slot int32 of x [B, T], or of [V, B, T] along axis 2."""
    return lax.dynamic_index_in_dim(x, slot, axis, keepdims=False)


def filter_logits(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Log-probabilities float32 [B, ..., V] of what `support_of` leaves of logits float32 [B, ..., V]; -inf for the rest."""
    return support_of(jnp.moveaxis(logits, -1, 0), rows).log_probs(logits)


def sample(
    logits: jax.Array, rows: SamplingRows, position: jax.Array, slot: jax.Array, purpose: Purpose = Purpose.SAMPLE
) -> jax.Array:
    """Draw one token a row. A batch of greedy rows costs one argmax.

    Args:
        logits: float32 [B, V], penalties already applied.
        rows: sampling parameters [B].
        position: int32 [B], absolute position of each row's anchor.
        slot: int32 [B], slots after the anchor.
        purpose: what the draw is for; part of its key.

    Returns:
        int32 [B].
    """

    def drawn(logits: jax.Array) -> jax.Array:
        return draw(jnp.exp(filter_logits(logits.T, rows)), uniform(draw_keys(rows.seeds, position, slot, purpose)))

    def likeliest(logits: jax.Array) -> jax.Array:
        return argmax(logits.T)

    return jax.lax.cond(any_drawn(rows), drawn, likeliest, vocabulary_first(logits))


def any_drawn(rows: SamplingRows) -> jax.Array:
    """Whether any row draws, rather than taking the most likely token; bool."""
    return jnp.any(rows.temperature >= GREEDY_BELOW)


def vocabulary_first(logits: jax.Array) -> jax.Array:
    """float32 [..., V] -> [V, N], as the product that makes logits on a CPU lays them out: what the branches of a `cond` take.

    Without the barrier XLA moves the transposition into the branches, and lays the logits out anew on both sides of the way in.
    """
    return jax.lax.optimization_barrier(logits.reshape(-1, logits.shape[-1]).T)


def draw(weights: jax.Array, u: jax.Array) -> jax.Array:
    """One token a row, with a chance in proportion to its weight: the one in which u times the sum of the weights lies.

    Args:
        weights: float32 [B, V], at least 0, not all 0 in a row.
        u: float32 [B], in [0, 1).

    Returns:
        int32 [B]; never a token of weight 0.
    """
    batch, size = weights.shape
    if size <= CHUNK:
        return _place(weights, u * jnp.sum(weights, axis=1))
    chunks = jnp.pad(weights, ((0, 0), (0, -size % CHUNK))).reshape(batch, -1, CHUNK)
    masses = jnp.sum(chunks, axis=2)
    target = u * jnp.sum(masses, axis=1)
    chunk = _place(masses, target)[:, None]
    before = jnp.sum(jnp.where(jnp.arange(masses.shape[1], dtype=jnp.int32)[None] < chunk, masses, 0.0), axis=1)
    within = jnp.take_along_axis(chunks, chunk[..., None], axis=1, mode="clip")[:, 0]
    return CHUNK * chunk[:, 0] + _place(within, target - before)


def _place(weights: jax.Array, target: jax.Array) -> jax.Array:
    """The first place whose weight, with those before it, exceeds the target; where rounding leaves none, the last that has a weight.

    weights float32 [B, N], target float32 [B] -> int32 [B].
    """
    sums = jnp.cumsum(weights, axis=1)
    beyond = (sums > jnp.maximum(target, 0.0)[:, None]) & (weights > 0)
    first = jax.lax.argmax(beyond, 1, jnp.int32)
    ids = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0, ids, 0), axis=1)
    return jnp.where(jnp.any(beyond, axis=1), first, last)


def _spread(values: jax.Array, logits: jax.Array) -> jax.Array:
    """[B] -> [B, 1, ..., 1] of the logits' rank."""
    return jnp.reshape(values, (-1,) + (1,) * (logits.ndim - 1))

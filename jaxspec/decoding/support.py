"""The distribution a token is drawn from, as a few numbers a slot: what temperature, min-p, top-k and top-p leave, and its mass.

What is left are always the largest logits, of equal ones those with the lowest ids; so the last token left says all. Nothing as large as
the vocabulary is kept: a cycle needs a few probabilities of every slot, and a whole distribution of one.

Sorting the vocabulary takes too long. On a CPU the LISTED largest logits are picked from it and sorted; mostly they hold everything that is
left. Otherwise, and on other platforms, the last one left is searched bit by bit, in 32 passes over V. Both find the same tokens, up to the
rounding of sums of probabilities.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LISTED = 64  # logits of a slot that are picked and sorted
LINE = 16  # neighbours that are picked together, by the largest of them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Support:
    """Distributions, one a slot [...].

    Fields:
        peak: float32, the largest logit.
        temperature: float32, above 0.
        cut: float32, the smallest logit that is left.
        last: int32, the highest id left among logits equal to the cut.
        log_mass: float32, log of the sum of exp((logit - peak) / temperature) over what is left.
    """

    peak: jax.Array
    temperature: jax.Array
    cut: jax.Array
    last: jax.Array
    log_mass: jax.Array

    @classmethod
    def nothing(cls, slots: tuple[int, ...]) -> "Support":
        """Slots in which no token is left."""
        zero = jnp.zeros(slots, jnp.float32)
        return cls(zero, zero + 1, zero + jnp.inf, jnp.full(slots, -1, jnp.int32), zero)

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """The slots' logits float32 [..., V] -> log-probabilities float32 [..., V], -inf outside the support."""
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jax.tree.map(lambda leaf: leaf[..., None], self).log_probs_of(logits, ids)

    def log_probs_of(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Of one token a slot: its logit float32 [...] and its id int32 [...] -> float32 [...]."""
        left = (logits > self.cut) | ((logits == self.cut) & (ids <= self.last))
        return jnp.where(left, (logits - self.peak) / self.temperature - self.log_mass, -jnp.inf)


class Edge(NamedTuple):
    """Where supports end, [M]: `cut` and `last` as in `Support`; `mass` float32, of exp((logit - peak) / temperature)."""

    cut: jax.Array
    last: jax.Array
    mass: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrowing:
    """What top-k and top-p start from: M slots, the vocabulary first.

    Fields:
        logits: float32 [V, M].
        peak: float32 [M], the largest ones.
        temperature: float32 [M], above 0.
        edge: what min-p left.
        top_k: int32 [M], <= 0: off.
        top_p: float32 [M], 1: off.
    """

    logits: jax.Array
    peak: jax.Array
    temperature: jax.Array
    edge: Edge
    top_k: jax.Array
    top_p: jax.Array

    def weights(self, logits: jax.Array) -> jax.Array:
        """exp((logit - peak) / temperature) of logits float32 [N, M], 0 for what min-p dropped. The peak goes to 0 first, so that a
        small temperature cannot overflow."""
        scaled = (logits - self.peak[None]) / self.temperature[None]
        return jnp.where(logits >= self.edge.cut[None], jnp.exp(scaled), 0.0)

    def ending_at(self, edge: Edge) -> Support:
        """The supports that end there."""
        return Support(self.peak, self.temperature, edge.cut, edge.last, jnp.log(edge.mass))


def find_support(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    wanted: jax.Array | None = None,
) -> Support:
    """What temperature, min-p, top-k and top-p leave, in this order.

    Args:
        logits: float32 [V, M]; the vocabulary comes first, as it does in the product that makes logits on a CPU.
        temperature: float32 [M], above 0.
        top_k: int32 [M], <= 0: off.
        top_p: float32 [M], 1: off.
        min_p: float32 [M], 0: off.
        wanted: bool [M], which supports matter; None: all. The others may hold too little.

    Returns:
        M supports.
    """
    peak = jnp.max(logits, axis=0)
    edge = Edge(peak + temperature * jnp.log(min_p), jnp.full_like(top_k, logits.shape[0] - 1), peak)
    start = Narrowing(logits, peak, temperature, edge, top_k, top_p)
    start = replace(start, edge=edge._replace(mass=jnp.sum(start.weights(logits), axis=0)))

    def narrow(start: Narrowing) -> Edge:
        return lax.platform_dependent(start, cpu=partial(pick_then_search, wanted=wanted), default=search)

    narrowed = jnp.any((top_k > 0) | (top_p < 1))
    return start.ending_at(lax.cond(narrowed, narrow, lambda start: start.edge, start))


def pick_then_search(start: Narrowing, wanted: jax.Array | None = None) -> Edge:
    """What the largest logits show; where they don't suffice, a search, one slot at a time, since a slot fits in a CPU's cache."""
    picked, enough = pick(start)

    def search_one(found: tuple[Edge, jax.Array]) -> tuple[Edge, jax.Array]:
        edge, missing = found
        slot = lax.argmax(missing, 0, jnp.int32)
        one = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, slot, 1, axis=leaf.ndim - 1), start)
        edge = jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, slot, 0), edge, search(one))
        return edge, lax.dynamic_update_slice_in_dim(missing, jnp.zeros(1, jnp.bool_), slot, 0)

    missing = ~enough if wanted is None else ~enough & wanted
    return lax.while_loop(lambda found: jnp.any(found[1]), search_one, (picked, missing))[0]


def pick(start: Narrowing) -> tuple[Edge, jax.Array]:
    """The edges by the largest logits, and whether those are enough to find them, bool [M]."""
    values, ids = _largest_logits(start.logits)  # [C, M]
    number, size = values.shape[0], start.logits.shape[0]
    rank = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    limited, cut_by_mass = start.top_k > 0, start.top_p < 1
    candidate = (values >= start.edge.cut[None]) & ((rank < start.top_k[None]) | ~limited[None])
    weights = jnp.where(candidate, start.weights(values), 0.0)
    total = jnp.where(limited, jnp.sum(weights, axis=0), start.edge.mass)
    earlier = jnp.tri(number, k=-1, dtype=jnp.float32)
    before = jnp.dot(earlier, weights, precision=lax.Precision.HIGHEST)  # a cumulative sum that compiles fast
    left = candidate & ((before < (start.top_p * total)[None]) | ~cut_by_mass[None])
    count = jnp.sum(left.astype(jnp.int32), axis=0)
    place = jnp.maximum(count - 1, 0)[None]
    edge = Edge(
        jnp.take_along_axis(values, place, axis=0)[0],
        jnp.take_along_axis(ids, place, axis=0)[0],
        jnp.sum(jnp.where(left, weights, 0.0), axis=0),
    )
    enough = jnp.where(limited, start.top_k <= number, count < number) | (number == size)
    narrow = limited | cut_by_mass
    return jax.tree.map(lambda found, whole: jnp.where(narrow, found, whole), edge, start.edge), enough | ~narrow


def _largest_logits(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of float32 [V, M] the LISTED largest [C, M] in falling order, of equal ones the lowest ids first, and their ids int32 [C, M].

    They lie within the LISTED lines with the largest maxima, since each of those holds one that comes before anything in another line.
    """
    size, slots = logits.shape
    lines = size // LINE
    if size % LINE or lines <= LISTED:
        values, ids = lax.top_k(logits.T, min(LISTED, size))
        return values.T, ids.T
    maxima = jnp.max(logits.reshape(lines, LINE, slots), axis=1)
    _, line = lax.top_k(maxima.T, LISTED)
    line = jnp.sort(line, axis=1)  # in the order of the ids, so that picking among equals takes the lowest
    ids = (LINE * line[..., None] + jnp.arange(LINE, dtype=jnp.int32)[None, None]).reshape(slots, LISTED * LINE)
    values, place = lax.top_k(jnp.take_along_axis(logits, ids.T, axis=0, mode="clip").T, LISTED)
    return values.T, jnp.take_along_axis(ids, place, axis=1, mode="clip").T


def search(start: Narrowing) -> Edge:
    """The edges by passes over everything."""
    order, weights = _order(start.logits), start.weights(start.logits)
    left = start.logits >= start.edge.cut[None]

    def top_k(left: jax.Array) -> jax.Array:
        wanted = jnp.where(start.top_k > 0, jnp.minimum(start.top_k, left.shape[0]), left.shape[0])
        return left & _largest(order, left.astype(jnp.float32), wanted.astype(jnp.float32))

    def top_p(left: jax.Array) -> jax.Array:
        of_left = jnp.where(left, weights, 0.0)
        enough = _largest(order, of_left, start.top_p * jnp.sum(of_left, axis=0))
        return left & (enough | (start.top_p >= 1)[None])

    left = lax.cond(jnp.any(start.top_k > 0), top_k, lambda left: left, left)
    left = lax.cond(jnp.any(start.top_p < 1), top_p, lambda left: left, left)
    cut = jnp.min(jnp.where(left, start.logits, jnp.inf), axis=0)
    ids = lax.broadcasted_iota(jnp.int32, left.shape, 0)
    last = jnp.max(jnp.where(left & (start.logits == cut[None]), ids, 0), axis=0)
    return Edge(cut, last, jnp.sum(jnp.where(left, weights, 0.0), axis=0))


def _largest(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mark the smallest set of largest tokens whose weights add up to `wanted`; of equal ones the lowest ids.

    order uint32 [V, M], weights float32 [V, M], equal tokens having equal weights; wanted float32 [M], above 0. Returns bool [V, M].
    """

    def weight_of(chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, weights, 0.0), axis=0)

    def next_bit(index: jax.Array, cut: jax.Array) -> jax.Array:
        candidate = cut | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(weight_of(order >= candidate[None]) >= wanted, candidate, cut)

    cut = lax.fori_loop(0, 32, next_bit, jnp.zeros(order.shape[1], jnp.uint32))
    above, equal = order > cut[None], order == cut[None]
    each = jnp.max(jnp.where(equal, weights, 0.0), axis=0)
    needed = jnp.ceil((wanted - weight_of(above)) / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
    number = jnp.sum(equal.astype(jnp.int32), axis=0)
    # A float beyond int32 only arises where nothing is equal to the cut.
    needed = jnp.clip(needed, 1, order.shape[0]).astype(jnp.int32)

    def lowest_ids(equal: jax.Array) -> jax.Array:
        return equal & (jnp.cumsum(equal.astype(jnp.int32), axis=0) <= needed[None])

    return above | lax.cond(jnp.any(number > needed), lowest_ids, lambda equal: equal, equal)


def _order(values: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order, so that a cut can be searched bit by bit. -0.0 must compare equal to 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

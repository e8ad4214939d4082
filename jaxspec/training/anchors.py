"""The random choices of a training step: where blocks start, and how deep each chain goes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.training.batch import Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chains:
    """Chains of positions, the longest first. Depth d >= 1 of a chain stands d positions behind its anchor.

    Fields:
        anchors: int32 [B, C], index in the row of each chain's depth 0.
        lengths: int32 [B, C], not increasing: deepest depth, 0 for a chain that is not there.
    """

    anchors: jax.Array
    lengths: jax.Array


def choose_anchors(key: jax.Array, batch: Batch, count: int) -> jax.Array:
    """Up to `count` positions a row from which an answer's token is the next one, at random without repetition.

    Returns int32 [B, count] in increasing order, -1 where a row has fewer. The last token of a prompt counts: decoding starts there.
    """
    following = jnp.roll(batch.loss_mask, -1, axis=1) & (jnp.roll(batch.documents, -1, axis=1) == batch.documents)
    valid = following & (batch.documents >= 0)
    valid = valid.at[:, -1].set(False)
    return _sorted(_pick(key, valid, count))


def choose_chains(key: jax.Array, batch: Batch, depths: int, ratio: float, floor: float, count: int) -> Chains:
    """Conditional drop (COD) sparsification (P-EAGLE, arXiv 2602.01469; SPEC 2e): ever fewer chains reach each depth.

    Positions are those of pairs (features of t, token t + 1). Up to `count` seeds are drawn among pairs t whose token is an answer's;
    depth d keeps int((seeds - d) * max(ratio^d, floor)) chains among those of depth d - 1 whose next pair is one too. Unlike the
    reference's, a chain stays within its document.

    Returns chains [B, min(count, T)].
    """
    length = batch.tokens.shape[1]
    within = jnp.roll(batch.documents, -1, axis=1) == batch.documents  # the pair's token stands in its document
    valid = jnp.roll(batch.loss_mask, -1, axis=1) & within & (batch.documents >= 0)
    valid = valid.at[:, -1].set(False)
    # Depth 1 is the seed itself, one pair behind the anchor.
    first = valid & (batch.positions > 0)
    seeds = _pick(key, first, count)  # in random order, which is each chain's priority
    number = jnp.sum(seeds >= 0, axis=1)
    alive = seeds >= 0
    lengths = jnp.zeros_like(seeds)
    for depth in range(1, depths):
        at = seeds + depth - 1
        rows = jnp.arange(seeds.shape[0])[:, None]
        inside = (at < length) & (seeds >= 0)
        clipped = jnp.clip(at, 0, length - 1)
        same = batch.documents[rows, clipped] == batch.documents[rows, jnp.clip(seeds, 0, length - 1)]
        alive = alive & inside & same & valid[rows, clipped]
        keep = ((number - depth).astype(jnp.float32) * max(ratio**depth, floor)).astype(jnp.int32)
        alive = alive & (jnp.cumsum(alive, axis=1) <= keep[:, None])
        lengths = jnp.where(alive, depth, lengths)
    order = jnp.argsort(-lengths, axis=1, stable=True)
    anchors = jnp.where(lengths > 0, seeds - 1, 0)
    return Chains(jnp.take_along_axis(anchors, order, axis=1), jnp.take_along_axis(lengths, order, axis=1))


def chains_at(seeds: int, depths: int, ratio: float, floor: float) -> tuple[int, ...]:
    """Most chains that reach depth 1, 2, ... `depths` - 1 from `seeds` of them."""
    return tuple(max(0, int((seeds - depth) * max(ratio**depth, floor))) for depth in range(1, depths))


def _pick(key: jax.Array, valid: jax.Array, count: int) -> jax.Array:
    """Up to `count` of the True places of valid bool [B, T], each row at random without repetition: int32 [B, count], -1 behind them."""
    priority = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    top, index = jax.lax.top_k(priority, min(count, valid.shape[1]))
    return jnp.where(top >= 0, index, -1).astype(jnp.int32)


def _sorted(index: jax.Array) -> jax.Array:
    """Increasing order, the -1 behind."""
    missing = jnp.iinfo(jnp.int32).max
    index = jnp.sort(jnp.where(index < 0, missing, index), axis=1)
    return jnp.where(index == missing, -1, index)

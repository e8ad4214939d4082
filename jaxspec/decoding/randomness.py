"""Randomness by position: every draw has a key of its own, whatever the batch, the padding or the mesh.

A key is folded from the request's seed, the absolute position of the anchor (the last committed token), the slot after the anchor and
the purpose of the draw. The anchor moves with every cycle, so no key is used twice, also where block verification looks past a rejected
slot. Draft, acceptance and residual draws have purposes of their own: sharing one stream among them biases the output.
"""

from collections.abc import Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

_IMPLEMENTATION = "threefry2x32"


class Purpose(IntEnum):
    """What a draw is for."""

    SAMPLE = 0  # the verifier's own token: plain decoding, and the bonus token
    DRAFT = 1  # a drafter's proposal
    ACCEPT = 2  # the uniform number that decides on a draft
    RESIDUAL = 3  # the token that replaces a rejected draft


def seed_words(seeds: Sequence[int]) -> np.ndarray:
    """Host form of the request keys: uint32 [B, 2], high and low word of each seed (0 .. 2**64 - 1).

    For seeds below 2**32 this is what `jax.random.key(seed)` holds; larger ones keep all their bits with 64-bit types off.
    """
    return np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2)


def draw_keys(words: jax.Array, position: jax.Array, slot: jax.Array, purpose: Purpose | jax.Array) -> jax.Array:
    """One typed key for each row.

    Args:
        words: uint32 [B, 2], from `seed_words`.
        position: int32 [B], absolute position of each row's anchor.
        slot: int32 [B], 0 for the draw right after the anchor.
        purpose: what the draw is for; one for all rows, or uint32 [B].

    Returns:
        Typed keys [B].
    """

    def one(words: jax.Array, *numbers: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)
        for number in numbers:
            key = jax.random.fold_in(key, number.astype(jnp.uint32))
        return key

    purposes = jnp.broadcast_to(jnp.asarray(purpose, jnp.uint32), position.shape)
    return jax.vmap(one)(words, position, slot, purposes)


def slot_uniforms(words: jax.Array, position: jax.Array, slots: jax.Array, purpose: Purpose) -> jax.Array:
    """Numbers in [0, 1), float32 [B, K], of K slots int32 [K]; the rest as in `draw_keys`."""
    batch, number = position.shape[0], slots.shape[0]
    words, position = jnp.repeat(words, number, axis=0), jnp.repeat(position, number)
    return uniform(draw_keys(words, position, jnp.tile(slots, batch), purpose)).reshape(batch, number)


def uniform(keys: jax.Array) -> jax.Array:
    """Numbers in [0, 1), float32 [B], one from each of typed keys [B]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)

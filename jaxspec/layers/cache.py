"""The key/value cache: per-row lengths, and nothing else that says which slots count."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.config import AttentionConfig


def cache_owners(layers: Sequence[AttentionConfig]) -> tuple[int, ...]:
    """The layers that own an entry in the cache, in order: those that read their own keys and values."""
    return tuple(i for i, layer in enumerate(layers) if layer.kv_source == i)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the committed tokens of B rows.

    Slot s of row b holds the token at position s. Slots at or past `length[b]` are stale or unwritten: they are overwritten before they
    are read, so taking tokens back is only a smaller length.
    """

    k: tuple[jax.Array, ...]  # one [B, K, S, H] for each owning layer; rope already applied
    v: tuple[jax.Array, ...]  # likewise
    length: jax.Array  # int32 [B]

    @classmethod
    def empty(cls, layers: Sequence[AttentionConfig], batch: int, capacity: int, dtype: DTypeLike) -> "KVCache":
        """A cache of S = `capacity` slots a row with no tokens in it."""
        shapes = [(batch, layers[i].kv_heads, capacity, layers[i].head_dim) for i in cache_owners(layers)]
        return cls(
            k=tuple(jnp.zeros(shape, dtype) for shape in shapes),
            v=tuple(jnp.zeros(shape, dtype) for shape in shapes),
            length=jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """S."""
        return self.k[0].shape[2]

    def advance(self, count: jax.Array) -> "KVCache":
        """Commit the first `count` int32 [B] of the tokens written past each row's length."""
        return replace(self, length=self.length + count)

    def rewind(self, length: jax.Array) -> "KVCache":
        """Take back everything from position `length` int32 [B] on."""
        return replace(self, length=jnp.minimum(self.length, length))


def write_slots(entry: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Write values [B, T, K, H] into entry [B, K, S, H] at the slots `positions` int32 [B, T]; slots outside the cache are dropped.

    Positions of a row must be distinct.
    """
    rows = jnp.arange(entry.shape[0])[:, None]
    # A negative index would count from the end: send it outside instead.
    slots = jnp.where(positions < 0, entry.shape[2], positions)
    return entry.at[rows, :, slots].set(values.astype(entry.dtype), mode="drop", unique_indices=True)

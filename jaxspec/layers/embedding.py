"""Token embeddings."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.layers.param import normal_param


class Embedding(nnx.Module):
    """A table [V, *width], looked up by token id and scaled.

    An id at or past V gives NaN, never the last row: a wrong id must not pass unseen.
    """

    def __init__(
        self,
        vocab_size: int,
        shape: Sequence[int],
        axes: Sequence[str],
        *,
        scale: float = 1.0,
        vocab: str = "vocab",
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        self.scale = scale
        self.weight = normal_param(rngs, (vocab_size, *shape), (vocab, *axes), dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int32 [B, T] -> [B, T, *width] in the table's dtype."""
        rows = jnp.take(self.weight[...], tokens, axis=0, mode="fill", fill_value=jnp.nan)
        # The scale is rounded to the table's dtype first, as the models were trained (transformers' *ScaledWordEmbedding).
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

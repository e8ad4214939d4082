"""The one decoder behind every verifier family."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import VerifierConfig
from jaxspec.layers.cache import KVCache, cache_owners
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear, project
from jaxspec.layers.norm import RMSNorm
from jaxspec.sharding import gathered


class Decoder(nnx.Module):
    """A causal language model over a `KVCache`. Holds parameters only; the cache is passed in and returned."""

    def __init__(self, config: VerifierConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        width, eps, offset = config.width, config.norm_eps, config.norm_offset
        self.embed = Embedding(
            config.vocab_size, (width,), ("embed",), scale=config.embed_scale, rngs=rngs, dtype=dtype
        )
        self.layers = nnx.List(
            [
                DecoderLayer(
                    layer,
                    width,
                    eps,
                    norm_offset=offset,
                    owns_kv=layer.attention.kv_source == i,
                    rngs=rngs,
                    dtype=dtype,
                )
                for i, layer in enumerate(config.layers)
            ]
        )
        self.norm = RMSNorm(width, eps, offset=offset, dtype=dtype)
        self.head = (
            None
            if config.tied
            else Linear((width,), (config.vocab_size,), ("embed",), ("vocab",), rngs=rngs, dtype=dtype)
        )
        if config.per_layer_width:
            shape, axes = (config.num_layers, config.per_layer_width), ("layers", "per_layer")
            self.per_layer_embed = Embedding(
                config.per_layer_vocab_size, shape, axes, scale=config.per_layer_width**0.5, rngs=rngs, dtype=dtype
            )
            self.per_layer_projection = Linear((width,), shape, ("embed",), axes, rngs=rngs, dtype=dtype)
            self.per_layer_norm = RMSNorm(config.per_layer_width, eps, offset=offset, axis="per_layer", dtype=dtype)

    def __call__(
        self, tokens: jax.Array, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None, KVCache]:
        """Run T tokens a row on top of the cache.

        tokens int32 [B, T]: token t of row b stands at position cache.length[b] + t. All T are written to the cache, and its lengths
        stay: the caller commits what counts with `KVCache.advance`. Rows may be padded on the right, since no token sees a later one.
        taps: increasing ids of the residual streams to return, k = entering layer k, L = after the last layer (SPEC 0.1, "aux" ids).

        Returns hidden [B, T, D] after the final norm, the tapped streams [B, T, len(taps) * D] (None without taps), and the cache.
        """
        x = self.embed(tokens)
        per_layer_inputs = self.per_layer_inputs(tokens, x) if self.config.per_layer_width else None
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        attention = [layer.attention for layer in self.config.layers]
        entry_of = {layer: entry for entry, layer in enumerate(cache_owners(attention))}
        k, v = list(cache.k), list(cache.v)
        tapped = []
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped.append(x)
            entry = entry_of[attention[i].kv_source]
            per_layer_input = None if per_layer_inputs is None else per_layer_inputs[:, :, i]
            with jax.named_scope(f"layer_{i}"):
                x, k[entry], v[entry] = layer(x, positions, k[entry], v[entry], per_layer_input)
        if len(self.layers) in taps:
            tapped.append(x)
        if len(tapped) != len(taps):
            raise ValueError(f"taps {tuple(taps)} are not distinct ids from 0 to {len(self.layers)}")
        features = jnp.concatenate(tapped, axis=-1) if tapped else None
        return self.norm(x), features, replace(cache, k=tuple(k), v=tuple(v))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] after the final norm -> float32 [..., V]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        logits = gathered(project(hidden, weight[...])).astype(jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def per_layer_inputs(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array:
        """tokens int32 [B, T], embedded [B, T, D] -> [B, T, L, P] (Gemma-4 per-layer embeddings)."""
        width_scale = jnp.asarray(self.config.width**-0.5, embedded.dtype)
        projected = self.per_layer_norm(self.per_layer_projection(embedded) * width_scale)
        return (projected + self.per_layer_embed(tokens)) * jnp.asarray(2.0**-0.5, embedded.dtype)

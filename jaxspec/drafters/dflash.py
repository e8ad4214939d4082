"""DFlash (block diffusion): verifier features injected into every layer's keys and values, a block of masks denoised in one pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.drafters.base import (
    Choose,
    Context,
    DraftVocabulary,
    Proposal,
    attention_layers,
    last_counted,
    take_rows,
)
from jaxspec.drafters.config import BlockConfig, DrafterConfig
from jaxspec.layers.cache import KVCache
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.layers.linear import Linear
from jaxspec.layers.norm import RMSNorm
from jaxspec_kernels.kv_injection import inject_kv


class DFlash(nnx.Module):
    """The drafter; also the backbone of DSpark. Its cache's slot i holds the injected features of position i."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        d, eps = config.width, config.norm_eps
        self.block = block_config(config)
        if config.mask_token is None:
            raise ValueError("a block drafter needs a mask token")
        self.mask_token = config.mask_token
        self.vocabulary = DraftVocabulary(config, rngs=rngs, dtype=dtype)
        self.fc = Linear((config.feature_width,), (d,), ("feature",), ("embed",), rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(d, eps, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(layer, d, eps, rngs=rngs, dtype=dtype) for layer in config.layers])
        self.norm = RMSNorm(d, eps, dtype=dtype)

    def prefill(self, context: Context, cache: KVCache) -> KVCache:
        """See `Drafter`."""
        return self.inject(context, cache)

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """See `Drafter`. All B slots run whatever K is, since slots see one another; the head runs on the K that draft."""
        cache = self.inject(context, cache)
        anchor = take_rows(context.tokens, last_counted(context), 1)[:, 0]
        hidden, cache = self.denoise(anchor, cache)
        return self.propose(hidden, anchor, drafts, choose), cache

    def propose(self, hidden: jax.Array, anchor: jax.Array, drafts: int, choose: Choose) -> Proposal:
        """hidden [B, size, D] of the block, anchor int32 [B] -> K drafts, each on its own."""
        del anchor
        logits = self.vocabulary.logits(self.drafting_slots(hidden)[:, :drafts])
        return self.vocabulary.proposal(*choose(logits, jnp.int32(0)))

    def logits(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """Every slot's logits of one block behind T positions, all of them new to the drafter.

        features [B, T, feature_width]; tokens int32 [B, size]: the block's true tokens, the anchor first (DFlash looks at no other).
        Returns float32 [B, size, Vd].
        """
        return self.vocabulary.logits(self.block_hidden(features, tokens[:, 0]))

    def block_hidden(self, features: jax.Array, anchor: jax.Array) -> jax.Array:
        """features [B, T, feature_width] of T positions and the anchor int32 [B] behind them -> hidden [B, size, D]."""
        batch, length = features.shape[:2]
        cache = KVCache.empty(attention_layers(self.config), batch, length + self.block.size, features.dtype)
        count = jnp.full(batch, length, jnp.int32)
        context = Context(features, jnp.zeros((batch, length), jnp.int32), count)
        return self.denoise(anchor, self.inject(context, cache))[0]

    def inject(self, context: Context, cache: KVCache) -> KVCache:
        """Commit the counted rows: one projected feature a position, made into every layer's key and value."""
        with jax.named_scope("inject"):
            injected = self.hidden_norm(self.fc(context.features))  # [B, T, D]
            layers = [layer.attention.injection() for layer in self.layers]
            k, v = inject_kv(injected, layers, cache.k, cache.v, cache.length, context.count, eps=self.config.norm_eps)
        return replace(cache, k=k, v=v).advance(context.count)

    def denoise(self, anchor: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """anchor int32 [B] at position cache.length -> hidden [B, size, D] after the final norm, and the cache with the block's own keys
        and values behind the context, never committed. Handing that on, not the cache as it was, saves a copy of it."""
        masks = jnp.full((anchor.shape[0], self.block.size - 1), self.mask_token, jnp.int32)
        x = self.vocabulary.embed(jnp.concatenate([anchor[:, None], masks], axis=1))
        positions = cache.length[:, None] + jnp.arange(self.block.size, dtype=jnp.int32)[None]
        k, v = list(cache.k), list(cache.v)
        for i, layer in enumerate(self.layers):
            x, k[i], v[i] = layer(x, positions, k[i], v[i])
        return self.norm(x), replace(cache, k=tuple(k), v=tuple(v))

    def drafting_slots(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, size, ...] -> those of the slots that draft, in order."""
        return hidden if self.block.sample_from_anchor else hidden[:, 1:]


def block_config(config: DrafterConfig) -> BlockConfig:
    """The config's block part; its absence is a programming error."""
    if config.block is None:
        raise ValueError(f"a {config.method} config has no block part")
    return config.block

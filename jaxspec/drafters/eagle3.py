"""EAGLE-3 (arXiv 2503.01840): a small decoder over verifier features and the tokens that follow them, one pass a draft."""

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxspec.drafters.base import Choose, Context, DraftVocabulary, Proposal, attention_layers, last_counted, take_rows
from jaxspec.drafters.config import DrafterConfig, EagleConfig
from jaxspec.layers.attention import Attention
from jaxspec.layers.cache import KVCache
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.layers.linear import Linear
from jaxspec.layers.mlp import GatedMlp
from jaxspec.layers.norm import RMSNorm


class Eagle3(nnx.Module):
    """The drafter; also the body of P-EAGLE. Its cache's slot i holds the pair (features of position i, token i + 1)."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        eagle, d, eps = eagle_config(config), config.width, config.norm_eps
        self.vocabulary = DraftVocabulary(config, rngs=rngs, dtype=dtype)
        self.input_norm = (
            RMSNorm(config.feature_width, eps, axis="feature", dtype=dtype) if eagle.norm_before_fc else None
        )
        self.fc_norms = nnx.List([RMSNorm(d, eps, dtype=dtype) for _ in config.taps]) if eagle.fc_norm else None
        self.fc = Linear((config.feature_width,), (d,), ("feature",), ("embed",), rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            [FirstLayer(config, rngs=rngs, dtype=dtype)]
            + [DecoderLayer(layer, d, eps, rngs=rngs, dtype=dtype) for layer in config.layers[1:]]
        )
        self.norm = RMSNorm(d, eps, dtype=dtype)

    def prefill(self, context: Context, cache: KVCache) -> KVCache:
        """See `Drafter`."""
        return self.commit(context, cache)[1]

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """See `Drafter`. The first draft comes with the committing pass, each further one by a pass of its own."""
        stream, cache = self.commit(context, cache)
        committed = cache.length
        stream = take_rows(stream, last_counted(context), 1)  # [B, 1, D]

        def next_draft(
            carry: tuple[jax.Array, jax.Array, KVCache], slot: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array, KVCache], tuple[jax.Array, jax.Array | None]]:
            ids, stream, cache = carry  # ids [B, 1]
            stream, cache = self.run(self.vocabulary.to_verifier(ids), self.recycled(stream), cache)
            ids, log_q = choose(self.logits_of(stream), slot)
            return (ids, stream, cache.advance(jnp.ones_like(ids[:, 0]))), (ids, log_q)

        first = choose(self.logits_of(stream), jnp.int32(0))
        slots = jnp.arange(1, drafts, dtype=jnp.int32)
        (_, _, cache), others = lax.scan(next_draft, (first[0], stream, cache), slots)
        ids, log_q = jax.tree.map(
            lambda one, more: jnp.concatenate([one, more[:, :, 0].swapaxes(0, 1)], axis=1), first, others
        )
        return self.vocabulary.proposal(ids, log_q), replace(cache, length=committed)

    def logits(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """features [B, T, feature_width] of T positions and the token int32 [B, T] that follows each -> float32 [B, T, Vd]: the
        first draft after each of them."""
        batch, length = tokens.shape
        cache = KVCache.empty(attention_layers(self.config), batch, length, features.dtype)
        return self.logits_of(self.run(tokens, self.fuse(features), cache)[0])

    def commit(self, context: Context, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """A pass over the context's T rows -> the stream after the last layer [B, T, D], and the cache with the counted ones committed."""
        with jax.named_scope("inject"):
            stream, cache = self.run(context.tokens, self.fuse(context.features), cache)
        return stream, cache.advance(context.count)

    def fuse(self, features: jax.Array) -> jax.Array:
        """features [B, T, feature_width] -> [B, T, D]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms is not None:
            parts = jnp.split(features, len(self.config.taps), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], axis=-1)
        return self.fc(features)

    def run(self, tokens: jax.Array, fused: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """tokens int32 [B, T] paired with fused features [B, T, D] -> the stream after the last layer [B, T, D], and the cache with
        T more slots written and its length unmoved."""
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        k, v = list(cache.k), list(cache.v)
        first = cast(FirstLayer, self.layers[0])
        x, k[0], v[0] = first(self.vocabulary.embed(tokens), fused, positions, k[0], v[0])
        for i in range(1, len(k)):
            x, k[i], v[i] = cast(DecoderLayer, self.layers[i])(x, positions, k[i], v[i])
        return x, replace(cache, k=tuple(k), v=tuple(v))

    def logits_of(self, stream: jax.Array) -> jax.Array:
        """The stream [B, T, D] after the last layer -> float32 [B, T, Vd]."""
        return self.vocabulary.logits(self.norm(stream))

    def recycled(self, stream: jax.Array) -> jax.Array:
        """What takes the fused features' place for a drafted token: [B, T, D] -> [B, T, D]."""
        return self.norm(stream) if eagle_config(self.config).norm_output else stream


class FirstLayer(nnx.Module):
    """EAGLE-3's first layer: attention over [normed embedding; normed feature], the residual along the feature (SPEC 1c)."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        layer, d, eps = config.layers[0], config.width, config.norm_eps
        if layer.attention.in_width != 2 * d or layer.mlp_width is None:
            raise ValueError("EAGLE-3's first layer has an attention input of twice the width and a dense MLP")
        self.norm_before_residual = eagle_config(config).norm_before_residual
        self.input_norm = RMSNorm(d, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(d, eps, dtype=dtype)
        self.attention = Attention(layer.attention, d, eps, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(d, eps, dtype=dtype)
        self.mlp = GatedMlp(d, layer.mlp_width, layer.activation, bias=layer.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, embedded: jax.Array, fused: jax.Array, positions: jax.Array, k_entry: jax.Array, v_entry: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """embedded and fused [B, T, D]; the rest as in `DecoderLayer`."""
        x, y = self.pair(embedded, fused)
        k_entry, v_entry = self.attention.write(y, positions, k_entry, v_entry)
        return self.finish(x, self.attention.attend(y, positions, k_entry, v_entry)), k_entry, v_entry

    def pair(self, embedded: jax.Array, fused: jax.Array) -> tuple[jax.Array, jax.Array]:
        """embedded and fused [B, T, D] -> the residual stream [B, T, D] and the attention's input [B, T, 2 D]."""
        normed = self.hidden_norm(fused)
        y = jnp.concatenate([self.input_norm(embedded), normed], axis=-1)
        return normed if self.norm_before_residual else fused, y

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """As in `DecoderLayer`."""
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


def eagle_config(config: DrafterConfig) -> EagleConfig:
    """The config's EAGLE part; its absence is a programming error."""
    if config.eagle is None:
        raise ValueError(f"a {config.method} config has no EAGLE part")
    return config.eagle

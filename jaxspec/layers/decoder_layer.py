"""One decoder layer, described by its `LayerConfig`."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import Activation, LayerConfig
from jaxspec.layers.attention import Attention
from jaxspec.layers.linear import Linear
from jaxspec.layers.mlp import GatedMlp, activation
from jaxspec.layers.moe import MixtureOfExperts
from jaxspec.layers.norm import RMSNorm
from jaxspec.layers.param import constant_param


class DecoderLayer(nnx.Module):
    """Attention and MLP with their residuals; Gemma's extra norms, per-layer embedding and scalar where the config has them."""

    def __init__(
        self,
        config: LayerConfig,
        width: int,
        norm_eps: float,
        *,
        norm_offset: float = 0.0,
        owns_kv: bool = True,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        self.config = config

        def norm() -> RMSNorm:
            return RMSNorm(width, norm_eps, offset=norm_offset, dtype=dtype)

        self.input_norm = norm()
        self.attention = Attention(
            config.attention, width, norm_eps, norm_offset=norm_offset, owns_kv=owns_kv, rngs=rngs, dtype=dtype
        )
        self.post_attention_norm = norm() if config.sandwich else None
        self.mlp_norm = norm()
        act = config.activation
        self.mlp = (
            None
            if config.mlp_width is None
            else GatedMlp(width, config.mlp_width, act, bias=config.mlp_bias, rngs=rngs, dtype=dtype)
        )
        self.moe = (
            None if config.moe is None else MixtureOfExperts(config.moe, width, act, norm_eps, rngs=rngs, dtype=dtype)
        )
        side_by_side = self.mlp is not None and self.moe is not None
        self.post_dense_norm = norm() if side_by_side else None
        self.moe_norm = norm() if side_by_side else None
        self.post_moe_norm = norm() if side_by_side else None
        self.post_mlp_norm = norm() if config.sandwich else None
        self.per_layer = (
            PerLayerInput(config, width, norm_eps, norm_offset=norm_offset, rngs=rngs, dtype=dtype)
            if config.per_layer_width
            else None
        )
        self.scalar = constant_param(1.0, (1,), ("scalar",), dtype) if config.scalar else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        k_entry: jax.Array,
        v_entry: jax.Array,
        per_layer_input: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] at consecutive positions int32 [B, T]; k_entry, v_entry [B, K, S, H]: the cache entry this layer reads, and
        writes if it owns it; per_layer_input [B, T, P]. Returns x after the layer and the two entries."""
        y = self.input_norm(x)
        if self.attention.k is not None:
            k_entry, v_entry = self.attention.write(y, positions, k_entry, v_entry)
        attended = self.attention.attend(y, positions, k_entry, v_entry)
        return self.finish(x, attended, per_layer_input), k_entry, v_entry

    def finish(self, x: jax.Array, attended: jax.Array, per_layer_input: jax.Array | None = None) -> jax.Array:
        """The layer behind its attention: x and what was attended for its normed self, both [B, T, D] -> x after the layer."""
        x = x + _maybe(self.post_attention_norm, attended)
        x = x + _maybe(self.post_mlp_norm, self.feed_forward(x))
        if self.per_layer is not None and per_layer_input is not None:
            x = x + self.per_layer(x, per_layer_input)
        if self.scalar is not None:
            x = x * self.scalar[...][:, None, None]
        return x

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """The normed MLP, experts, or both side by side: [B, T, D] -> [B, T, D], before the residual addition."""
        y = self.mlp_norm(x)
        if self.moe is None:
            assert self.mlp is not None
            return self.mlp(y)
        if self.mlp is None:
            return self.moe(y, y)
        assert self.moe_norm is not None and self.post_moe_norm is not None and self.post_dense_norm is not None
        return self.post_dense_norm(self.mlp(y)) + self.post_moe_norm(self.moe(self.moe_norm(x), x))


class PerLayerInput(nnx.Module):
    """Gemma-4 E2B/E4B: a small embedding of the token, gated by the stream and projected back into it."""

    def __init__(
        self,
        config: LayerConfig,
        width: int,
        norm_eps: float,
        *,
        norm_offset: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        p = config.per_layer_width
        self.act: Activation = config.activation
        self.gate = Linear((width,), (p,), ("embed",), ("per_layer",), rngs=rngs, dtype=dtype)
        self.projection = Linear((p,), (width,), ("per_layer",), ("embed",), rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(width, norm_eps, offset=norm_offset, dtype=dtype)

    def __call__(self, x: jax.Array, per_layer_input: jax.Array) -> jax.Array:
        """x [B, T, D], per_layer_input [B, T, P] -> [B, T, D]."""
        return self.norm(self.projection(activation(self.act)(self.gate(x)) * per_layer_input))


def _maybe(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)

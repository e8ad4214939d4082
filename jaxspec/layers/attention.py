"""Attention of one layer: projections, norms, rope, the write to the cache, and the call through the kernel's door."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import AttentionConfig
from jaxspec.layers.cache import write_slots
from jaxspec.layers.linear import Linear
from jaxspec.layers.norm import RMSNorm, rms_normalize
from jaxspec.layers.rope import apply_rope, inverse_frequencies
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.kv_injection import LayerKV


class Attention(nnx.Module):
    """Grouped-query attention over a cache.

    `owns_kv` False: the layer reads another layer's keys and values (`AttentionConfig.kv_source`) and has no weights for them.
    """

    def __init__(
        self,
        config: AttentionConfig,
        width: int,
        norm_eps: float,
        *,
        norm_offset: float = 0.0,
        owns_kv: bool = True,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        self.config = config
        self.norm_eps = norm_eps
        n, k, h = config.heads, config.kv_heads, config.head_dim
        in_width = config.in_width or width

        def projection(heads: int, axis: str) -> Linear:
            return Linear(
                (in_width,), (heads, h), ("embed",), (axis, "head_dim"), bias=config.bias, rngs=rngs, dtype=dtype
            )

        def head_norm() -> RMSNorm:
            return RMSNorm(h, norm_eps, offset=norm_offset, axis="head_dim", dtype=dtype)

        self.q = projection(n, "q_heads")
        self.k = projection(k, "kv_heads") if owns_kv else None
        self.v = projection(k, "kv_heads") if owns_kv and not config.v_from_k else None
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm and owns_kv else None
        self.o = Linear(
            (n, h), (width,), ("q_heads", "head_dim"), ("embed",), bias=config.out_bias, rngs=rngs, dtype=dtype
        )

    def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [B, T, D], positions int32 [B, T] -> [B, T, N, H], normed and rotated."""
        q = self.q(x)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return apply_rope(q, positions, self.config.rope)

    def keys_values(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D], positions int32 [B, T] -> k (normed, rotated) and v, each [B, T, K, H]."""
        if self.k is None:
            raise ValueError("this layer reads another layer's keys and values")
        k = self.k(x)
        v = k if self.v is None else self.v(x)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.config.v_norm:
            v = rms_normalize(v, self.norm_eps).astype(x.dtype)
        return apply_rope(k, positions, self.config.rope), v

    def write(
        self, x: jax.Array, positions: jax.Array, k_entry: jax.Array, v_entry: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values of x [B, T, D] written to slots `positions` int32 [B, T] of entries [B, K, S, H]; returns the new entries."""
        k, v = self.keys_values(x, positions)
        return write_slots(k_entry, k, positions), write_slots(v_entry, v, positions)

    def injection(self) -> LayerKV:
        """What `inject_kv` needs to do for many layers at once what `write` does for this one."""
        if self.k is None:
            raise ValueError("this layer reads another layer's keys and values")
        frequencies, scaling = inverse_frequencies(self.config.rope)
        return LayerKV(
            k=self.k.weight[...],
            v=None if self.v is None else self.v.weight[...],
            k_bias=None if self.k.bias is None else self.k.bias[...],
            v_bias=None if self.v is None or self.v.bias is None else self.v.bias[...],
            k_norm=None if self.k_norm is None else self.k_norm.weight[...],
            norm_offset=0.0 if self.k_norm is None else self.k_norm.offset,
            v_norm=self.config.v_norm,
            frequencies=frequencies,
            scaling=scaling,
        )

    def attend(self, x: jax.Array, positions: jax.Array, k_entry: jax.Array, v_entry: jax.Array) -> jax.Array:
        """x [B, T, D] at consecutive `positions` int32 [B, T], already written to the entries [B, K, S, H] -> [B, T, D]."""
        out = block_attention(
            self.queries(x, positions),
            k_entry,
            v_entry,
            positions[:, 0],
            scale=self.config.scale,
            causal=self.config.causal,
            window=self.config.window,
            window_from_block=self.config.window_from_block,
            softcap=self.config.softcap,
        )
        return self.o(out)

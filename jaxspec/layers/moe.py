"""Mixture of experts: routing in float32, and the experts' MLPs over only the tokens routed to them."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxspec.config import Activation, MoeConfig
from jaxspec.layers.linear import Linear, project
from jaxspec.layers.mlp import activation
from jaxspec.layers.norm import rms_normalize
from jaxspec.layers.param import constant_param, normal_param
from jaxspec_kernels.devices import unsplit_axes

# Up to this many (token, expert) pairs each pair reads its expert's weights on its own: decode and verify blocks.
GATHER_PAIRS = 64
# Beyond it, pairs are sorted by expert and go through in blocks of this many rows of one expert: prefill.
BLOCK_ROWS = 32

Stacked = tuple[jax.Array, jax.Array, jax.Array]  # gate and up [E, F, D], down [E, D, F]


def route(router_logits: jax.Array, top_k: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts, then the top k, then renormalised only if asked; all in float32.

    router_logits [M, E] of any float dtype -> weights float32 [M, k], experts int32 [M, k].
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    weights, experts = lax.top_k(probabilities, top_k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


class MixtureOfExperts(nnx.Module):
    """E gated MLPs of inner width F, k of them a token (Qwen3-MoE, Gemma-4 26B-A4B)."""

    def __init__(
        self, config: MoeConfig, width: int, act: Activation, norm_eps: float, *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        self.config = config
        self.act: Activation = act
        self.norm_eps = norm_eps
        e, f = config.experts, config.width
        self.router = Linear((width,), (e,), ("embed",), ("router",), rngs=rngs, dtype=dtype)
        self.gate = ExpertWeight((e, f, width), ("expert", "mlp", "embed"), rngs=rngs, dtype=dtype)
        self.up = ExpertWeight((e, f, width), ("expert", "mlp", "embed"), rngs=rngs, dtype=dtype)
        self.down = ExpertWeight((e, width, f), ("expert", "embed", "mlp"), rngs=rngs, dtype=dtype)
        if config.gemma_router:
            self.router_scale = constant_param(1.0, (width,), ("embed",), dtype)
            self.expert_scale = constant_param(1.0, (e,), ("router",), dtype)

    def __call__(self, x: jax.Array, router_input: jax.Array) -> jax.Array:
        """x and router_input [B, T, D] -> [B, T, D]. Only Gemma-4 routes by another tensor than the one the experts see."""
        batch, block, width = x.shape
        rows = x.reshape(batch * block, width)
        weights, experts = self._route(router_input.reshape(batch * block, width))
        stacked = self.gate.weight[...], self.up.weight[...], self.down.weight[...]
        axes = unsplit_axes("expert", "tensor")
        mix = partial(self._mixed_here, axes=axes) if axes else self._mixed
        if axes:
            expert, tensor = (axis if axis in axes else None for axis in ("expert", "tensor"))
            split = (P(expert, tensor), P(expert, tensor), P(expert, None, tensor))
            mix = jax.shard_map(
                mix, in_specs=(P(), P(), P(), split), out_specs=P(), axis_names=set(axes), check_vma=False
            )
        return mix(rows, weights, experts, stacked).astype(x.dtype).reshape(x.shape)

    def _mixed(self, rows: jax.Array, weights: jax.Array, experts: jax.Array, stacked: Stacked) -> jax.Array:
        """rows [M, D], weights float32 [M, k], experts int32 [M, k] -> float32 [M, D], the experts' outputs by weight."""
        run = self._gathered if experts.size <= GATHER_PAIRS else self._grouped
        return jnp.sum(run(rows, experts, stacked).astype(jnp.float32) * weights[..., None], axis=1)

    def _mixed_here(
        self, rows: jax.Array, weights: jax.Array, experts: jax.Array, stacked: Stacked, axes: tuple[str, ...]
    ) -> jax.Array:
        """`_mixed` on one of several devices, which holds some of the experts, or a part of each one's width, or both: what it adds to the
        sum. Pairs of other devices' experts weigh nothing here."""
        held = stacked[0].shape[0]
        local = experts - lax.axis_index("expert").astype(jnp.int32) * held if "expert" in axes else experts
        mine = (local >= 0) & (local < held)
        mixed = self._mixed(rows, jnp.where(mine, weights, 0.0), jnp.where(mine, local, 0), stacked)
        return lax.psum(mixed, axes)

    def _route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """rows [M, D] -> weights float32 [M, k], experts int32 [M, k]."""
        if not self.config.gemma_router:
            return route(self.router(rows), self.config.top_k, self.config.normalize)
        scale = self.router_scale[...].astype(jnp.float32) * rows.shape[-1] ** -0.5
        rows = (rms_normalize(rows, self.norm_eps) * scale[None]).astype(rows.dtype)
        weights, experts = route(self.router(rows), self.config.top_k, self.config.normalize)
        return weights * self.expert_scale[...].astype(jnp.float32)[experts], experts

    def _gathered(self, rows: jax.Array, experts: jax.Array, stacked: Stacked) -> jax.Array:
        """rows [M, D], experts int32 [M, k] -> [M, k, D], by copying each pair's expert weights."""

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:  # [M, k, in], [E, out, in] -> [M, k, out]
            return jnp.einsum("mki,mkoi->mko", x, weight[experts], precision=_precision(x))

        gate, up, down = stacked
        x = jnp.broadcast_to(rows[:, None], (*experts.shape, rows.shape[-1]))
        return product(activation(self.act)(product(x, gate)) * product(x, up), down)

    def _grouped(self, rows: jax.Array, experts: jax.Array, stacked: Stacked) -> jax.Array:
        """The same, by sorting the pairs by expert and padding each expert's group to whole blocks: a block reads one expert."""
        m, k = experts.shape
        e, d = stacked[0].shape[0], rows.shape[-1]
        flat = experts.reshape(m * k)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=e).astype(jnp.int32)
        block_count = (sizes + BLOCK_ROWS - 1) // BLOCK_ROWS  # [E]
        first_block = jnp.cumsum(block_count) - block_count
        first_pair = jnp.cumsum(sizes) - sizes
        rank = jnp.arange(m * k, dtype=jnp.int32) - first_pair[flat[order]]  # place of a sorted pair in its group
        slot = first_block[flat[order]] * BLOCK_ROWS + rank
        blocks = -(-m * k // BLOCK_ROWS) + e  # no routing fills more
        # Indices are scattered and rows gathered: with rows scattered into zeros, XLA makes every layer's zeros ahead of the first layer.
        source = jnp.zeros(blocks * BLOCK_ROWS, jnp.int32).at[slot].set(order // k, unique_indices=True)
        place = jnp.zeros(m * k, jnp.int32).at[order].set(slot, unique_indices=True)
        block_expert = jnp.searchsorted(jnp.cumsum(block_count), jnp.arange(blocks), side="right")
        block_expert = jnp.minimum(block_expert, e - 1)  # blocks past the last group hold rows that nobody asks for

        def one_block(i: jax.Array, padded: jax.Array) -> jax.Array:
            x = lax.dynamic_index_in_dim(padded, i, keepdims=False)
            gate, up, down = (lax.dynamic_index_in_dim(one, block_expert[i], keepdims=False) for one in stacked)
            out = project(activation(self.act)(project(x, gate)) * project(x, up), down)
            return lax.dynamic_update_index_in_dim(padded, out, i, axis=0)

        out = lax.fori_loop(0, blocks, one_block, rows[source].reshape(blocks, BLOCK_ROWS, d))
        return out.reshape(-1, d)[place].reshape(m, k, d)


class ExpertWeight(nnx.Module):
    """One stacked weight [E, out, in]."""

    def __init__(self, shape: tuple[int, int, int], axes: tuple[str, str, str], *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = normal_param(rngs, shape, axes, dtype)


def _precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

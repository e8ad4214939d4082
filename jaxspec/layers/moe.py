"""Mixture of experts: routing in float32, and the experts' MLPs over only the tokens routed to them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxspec.config import Activation, MoeConfig
from jaxspec.layers.linear import Linear, project
from jaxspec.layers.mlp import activation
from jaxspec.layers.norm import rms_normalize
from jaxspec.layers.param import constant_param, normal_param

# Up to this many (token, expert) pairs each pair reads its expert's weights on its own: decode and verify blocks.
GATHER_PAIRS = 64
# Beyond it, pairs are sorted by expert and go through in blocks of this many rows of one expert: prefill.
BLOCK_ROWS = 32


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
        pairs = rows.shape[0] * self.config.top_k
        run = self._gathered if pairs <= GATHER_PAIRS else self._grouped
        out = run(rows, experts)  # [M, k, D]
        return jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype).reshape(x.shape)

    def _route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """rows [M, D] -> weights float32 [M, k], experts int32 [M, k]."""
        if not self.config.gemma_router:
            return route(self.router(rows), self.config.top_k, self.config.normalize)
        scale = self.router_scale[...].astype(jnp.float32) * rows.shape[-1] ** -0.5
        rows = (rms_normalize(rows, self.norm_eps) * scale[None]).astype(rows.dtype)
        weights, experts = route(self.router(rows), self.config.top_k, self.config.normalize)
        return weights * self.expert_scale[...].astype(jnp.float32)[experts], experts

    def _gathered(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """rows [M, D], experts int32 [M, k] -> [M, k, D], by copying each pair's expert weights."""

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:  # [M, k, in], [E, out, in] -> [M, k, out]
            return jnp.einsum("mki,mkoi->mko", x, weight[experts], precision=_precision(x))

        x = jnp.broadcast_to(rows[:, None], (*experts.shape, rows.shape[-1]))
        inner = activation(self.act)(product(x, self.gate.weight[...])) * product(x, self.up.weight[...])
        return product(inner, self.down.weight[...])

    def _grouped(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """The same, by sorting the pairs by expert and padding each expert's group to whole blocks: a block reads one expert."""
        m, k = experts.shape
        e, d = self.config.experts, rows.shape[-1]
        flat = experts.reshape(m * k)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=e).astype(jnp.int32)
        block_count = (sizes + BLOCK_ROWS - 1) // BLOCK_ROWS  # [E]
        first_block = jnp.cumsum(block_count) - block_count
        first_pair = jnp.cumsum(sizes) - sizes
        rank = jnp.arange(m * k, dtype=jnp.int32) - first_pair[flat[order]]  # place of a sorted pair in its group
        slot = first_block[flat[order]] * BLOCK_ROWS + rank
        blocks = -(-m * k // BLOCK_ROWS) + e  # no routing fills more
        padded = jnp.zeros((blocks * BLOCK_ROWS, d), rows.dtype).at[slot].set(rows[order // k], unique_indices=True)
        block_expert = jnp.searchsorted(jnp.cumsum(block_count), jnp.arange(blocks), side="right")
        block_expert = jnp.minimum(block_expert, e - 1)  # blocks past the last group hold zeros

        def one_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, expert = block

            def weight(param: nnx.Param) -> jax.Array:
                return lax.dynamic_index_in_dim(param[...], expert, axis=0, keepdims=False)

            inner = activation(self.act)(project(x, weight(self.gate.weight))) * project(x, weight(self.up.weight))
            return project(inner, weight(self.down.weight))

        out = lax.map(one_block, (padded.reshape(blocks, BLOCK_ROWS, d), block_expert)).reshape(-1, d)
        return jnp.zeros((m * k, d), rows.dtype).at[order].set(out[slot], unique_indices=True).reshape(m, k, d)


class ExpertWeight(nnx.Module):
    """One stacked weight [E, out, in]."""

    def __init__(self, shape: tuple[int, int, int], axes: tuple[str, str, str], *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = normal_param(rngs, shape, axes, dtype)


def _precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

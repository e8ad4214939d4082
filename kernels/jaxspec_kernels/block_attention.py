"""Block attention: a few queries a row over that row's cache prefix plus the block itself.

The door that verify and draft go through. The block's own keys and values are already in the cache, in the slots from `length` on.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec_kernels.devices import HEADS, ROWS, each_device
from jaxspec_kernels.implementation import Implementation, resolve

# Slots that the CPU attends to at a time: the cost then follows the longest row's length instead of the cache's capacity.
CPU_CHUNK = 256


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_from_block: bool = False,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """softmax(softcap(scale q k^T) + mask) v, accumulated in float32.

    q [B, T, N, H]: query t of row b stands at position p = length[b] + t. k, v [B, K, S, H]: slot s holds position s; slots past the
    block are never read into the result, NaN in them included. length int32 [B]: slots before the block. Key position j is seen where
    j <= p (causal) or j < length + T (bidirectional), and p - window < j (bidirectional: also j < p + window). With
    `window_from_block` the window is length - window <= j for every query instead (speculators' training mask of block
    drafters). Returns [B, T, N, H] in q's dtype.

    Shapes that the kernel does not take (`block_attention_pallas.supports`) go the plain way whatever the implementation is. On several
    devices each attends with its own rows and heads.
    """
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[1]} key heads")
    attend = partial(
        _on_a_device,
        scale=scale,
        causal=causal,
        window=window,
        window_from_block=window_from_block,
        softcap=softcap,
        chosen=resolve(implementation),
    )
    queries, cache = (ROWS, None, HEADS), (ROWS, HEADS)
    return each_device(attend, (queries, cache, cache, (ROWS,)), queries, k.shape[1])(q, k, v, length)


def _on_a_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    window_from_block: bool,
    softcap: float | None,
    chosen: Implementation,
) -> jax.Array:
    if chosen != "xla":
        # Imported here: a process that runs no kernel needs no Pallas.
        from jaxspec_kernels import block_attention_pallas as kernel

        if kernel.supports(q, k, interpret=chosen == "interpret"):
            mask = kernel.Mask(scale, causal, window, window_from_block, softcap)
            return kernel.block_attention(q, k, v, length, mask, interpret=chosen == "interpret")
    attend = partial(
        _attend, scale=scale, causal=causal, window=window, window_from_block=window_from_block, softcap=softcap
    )
    capacity = k.shape[2]
    if capacity <= CPU_CHUNK:
        return attend(q, k, v, length, chunk=capacity)
    return lax.platform_dependent(
        q, k, v, length, cpu=partial(attend, chunk=CPU_CHUNK), default=partial(attend, chunk=capacity)
    )


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    window_from_block: bool,
    softcap: float | None,
    chunk: int,
) -> jax.Array:
    """Online softmax over chunks of the cache, from the first slot that any query sees to the last (arXiv 2205.14135, algorithm 1).

    A chunk that a row does not see leaves its sums unchanged to the bit, so a row's result does not depend on its neighbours' lengths.
    """
    batch, block, heads, width = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    q_position = length[:, None] + jnp.arange(block, dtype=jnp.int32)[None]  # [B, T]
    end = length + block  # [B]
    groups = q.reshape(batch, block, kv_heads, heads // kv_heads, width)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        first = i * chunk
        start = jnp.minimum(
            first, capacity - chunk
        )  # the last chunk overlaps the one before where the capacity is no multiple
        slot = start + jnp.arange(chunk, dtype=jnp.int32)
        k_part = lax.dynamic_slice_in_dim(k, start, chunk, axis=2)
        v_part = lax.dynamic_slice_in_dim(v, start, chunk, axis=2)
        written = (slot[None] < end[:, None]) & (slot[None] >= first)  # [B, chunk]
        seen = _visible(q_position, slot, end, causal, window, window_from_block) & written[:, None]  # [B, T, chunk]

        scores = jnp.einsum(
            "btkgh,bksh->bkgts", groups, k_part, precision=precision, preferred_element_type=jnp.float32
        )
        scores = scores * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        # Zero times NaN is NaN: unwritten values are replaced, not only weighted with zero.
        v_part = jnp.where(written[:, None, :, None], v_part, jnp.zeros((), v.dtype))
        part = jnp.einsum(
            "bkgts,bksh->bkgth",
            weights.astype(v.dtype),
            v_part,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + part

    state_shape = (batch, kv_heads, heads // kv_heads, block)
    carry = (
        jnp.full(state_shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(state_shape, jnp.float32),
        jnp.zeros((*state_shape, width), jnp.float32),
    )
    if chunk == capacity:
        carry = step(jnp.int32(0), carry)
    else:
        last = jnp.minimum((jnp.max(end) + chunk - 1) // chunk, -(-capacity // chunk))
        begin = jnp.int32(0) if window is None else jnp.maximum(jnp.min(length) - window, 0) // chunk
        carry = lax.fori_loop(begin, last, step, carry)
    _, total, out = carry
    out = out / total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, block, heads, width).astype(q.dtype)


def _visible(
    q_position: jax.Array,
    slot: jax.Array,
    end: jax.Array,
    causal: bool,
    window: int | None,
    window_from_block: bool,
) -> jax.Array:
    """Which slots [S] each query [B, T] may see, by position alone -> bool [B, T, S]."""
    query, key = q_position[:, :, None], slot[None, None, :]
    seen = key <= query if causal else key < end[:, None, None]
    if window is None:
        return seen
    if window_from_block:
        return seen & (key >= q_position[:, :1, None] - window)
    seen = seen & (query - key < window)
    return seen if causal else seen & (key - query < window)

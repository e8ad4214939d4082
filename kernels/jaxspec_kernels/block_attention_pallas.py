"""Block attention as a Pallas kernel. `block_attention` says what it computes.

One program holds the queries of one tile: `queries` tokens of one row, times the query heads of one key head. It goes through the slots
that these queries see, `keys` at a time, with an online softmax (arXiv 2205.14135, algorithm 1). Where there are fewer tiles than
multiprocessors, the slots of each tile are divided among `splits` programs, and their results merged (flash decoding). How many slots
that are follows from each row's own length, and so does the work: a row's result does not depend on its neighbours' lengths.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec_kernels import pallas_triton as pallas
from jaxspec_kernels.autotune import tuned
from jaxspec_kernels.gpu import MAX_TILE, MAX_TILE_FLOAT32, MIN_ROWS, Gpu, current, power_of_two

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Fields:
        queries: tokens of a tile, a power of two.
        keys: slots a step, a power of two.
        splits: programs that share the slots of one tile.
        warps: of a program.
        stages: steps whose loads are under way together.
    """

    queries: int
    keys: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Mask:
    """Who sees whom, and the scores' softcap: the static arguments of `block_attention`."""

    scale: float
    causal: bool
    window: int | None
    window_from_block: bool
    softcap: float | None


def supports(q: jax.Array, k: jax.Array, *, interpret: bool = False) -> bool:
    """Whether the kernel takes these shapes: a head width that is a power of two from 16 (interpreted: 2) to 512, as Triton's products
    have to be, and float32 or bfloat16 in queries and cache alike."""
    width, least = q.shape[-1], 2 if interpret else 16
    return width == power_of_two(width) and least <= width <= 512 and q.dtype == k.dtype in ("float32", "bfloat16")


def heuristic(q: jax.Array, k: jax.Array, window: int | None, gpu: Gpu) -> Config:
    """A config for q [B, T, N, H] and k [B, K, S, H] whose buffers fit the GPU's shared memory."""
    batch, block, heads, width = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    group = power_of_two(heads // kv_heads)
    float32 = q.dtype == "float32"
    most = (MAX_TILE_FLOAT32 if float32 else MAX_TILE) // max(width, 128)
    rows = max(min(most, power_of_two(block) * group), MIN_ROWS, group)
    queries = rows // group
    step = 2 * width * q.dtype.itemsize  # bytes of one slot's key and value
    keys, stages = max(16, min(32 if float32 else 128, 8192 // width)), 3
    # The queries and their weights pass through shared memory too.
    room = gpu.shared_memory - rows * (width + keys) * q.dtype.itemsize
    while keys * step * stages > room and (stages > 2 or keys > 16):
        if stages > 2:
            stages -= 1
        else:
            keys //= 2
    if keys * step * stages > room:
        stages = 1
    tiles = batch * kv_heads * -(-block // queries)
    seen = capacity if window is None else min(capacity, window + block)
    splits = max(1, min(gpu.multiprocessors // tiles, seen // (4 * keys)))
    warps = 8 if float32 or rows * width >= MAX_TILE // 2 else 4
    return Config(queries, keys, splits, warps, stages)


def candidates(config: Config) -> list[Config]:
    """Configs to try around one, itself the first; some may not compile."""
    return [
        replace(config, keys=keys, splits=splits, warps=warps, stages=stages)
        for keys in (config.keys, config.keys * 2, config.keys // 2)
        for splits in (config.splits, config.splits * 2, max(1, config.splits // 2))
        for warps in (config.warps, 12 - config.warps)
        for stages in (config.stages, 2, 4)
        if keys >= MIN_ROWS
    ]


def describe(q: jax.Array, k: jax.Array, window: int | None) -> str:
    """What a tuned config is kept under."""
    return f"q {q.shape} cache {k.shape} {q.dtype} window {window}"


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    mask: Mask,
    *,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """q [B, T, N, H], k and v [B, K, S, H], length int32 [B] -> [B, T, N, H]; see `block_attention.block_attention`."""
    batch, block, heads, width = q.shape
    kv_heads = k.shape[1]
    group = power_of_two(heads // kv_heads)
    config = config or tuned("block_attention", describe(q, k, mask.window), heuristic(q, k, mask.window, current()))
    tiles = -(-block // config.queries)
    if config.splits == 1:
        out = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    else:
        parts = (config.splits, batch, block, heads)
        out = [jax.ShapeDtypeStruct((*parts, width), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]
    results = pallas.launch(
        partial(_kernel, config=config, mask=mask, tiles=tiles, heads=heads // kv_heads, group=group),
        (length, q, k, v),
        out,
        name="block_attention",
        grid=(tiles * config.splits, kv_heads, batch),
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    if config.splits == 1:
        return results[0]
    [merged] = pallas.launch(
        _merge_kernel,
        results,
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        name="block_attention_merge",
        grid=(heads, block, batch),
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return merged


def _merge_kernel(part_ref: Any, log_total_ref: Any, out_ref: Any) -> None:
    """Partial results [splits, B, T, N, H] and the log2 of their softmax sums [splits, B, T, N] -> out [B, T, N, H]: one head of one
    token a program."""
    head, token, row = pallas.program_id(0), pallas.program_id(1), pallas.program_id(2)
    splits, width = part_ref.shape[0], part_ref.shape[4]
    size = power_of_two(splits)
    # head - head: a start that Pallas takes as traced, since the padding runs past the array.
    parts = pallas.rows(head - head, size)
    real = jnp.arange(size, dtype=jnp.int32) < splits
    log_total = pallas.load(log_total_ref.at[parts, row, token, head], real, float(jnp.finfo(jnp.float32).min))
    weights = jnp.exp2(log_total - jnp.max(log_total))
    part = pallas.load(part_ref.at[parts, row, token, head, :], jnp.broadcast_to(real[:, None], (size, width)))
    out = jnp.sum(part * weights[:, None], axis=0) / jnp.sum(jnp.where(real, weights, 0.0))
    pallas.store(out_ref.at[row, token, head, :], out, jnp.full(width, True))


def _kernel(
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    log_total_ref: Any = None,
    *,
    config: Config,
    mask: Mask,
    tiles: int,
    heads: int,
    group: int,
) -> None:
    block, width, capacity = q_ref.shape[1], q_ref.shape[3], k_ref.shape[2]
    index, kv_head, row = pallas.program_id(0), pallas.program_id(1), pallas.program_id(2)
    tile, split = lax.rem(index, jnp.int32(tiles)), lax.div(index, jnp.int32(tiles))
    length = length_ref[row]
    first_token = tile * config.queries

    # The tile's rows: query heads within tokens. Tokens past the block and heads past the group are padding.
    tokens = first_token + jnp.arange(config.queries, dtype=jnp.int32)
    real = (tokens < block)[:, None] & (jnp.arange(group, dtype=jnp.int32) < heads)[None]  # [queries, group]
    part = pallas.rows(first_token, config.queries), pallas.rows(kv_head * heads, group)
    rows = config.queries * group
    every_width = jnp.broadcast_to(real[:, :, None], (config.queries, group, width))
    q = pallas.load(q_ref.at[row, *part, :], every_width).reshape(rows, width)
    position = length + first_token + lax.div(jnp.arange(rows, dtype=jnp.int32), jnp.int32(group))  # [rows]

    begin, end = _seen(length, first_token, block, capacity, config, mask)
    steps = lax.div(end - begin + config.keys - 1, jnp.int32(config.keys))
    share = lax.div(steps + config.splits - 1, jnp.int32(config.splits)) * config.keys
    begin = begin + split * share
    end = jnp.minimum(end, begin + share)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        start = begin + i * config.keys
        slot = start + jnp.arange(config.keys, dtype=jnp.int32)
        within = jnp.broadcast_to((slot < end)[:, None], (config.keys, width))
        slots = pallas.rows(start, config.keys)
        k = pallas.load(k_ref.at[row, kv_head, slots, :], within)
        scores = pallas.dot(q, k, transposed=True) * mask.scale  # [rows, keys]
        if mask.softcap is not None:
            scores = mask.softcap * jnp.tanh(scores / mask.softcap)
        seen = _visible(position[:, None], slot[None], length, mask) & (slot < end)[None]
        scores = jnp.where(seen, scores * LOG2_E, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        v = pallas.load(v_ref.at[row, kv_head, slots, :], within)
        out = out * shrink[:, None] + pallas.dot(weights.astype(v.dtype), v)
        return new_top, total * shrink + jnp.sum(weights, axis=1), out

    carry = (
        jnp.full(rows, jnp.finfo(jnp.float32).min),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    steps = lax.div(jnp.maximum(end - begin, 0) + config.keys - 1, jnp.int32(config.keys))
    top, total, out = lax.fori_loop(jnp.int32(0), steps, step, carry)
    # A program that saw no slot: zeros, with a weight of (all but) zero in the merge.
    out = out / jnp.where(total > 0, total, 1.0)[:, None]
    out = out.reshape(config.queries, group, width)
    if log_total_ref is None:
        pallas.store(out_ref.at[row, *part, :], out, every_width)
        return
    log_total = top + jnp.log2(jnp.where(total > 0, total, 1.0))
    pallas.store(out_ref.at[split, row, *part, :], out, every_width)
    pallas.store(log_total_ref.at[split, row, *part], log_total.reshape(config.queries, group), real)


def _seen(
    length: jax.Array, first_token: jax.Array, block: int, capacity: int, config: Config, mask: Mask
) -> tuple[jax.Array, jax.Array]:
    """The slots begin .. end - 1 that at least one query of the tile sees lie within these bounds; int32 scalars."""
    first = length + first_token  # position of the tile's first query
    past = length + jnp.minimum(first_token + config.queries, block)  # and one past its last
    end = past if mask.causal else length + block
    begin = jnp.int32(0)
    if mask.window is not None:
        begin = length - mask.window if mask.window_from_block else first - mask.window + 1
        if not mask.causal and not mask.window_from_block:
            end = jnp.minimum(end, past - 1 + mask.window)
    return jnp.maximum(begin, 0), jnp.minimum(end, capacity)


def _visible(query: jax.Array, key: jax.Array, length: jax.Array, mask: Mask) -> jax.Array:
    """Whether queries [rows, 1] see keys [1, keys], positions that lie before the block's end -> bool [rows, keys]."""
    seen = key <= query if mask.causal else jnp.full((query.shape[0], key.shape[1]), True)
    if mask.window is None:
        return seen
    if mask.window_from_block:
        return seen & (key >= length - mask.window)
    seen = seen & (query - key < mask.window)
    return seen if mask.causal else seen & (key - query < mask.window)

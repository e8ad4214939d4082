"""KV injection as a Pallas kernel. `kv_injection` says what it computes.

One program makes the keys or the values of one layer and one key head, for one tile of features: a product [rows, D] . [D, H], whose
sums stay in registers until norm and rotation are done and the result is written where it belongs. The two halves of the head width
are summed apart, since the rotation pairs entry j of one with entry j of the other. With few features this reads the weights and little
else, so a tile takes several batch rows, and programs that read the same weight run side by side. Cosines and sines come from a table
that XLA makes: their code, unrolled over a tile, takes more registers than there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec_kernels import pallas_triton as pallas
from jaxspec_kernels.autotune import tuned
from jaxspec_kernels.gpu import MAX_TILE, MAX_TILE_FLOAT32, MIN_ROWS, Gpu, current, power_of_two
from jaxspec_kernels.kv_injection import Caches, LayerKV


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Fields:
        rows: features of a tile, a power of two.
        inputs: of the D inputs, so many a step, a power of two.
        warps: of a program.
        stages: steps whose loads are under way together.
    """

    rows: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Unit:
    """What one program makes: keys, values, or both from one projection, of one layer."""

    layer: int
    keys: bool
    values: bool


@dataclass(frozen=True)
class Tile:
    """How tiles lie over B batch rows of features.

    Fields:
        block: features of a batch row: T, or `padded` where a tile takes several batch rows.
        padded: features of one batch row in a tile, a power of two.
        together: batch rows of a tile, whole ones if several.
        parts: tiles of one batch row; 1 with more than one together.
    """

    block: int
    padded: int
    together: int
    parts: int

    @property
    def rows(self) -> int:
        return self.padded * self.together


Halves = tuple[jax.Array, jax.Array]  # of the head width


def supports(x: jax.Array, layers: Sequence[LayerKV], k: Caches, *, interpret: bool = False) -> bool:
    """Whether the kernel takes these layers: all alike in shapes and kind, no biases, every entry of a key rotated, a head width that
    is a power of two from 32 (interpreted: 2) to 512, and features, weights and caches of one dtype, float32 or bfloat16."""
    width, least = k[0].shape[3], 2 if interpret else 32

    def kind(layer: LayerKV, cache: jax.Array) -> tuple[object, ...]:
        same = layer.v is None, layer.k_norm is None, layer.v_norm, layer.norm_offset
        return layer.k.shape, cache.shape, *same

    return (
        len({kind(layer, cache) for layer, cache in zip(layers, k, strict=True)}) == 1
        and least <= width <= 512
        and width == power_of_two(width)
        and all(layer.k_bias is None and layer.v_bias is None for layer in layers)
        and all(2 * layer.frequencies.shape[0] == width for layer in layers)
        and x.dtype in ("float32", "bfloat16")
        and all(array.dtype == x.dtype for layer in layers for array in (layer.k, *k))
    )


def heuristic(x: jax.Array, width: int, heads: int, gpu: Gpu) -> Config:
    """A config for x [B, T, D] and heads of `width`, `heads` in all of a tile's units, whose buffers fit the GPU's shared memory."""
    batch, block, inputs = x.shape
    float32 = x.dtype == "float32"
    most = (MAX_TILE_FLOAT32 if float32 else MAX_TILE) // max(width, 128)
    rows = max(MIN_ROWS, min(most, power_of_two(batch) * power_of_two(block)))
    step, stages = min(32 if float32 else 64, power_of_two(inputs)), 4
    # With more programs than multiprocessors two should fit on each. Of the buffers of a step's loads there is one less than stages
    # (sm_90: as many for tall tiles, and it has more memory).
    halves = 2 if heads * -(-batch * block // rows) > gpu.multiprocessors else 1
    buffer = (rows + width) * step * x.dtype.itemsize
    while stages > 2 and (buffer * stages > gpu.shared_memory or buffer * (stages - 1) * halves > gpu.shared_memory):
        stages -= 1
    while buffer * stages > gpu.shared_memory and step > MIN_ROWS:
        step, buffer = step // 2, buffer // 2
    return Config(rows, step, warps=8 if float32 or rows * width >= MAX_TILE // 2 else 4, stages=stages)


def candidates(config: Config) -> list[Config]:
    """Configs to try around one, itself the first; some may not compile."""
    return [
        Config(config.rows, inputs, warps, stages)
        for inputs in (config.inputs, config.inputs * 2, config.inputs // 2)
        for warps in (config.warps, 12 - config.warps)
        for stages in (config.stages, 2, 3, 5)
        if inputs >= MIN_ROWS
    ]


def describe(x: jax.Array, k: Caches) -> str:
    """What a tuned config is kept under."""
    return f"x {x.shape} caches {len(k)} x {k[0].shape} {x.dtype}"


def inject_kv(
    x: jax.Array,
    layers: Sequence[LayerKV],
    k: Caches,
    v: Caches,
    start: jax.Array,
    count: jax.Array,
    *,
    eps: float,
    interpret: bool,
    config: Config | None = None,
) -> tuple[Caches, Caches]:
    """See `kv_injection.inject_kv`."""
    batch, block, inputs = x.shape
    kv_heads, width = k[0].shape[1], k[0].shape[3]
    number = len(layers)
    if config is None:
        heads = kv_heads * number * (1 if layers[0].v is None else 2)
        config = tuned("kv_injection", describe(x, k), heuristic(x, width, heads, current()))
    # A tile is several whole batch rows, each padded to a power of two, or a part of one.
    padded = min(power_of_two(block), config.rows)
    together = config.rows // padded
    tile = Tile(padded if together > 1 else block, padded, together, parts=-(-block // padded))
    x = jnp.pad(x, ((0, 0), (0, tile.block - block), (0, 0)))

    shared = layers[0].v is None
    units = [Unit(layer, keys=True, values=shared) for layer in range(number)]
    units += [] if shared else [Unit(layer, keys=False, values=True) for layer in range(number)]
    weights = [layer.k for layer in layers] + [layer.v for layer in layers if layer.v is not None]
    norms = [layer.k_norm for layer in layers if layer.k_norm is not None]
    arguments = [start, count, _turns(layers, start, tile), x.reshape(-1, inputs), *weights, *norms, *k, *v]
    first_cache = len(arguments) - 2 * number
    out = pallas.launch(
        partial(
            _kernel,
            units=units,
            norms=len(norms),
            norm_offset=layers[0].norm_offset,
            v_norm=layers[0].v_norm,
            eps=eps,
            tile=tile,
            step=config.inputs,
        ),
        arguments,
        [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (*k, *v)],
        name="kv_injection",
        grid=(-(-batch // tile.together) * tile.parts, kv_heads, len(units)),
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
        aliases={first_cache + i: i for i in range(2 * number)},
    )
    return tuple(out[:number]), tuple(out[number:])


def _turns(layers: Sequence[LayerKV], start: jax.Array, tile: Tile) -> jax.Array:
    """Cosines, then sines, of every feature's position, float32 [L, B * block, H]; [1, ...] where all layers turn alike."""
    first = layers[0]
    alike = all(
        np.array_equal(layer.frequencies, first.frequencies) and layer.scaling == first.scaling for layer in layers
    )
    kinds = [first] if alike else layers
    frequencies = jnp.asarray(np.stack([layer.frequencies for layer in kinds]))[:, None]  # [L, 1, H/2]
    scaling = jnp.asarray(np.array([layer.scaling for layer in kinds], np.float32))[:, None, None]
    positions = start[:, None] + jnp.arange(tile.block, dtype=jnp.int32)[None]
    angles = positions.reshape(1, -1, 1).astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles) * scaling, jnp.sin(angles) * scaling], axis=-1)


def _kernel(
    start_ref: Any,
    count_ref: Any,
    turns_ref: Any,
    x_ref: Any,
    *refs: Any,
    units: Sequence[Unit],
    norms: int,
    norm_offset: float,
    v_norm: bool,
    eps: float,
    tile: Tile,
    step: int,
) -> None:
    number, dtype = units[-1].layer + 1, x_ref.dtype
    weight_refs, norm_refs = refs[: len(units)], refs[len(units) : len(units) + norms]
    k_refs, v_refs = refs[-2 * number : -number], refs[-number:]
    batch, width = start_ref.shape[0], k_refs[0].shape[3]
    index, head, unit = pallas.program_id(0), pallas.program_id(1), pallas.program_id(2)
    batch_row = lax.div(index, jnp.int32(tile.parts)) * tile.together  # the tile's first
    token = lax.rem(index, jnp.int32(tile.parts)) * tile.padded  # of each batch row in the tile, its first
    first_row = batch_row * tile.block + token
    ahead = jnp.arange(tile.rows, dtype=jnp.int32)
    real = first_row + ahead < batch * tile.block if tile.together > 1 else token + ahead < tile.block  # [rows]

    def project(which: int) -> tuple[jax.Array, ...]:
        """The unit's product, and the weights of its norm: ones where it has none."""
        sums = _product(x_ref, weight_refs[which], head, first_row, real, step)
        if not units[which].keys or not norms:
            return *sums, *(jnp.ones(width // 2, jnp.float32) for _ in range(2))
        norm = norm_refs[units[which].layer]
        return *sums, *(norm[half].astype(jnp.float32) + norm_offset for half in _halves(width))

    # One condition after another, not a switch: Triton gives nested branches shared memory side by side, and there would not be enough.
    half = jnp.zeros((tile.rows, width // 2), jnp.float32)
    made = (half, half, *(jnp.ones(width // 2, jnp.float32) for _ in range(2)))
    for which in range(len(units)):
        made = lax.cond(unit == which, lambda _, which=which: project(which), lambda made: made, made)
    first, second, *norm = made
    projected = _rounded((first, second), dtype)

    def keys() -> Halves:
        made = projected
        if norms:
            normed = _normalize(made, eps)
            made = _rounded((normed[0] * norm[0][None], normed[1] * norm[1][None]), dtype)
        layer = lax.rem(unit, jnp.int32(number)) if turns_ref.shape[0] > 1 else jnp.int32(0)
        mask = jnp.broadcast_to(real[:, None], (tile.rows, width // 2))
        rows = pallas.rows(first_row, tile.rows)
        cos, sin = (pallas.load(turns_ref.at[layer, rows, half], mask) for half in _halves(width))
        return _rounded((made[0] * cos - made[1] * sin, made[1] * cos + made[0] * sin), dtype)

    def values() -> Halves:
        return _rounded(_normalize(projected, eps), dtype) if v_norm else projected

    if units[0].values:
        made = (*keys(), *values())
    else:
        made = lax.cond(unit < number, keys, values)
    _write(made, batch_row, token, head, unit, batch, start_ref, count_ref, k_refs, v_refs, units, tile)


def _product(x_ref: Any, weight_ref: Any, head: jax.Array, first_row: jax.Array, real: jax.Array, step: int) -> Halves:
    """The tile's features [rows, D], those that are `real` bool [rows], times the head's weight [H, D]: float32 [rows, H/2] twice."""
    inputs, half, rows = x_ref.shape[1], weight_ref.shape[1] // 2, real.shape[0]

    def add(i: jax.Array, sums: Halves) -> Halves:
        start = i * step
        columns = pallas.rows(start, step)
        inside = None if inputs % step == 0 else (start + jnp.arange(step, dtype=jnp.int32) < inputs)[None]
        x_mask = real[:, None] if inside is None else real[:, None] & inside
        x = pallas.load(x_ref.at[pallas.rows(first_row, rows), columns], jnp.broadcast_to(x_mask, (rows, step)))
        w_mask = None if inside is None else jnp.broadcast_to(inside, (half, step))
        added = [
            pallas.dot(x, pallas.load(weight_ref.at[head, part, columns], w_mask), transposed=True)
            for part in _halves(2 * half)
        ]
        return sums[0] + added[0], sums[1] + added[1]

    zeros = jnp.zeros((rows, half), jnp.float32)
    return lax.fori_loop(0, -(-inputs // step), add, (zeros, zeros))


def _write(
    made: Sequence[jax.Array],
    batch_row: jax.Array,
    token: jax.Array,
    head: jax.Array,
    unit: jax.Array,
    batch: int,
    start_ref: Any,
    count_ref: Any,
    k_refs: Sequence[Any],
    v_refs: Sequence[Any],
    units: Sequence[Unit],
    tile: Tile,
) -> None:
    """Each batch row of the tile [rows, H/2] x 2 (keys and values: x 4) to its consecutive slots, counted ones within the cache only."""
    capacity, width = k_refs[0].shape[2], k_refs[0].shape[3]

    def write(i: jax.Array, _: None) -> None:
        row = jnp.minimum(batch_row + i, batch - 1)
        parts = [_batch_row(part, i, tile) for part in made]
        tokens = token + jnp.arange(tile.padded, dtype=jnp.int32)
        slots = start_ref[row] + tokens
        kept = (tokens < count_ref[row]) & (slots < capacity) & (batch_row + i < batch)
        kept = jnp.broadcast_to(kept[:, None], (tile.padded, width // 2))
        where = pallas.rows(start_ref[row] + token, tile.padded)

        def store(which: int) -> None:
            made = units[which]
            refs = [refs[made.layer] for refs, wanted in ((k_refs, made.keys), (v_refs, made.values)) if wanted]
            for part, (ref, half) in zip(parts, [(ref, half) for ref in refs for half in _halves(width)], strict=True):
                pallas.store(ref.at[row, head, where, half], part, kept)

        lax.switch(unit, [partial(store, which) for which in range(len(units))])

    lax.fori_loop(0, tile.together, write, None)


def _batch_row(part: jax.Array, i: jax.Array, tile: Tile) -> jax.Array:
    """Of a tile's rows [rows, H/2] those of its i-th batch row, [padded, H/2]."""
    if tile.together == 1:
        return part
    apart = part.reshape(tile.together, tile.padded, part.shape[1])
    own = jnp.arange(tile.together, dtype=jnp.int32) == i
    return jnp.sum(jnp.where(own[:, None, None], apart, 0.0), axis=0)


def _halves(width: int) -> tuple[Any, Any]:
    return pallas.rows(0, width // 2), pallas.rows(width // 2, width // 2)


def _normalize(made: Halves, eps: float) -> Halves:
    """float32 [rows, H/2] twice -> the same with mean square 1 over both."""
    squares = jnp.sum(made[0] * made[0], axis=1) + jnp.sum(made[1] * made[1], axis=1)
    factor = lax.rsqrt(squares / (2 * made[0].shape[1]) + eps)[:, None]
    return made[0] * factor, made[1] * factor


def _rounded(made: Halves, dtype: jnp.dtype) -> Halves:
    """Rounded to the dtype, float32 again."""
    return made[0].astype(dtype).astype(jnp.float32), made[1].astype(dtype).astype(jnp.float32)

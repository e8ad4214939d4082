"""KV injection: every implementation against one feature at a time, and against the layers' own path."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import QUICK_COMPILE

from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.layers.attention import Attention
from jaxspec.layers.rope import inverse_frequencies
from jaxspec_kernels import kv_injection_pallas as kernel
from jaxspec_kernels.gpu import SHARED_MEMORY, Gpu
from jaxspec_kernels.implementation import Implementation, has_gpu
from jaxspec_kernels.kv_injection import LayerKV, inject_kv

K, L, EPS = 2, 2, 1e-5
PALLAS: list[Implementation] = ["interpret", *(["triton"] if has_gpu() else [])]
EVERY: list[Implementation] = ["xla", *PALLAS]

Weights = tuple[jax.Array, jax.Array | None, jax.Array | None]  # of a layer: k and v [K, H, D], k-norm [H]


def random_weights(width: int, inputs: int, dtype: str, shared: bool = False, norm: bool = True) -> list[Weights]:
    rng = np.random.default_rng(width)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    scale = jnp.asarray(inputs**-0.5, dtype)
    return [
        (
            array(K, width, inputs) * scale,
            None if shared else array(K, width, inputs) * scale,
            array(width) if norm else None,
        )
        for _ in range(L)
    ]


def layers_of(weights: list[Weights], v_norm: bool = False) -> list[LayerKV]:
    """Layers whose rotations differ."""
    return [
        LayerKV(k, v, None, None, norm, 0.25, v_norm, *inverse_frequencies(RopeConfig(10.0 * (i + 1), k.shape[1])))
        for i, (k, v, norm) in enumerate(weights)
    ]


def brute_force(
    x: np.ndarray, layer: LayerKV, k: np.ndarray, v: np.ndarray, start: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One feature of one head at a time, in float64."""

    def norm(y: np.ndarray) -> np.ndarray:
        return y / np.sqrt(np.mean(y**2) + EPS)

    k, v = k.astype(np.float64), v.astype(np.float64)
    for b, head in itertools.product(range(x.shape[0]), range(K)):
        for t in range(count[b]):
            slot = start[b] + t
            if slot >= k.shape[2]:
                continue
            feature = x[b, t].astype(np.float64)
            key = np.asarray(layer.k, np.float64)[head] @ feature
            value = key if layer.v is None else np.asarray(layer.v, np.float64)[head] @ feature
            if layer.k_norm is not None:
                key = norm(key) * (np.asarray(layer.k_norm, np.float64) + layer.norm_offset)
            first, second = np.split(key, 2)
            cos, sin = (turn(slot * layer.frequencies.astype(np.float64)) for turn in (np.cos, np.sin))
            k[b, head, slot] = np.concatenate([first * cos - second * sin, second * cos + first * sin]) * layer.scaling
            v[b, head, slot] = norm(value) if layer.v_norm else value
    return k, v


def check(
    implementation: Implementation,
    weights: list[Weights],
    batch: int,
    block: int,
    capacity: int,
    v_norm: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """Ragged rows, one of them without features and one that runs past the cache; NaN in what doesn't count."""
    width, inputs, dtype = *weights[0][0].shape[1:], weights[0][0].dtype
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, block, inputs)).astype(np.float32)
    start = rng.integers(0, capacity - block, batch).astype(np.int32)
    count = rng.integers(1, block + 1, batch).astype(np.int32)
    count[0], start[-1] = (0 if batch > 1 else block - 1), capacity - block // 2
    for b in range(batch):
        x[b, count[b] :] = np.nan
    caches = [rng.normal(size=(batch, K, capacity, width)).astype(np.float32) for _ in range(2 * L)]
    x, *caches = (jnp.asarray(array, dtype) for array in (x, *caches))

    def run(weights: list[Weights], x: jax.Array, *caches: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        k, v = caches[:L], caches[L:]
        layers = layers_of(weights, v_norm)
        return inject_kv(x, layers, k, v, jnp.array(start), jnp.array(count), eps=EPS, implementation=implementation)

    got_k, got_v = jax.jit(run, compiler_options=QUICK_COMPILE)(weights, x, *caches)
    for i, layer in enumerate(layers_of(weights, v_norm)):
        want = brute_force(np.asarray(x), layer, np.asarray(caches[i]), np.asarray(caches[L + i]), start, count)
        for got, wanted in zip((got_k[i], got_v[i]), want, strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=tolerance, rtol=tolerance)


KINDS = {  # shared projection, k-norm, v-norm
    "plain": (False, False, False),
    "qwen": (False, True, False),
    "gemma": (True, True, True),
}


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_what_one_feature_at_a_time_gives(implementation, kind):
    shared, norm, v_norm = KINDS[kind]
    width = 8 if implementation != "triton" else 64
    check(
        implementation, random_weights(width, 24, "float32", shared, norm), batch=3, block=5, capacity=20, v_norm=v_norm
    )


@pytest.mark.parametrize("implementation", PALLAS)
@pytest.mark.parametrize(("batch", "block", "rows"), [(5, 3, 16), (2, 20, 16), (1, 16, 16)])
def test_tiles_of_several_rows_and_parts_of_one(implementation, monkeypatch, batch, block, rows):
    monkeypatch.setattr(kernel, "heuristic", lambda *_: kernel.Config(rows, 16, warps=4, stages=2))
    width = 8 if implementation != "triton" else 64
    check(implementation, random_weights(width, 40, "float32"), batch, block, capacity=40)  # 40: no multiple of 16


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_every_head_width_in_both_types(implementation, dtype, width):
    # bfloat16 rounds projection, norm and rotation at 2^-8 each.
    tolerance = 1e-5 if dtype == "float32" else 4e-2
    check(implementation, random_weights(width, 32, dtype), batch=2, block=4, capacity=12, tolerance=tolerance)


ROPE = RopeConfig(theta=100.0, head_dim=16)
QWEN = AttentionConfig(4, K, 16, ROPE, 1.0, 0, qk_norm=True)
GEMMA_ROPE = RopeConfig(theta=100.0, head_dim=16, kind="proportional", partial=0.25)
CONFIGS = {
    "qwen": QWEN,
    "gemma": replace(QWEN, rope=GEMMA_ROPE, v_norm=True, v_from_k=True),
    "bias": replace(QWEN, qk_norm=False, bias=True),
    "partial rope": replace(QWEN, rope=RopeConfig(theta=100.0, head_dim=16, partial=0.5)),
}


@pytest.mark.parametrize("block", [5, 70])  # below and above the rows that the CPU multiplies weight first
@pytest.mark.parametrize("name", CONFIGS)
def test_xla_is_the_layers_own_path_to_the_bit(name, block):
    attention = Attention(CONFIGS[name], 24, EPS, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graph, state = nnx.split(attention)
    state = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), state)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, block, 24)).astype(np.float32)
    k, v = (rng.normal(size=(2, K, 90, 16)).astype(np.float32) for _ in range(2))
    start, count = np.array([3, 60], np.int32), np.array([block - 2, block], np.int32)

    @jax.jit
    def own(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        steps = jnp.arange(block, dtype=jnp.int32)[None]
        positions = jnp.where(steps < count[:, None], start[:, None] + steps, 90)
        return nnx.merge(graph, state).write(jnp.asarray(x), positions, jnp.asarray(k), jnp.asarray(v))

    # Biases and partial rotations are not the kernel's: asking for it changes nothing.
    implementations: list[Implementation] = ["xla", "interpret"] if name in ("bias", "partial rope") else ["xla"]
    for implementation in implementations:

        @jax.jit
        def door(state: nnx.State, implementation: Implementation = implementation) -> tuple[jax.Array, jax.Array]:
            layers = [nnx.merge(graph, state).injection()]
            caches = (jnp.asarray(k),), (jnp.asarray(v),)
            ((k_out,), (v_out,)) = inject_kv(
                jnp.asarray(x),
                layers,
                *caches,
                jnp.asarray(start),
                jnp.asarray(count),
                eps=EPS,
                implementation=implementation,
            )
            return k_out, v_out

        for mine, theirs in zip(door(state), own(state), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_as_many_caches_as_layers_are_wanted():
    weights = random_weights(8, 8, "float32")
    cache = jnp.zeros((1, K, 4, 8))
    with pytest.raises(ValueError, match="2 layers need as many caches, not 1 and 2"):
        inject_kv(
            jnp.zeros((1, 2, 8)),
            layers_of(weights),
            (cache,),
            (cache, cache),
            jnp.zeros(1, jnp.int32),
            jnp.ones(1, jnp.int32),
            eps=EPS,
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_block_sizes_fit_shared_memory_and_registers(width, dtype):
    for shared, batch, block, heads in itertools.product(
        SHARED_MEMORY.values(), (1, 8, 64), (1, 5, 16, 513), (10, 160)
    ):
        x = jax.ShapeDtypeStruct((batch, block, 4096), jnp.dtype(dtype))
        config = kernel.heuristic(x, width, heads, Gpu(108, shared))
        step = (config.rows + width) * config.inputs * x.dtype.itemsize
        assert step * max(config.stages - 1, 1) <= shared
        assert config.inputs >= 16 and config.rows >= 16 and config.rows * width <= 16_384

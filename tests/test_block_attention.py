"""Block attention: every implementation against a brute-force table of who sees whom."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import QUICK_COMPILE

from jaxspec_kernels import block_attention as door
from jaxspec_kernels import block_attention_pallas as kernel
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.gpu import SHARED_MEMORY, Gpu
from jaxspec_kernels.implementation import Implementation, has_gpu

T, N, K, H, S = 5, 6, 2, 8, 30
LENGTHS = (0, 7, 25)  # an empty context, one inside, one whose block ends with the cache
MASKS = [
    (causal, window, from_block)
    for causal, window, from_block in itertools.product((True, False), (None, 3, 12), (False, True))
    if window is not None or not from_block
]
PALLAS: list[Implementation] = ["interpret", *(["triton"] if has_gpu() else [])]
EVERY: list[Implementation] = ["xla", *PALLAS]

# How each implementation may cut the work: in one piece, or in several with the last one not full.
CUTS = [("xla", S), ("xla", 8), *((name, 3) for name in PALLAS)]


@pytest.fixture
def cut(request, monkeypatch) -> Implementation:
    """An implementation made to cut the work in a given way."""
    implementation, how = request.param
    monkeypatch.setattr(door, "CPU_CHUNK", how)
    keys, queries = (16, 4) if implementation == "triton" else (8, 2)
    monkeypatch.setattr(kernel, "heuristic", lambda *_: kernel.Config(queries, keys, splits=how, warps=4, stages=2))
    return implementation


def sees(query: int, key: int, length: int, block: int, causal: bool, window: int | None, from_block: bool) -> bool:
    """Whether the query at position `query` may see position `key`, said once more in plain words."""
    if key >= length + block or (causal and key > query):
        return False
    if window is None:
        return True
    if from_block:
        return key >= length - window
    return abs(query - key) < window


def brute_force(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: tuple[int, ...] = LENGTHS,
    causal: bool = True,
    window: int | None = None,
    from_block: bool = False,
    softcap: float | None = None,
) -> np.ndarray:
    """One query, one key at a time, in float64."""
    batch, block, heads, _ = q.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n in itertools.product(range(batch), range(block), range(heads)):
        query, kv_head = lengths[b] + t, n * k.shape[1] // heads
        keys = [s for s in range(k.shape[2]) if sees(query, s, lengths[b], block, causal, window, from_block)]
        scores = 0.3 * k[b, kv_head, keys] @ q[b, t, n]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, kv_head, keys]
    return out


def poisoned(
    lengths: tuple[int, ...], block: int, heads: int, kv_heads: int, width: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v; NaN in every slot that no query may see, since stale slots can hold anything."""
    rng = np.random.default_rng(width)
    q = rng.normal(size=(len(lengths), block, heads, width)).astype(np.float32)
    k, v = (rng.normal(size=(len(lengths), kv_heads, capacity, width)).astype(np.float32) for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, :, length + block :] = v[b, :, length + block :] = np.nan
    return q, k, v


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return poisoned(LENGTHS, T, N, K, H, S)


def quickly(function: Callable[..., object]) -> Callable[..., object]:
    return jax.jit(function, compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("cut", CUTS, ids="{0[0]}-{0[1]}".format, indirect=True)
@pytest.mark.parametrize(("causal", "window", "from_block"), MASKS)
def test_equals_the_brute_force_table(arrays, cut, causal, window, from_block):
    if cut == "triton":
        pytest.skip("Triton's products need a width of 16; the widths below are its test")
    q, k, v = arrays
    lengths = jnp.array(LENGTHS, jnp.int32)
    softcap = 0.5 if window == 3 else None
    options = {"causal": causal, "window": window, "window_from_block": from_block, "softcap": softcap}
    got = quickly(lambda *x: block_attention(*x, scale=0.3, implementation=cut, **options))(q, k, v, lengths)
    np.testing.assert_allclose(got, brute_force(q, k, v, LENGTHS, causal, window, from_block, softcap), atol=2e-6)


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_every_head_width_in_both_types(implementation, dtype, width):
    lengths = (0, 30)
    arrays = poisoned(lengths, block=3, heads=4, kv_heads=2, width=width, capacity=40)
    q, k, v = (jnp.asarray(x, dtype) for x in arrays)
    run = quickly(lambda *x: block_attention(*x, scale=0.3, implementation=implementation))
    got = run(q, k, v, jnp.array(lengths, jnp.int32))
    assert got.dtype == dtype
    want = brute_force(*(np.asarray(x, np.float32) for x in (q, k, v)), lengths)
    # bfloat16 rounds weights and output at 2^-8.
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("cut", [("xla", 8), *((name, 3) for name in PALLAS)], ids=str, indirect=True)
def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours_length(cut):
    q, k, v = (np.nan_to_num(x) for x in poisoned(LENGTHS, T, N, K, 16, S))
    run = quickly(lambda lengths: block_attention(q, k, v, lengths, scale=0.3, implementation=cut))
    short, long = (run(jnp.array([2, other, other], jnp.int32)) for other in (0, 25))
    np.testing.assert_array_equal(short[0], long[0])


@pytest.mark.parametrize("implementation", PALLAS)
def test_a_row_past_the_cache_disturbs_no_other(implementation):
    q, k, v = poisoned(LENGTHS, T, N, K, 16, S)
    run = quickly(lambda lengths: block_attention(q, k, v, lengths, scale=0.3, implementation=implementation))
    got = run(jnp.array([0, 7, S + 4], jnp.int32))
    np.testing.assert_allclose(got[:2], brute_force(q, k, v)[:2], atol=2e-6)


def test_a_width_that_is_no_power_of_two_goes_the_plain_way(arrays):
    arrays = *(x[..., :6] for x in arrays), jnp.array(LENGTHS, jnp.int32)
    plain, asked = (
        quickly(lambda *x, name=name: block_attention(*x, scale=0.3, implementation=name))(*arrays)
        for name in ("xla", "interpret")
    )
    np.testing.assert_array_equal(plain, asked)


def test_wrong_heads_and_implementations_are_refused(arrays):
    q, k, v = arrays
    lengths = jnp.array(LENGTHS, jnp.int32)
    with pytest.raises(ValueError, match="3 query heads"):
        block_attention(q[:, :, :3], k, v, lengths, scale=1.0)
    with pytest.raises(ValueError, match="'cuda'"):
        block_attention(q, k, v, lengths, scale=1.0, implementation="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_block_sizes_fit_shared_memory_and_registers(width, dtype):
    for capability, batch, block, heads, kv_heads in itertools.product(
        SHARED_MEMORY, (1, 8, 64), (1, 5, 8, 16, 32, 512), (32,), (4, 8, 16)
    ):
        q = jax.ShapeDtypeStruct((batch, block, heads, width), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((batch, kv_heads, 8192, width), jnp.dtype(dtype))
        config = kernel.heuristic(q, k, None, Gpu(108, SHARED_MEMORY[capability]))
        rows = config.queries * heads // kv_heads
        buffers = 2 * max(config.stages - 1, 1) * config.keys * width
        assert (buffers + rows * (width + config.keys)) * q.dtype.itemsize <= SHARED_MEMORY[capability]
        assert rows >= 16 and (rows * width <= 16_384 or rows == heads // kv_heads)
        assert config.splits == 1 or batch * kv_heads * -(-block // config.queries) * config.splits <= 108

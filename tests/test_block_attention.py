"""Block attention against a brute-force table of who sees whom."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import block_attention as module
from jaxspec_kernels.block_attention import block_attention

B, T, N, K, H, S = 3, 5, 4, 2, 8, 30
LENGTHS = (0, 7, 25)  # an empty context, one inside, one whose block ends with the cache
MASKS = [
    (causal, window, from_block)
    for causal, window, from_block in itertools.product((True, False), (None, 3, 12), (False, True))
    if window is not None or not from_block
]


def sees(query: int, key: int, length: int, causal: bool, window: int | None, from_block: bool) -> bool:
    """Whether the query at position `query` may see position `key`, said once more in plain words."""
    if key >= length + T or (causal and key > query):
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
    causal: bool,
    window: int | None,
    from_block: bool,
    softcap: float | None,
) -> np.ndarray:
    """One query, one key at a time, in float64."""
    out = np.zeros_like(q, dtype=np.float64)
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        query = LENGTHS[b] + t
        keys = [s for s in range(S) if sees(query, s, LENGTHS[b], causal, window, from_block)]
        scores = np.array([0.3 * np.dot(q[b, t, n].astype(np.float64), k[b, n * K // N, s]) for s in keys])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, n * K // N, keys].astype(np.float64)
    return out


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v; NaN in every slot that no query may see, since stale slots can hold anything."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    k, v = (rng.normal(size=(B, K, S, H)).astype(np.float32) for _ in range(2))
    for b, length in enumerate(LENGTHS):
        k[b, :, length + T :] = v[b, :, length + T :] = np.nan
    return q, k, v


@pytest.mark.parametrize("chunk", [S, 8], ids="chunk{}".format)  # in one piece; in chunks, the last overlapping
@pytest.mark.parametrize(("causal", "window", "from_block"), MASKS)
def test_equals_the_brute_force_table(arrays, monkeypatch, causal, window, from_block, chunk):
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    q, k, v = arrays
    lengths = jnp.array(LENGTHS, jnp.int32)
    softcaps = (None, 0.5)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        options = {"scale": 0.3, "causal": causal, "window": window, "window_from_block": from_block}
        return [block_attention(q, k, v, lengths, softcap=softcap, **options) for softcap in softcaps]

    for softcap, got in zip(softcaps, jax.jit(run)(q, k, v), strict=True):
        want = brute_force(q, k, v, causal, window, from_block, softcap)
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours_length(arrays, monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK", 8)
    q, k, v = (np.nan_to_num(x) for x in arrays)
    run = jax.jit(lambda lengths: block_attention(q, k, v, lengths, scale=0.3))
    short, long = (run(jnp.array([2, other, other], jnp.int32)) for other in (0, 25))
    np.testing.assert_array_equal(short[0], long[0])


def test_bfloat16_stays_close_and_keeps_its_dtype(arrays):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
    got = block_attention(q, k, v, jnp.array(LENGTHS, jnp.int32), scale=0.3)
    assert got.dtype == jnp.bfloat16
    want = brute_force(*(np.asarray(x, np.float32) for x in (q, k, v)), True, None, False, None)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)  # bf16 rounds weights and output at 2^-8


def test_wrong_heads_and_implementations_are_refused(arrays):
    q, k, v = arrays
    lengths = jnp.array(LENGTHS, jnp.int32)
    with pytest.raises(ValueError, match="3 query heads"):
        block_attention(q[:, :, :3], k, v, lengths, scale=1.0)
    with pytest.raises(ValueError, match="'cuda'"):
        block_attention(q, k, v, lengths, scale=1.0, implementation="cuda")

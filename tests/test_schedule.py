"""How many drafts are verified: the threshold, and the prefix scheduler against a transcription of its algorithm."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.schedule import keep_confident, keep_scheduled

BATCH, K = 4, 6
scheduled, confident = jax.jit(keep_scheduled), jax.jit(keep_confident)


def algorithm_1(confidence: np.ndarray, running: np.ndarray, steps_per_s: np.ndarray) -> np.ndarray:
    """arXiv 2607.05147, algorithm 1, as SPEC 13 tells it: float32 [B, K], bool [B], float32 [N] -> int [B]."""
    active = np.flatnonzero(running)
    survival = np.cumprod(confidence, axis=1)
    pairs = [(row, draft) for draft, row in product(range(confidence.shape[1]), active)]
    pairs.sort(key=lambda pair: -survival[pair])  # stable: of equals a row's earlier draft, then the earlier row
    kept = np.zeros(len(confidence), int)
    tokens, expected = len(active), np.float32(len(active))
    best = expected * steps_per_s[tokens - 1] if tokens else 0
    for row, draft in pairs:
        tokens, expected = tokens + 1, expected + survival[row, draft]
        if not expected * steps_per_s[tokens - 1] > best:
            break
        best = expected * steps_per_s[tokens - 1]
        kept[row] = draft + 1
    return kept


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences in eighths, so that survivals and their sums are exact in float32, whatever the order; ties are common."""
    confidence = np.float32(rng.integers(rng.integers(8), 9, (BATCH, K)) / 8)
    running = rng.random(BATCH) < 0.8
    step = 1 + rng.choice([0.01, 0.1, 0.5]) * np.arange(BATCH * (K + 1))
    if rng.random() < 0.5:  # a step curve, as widths of kernels make it
        step = np.ceil(step * 4) / 4
    return confidence, running, (1 / step).astype(np.float32)


def test_the_scheduler_is_algorithm_1():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        confidence, running, curve = random_case(rng)
        got = np.asarray(scheduled(jnp.array(confidence), jnp.array(running), jnp.array(curve)))
        np.testing.assert_array_equal(got, algorithm_1(confidence, running, curve))
        assert (got[~running] == 0).all()
        seen |= set(got.tolist())
    assert seen == set(range(K + 1))


def test_free_verification_keeps_everything_and_nothing_when_nothing_runs():
    confidence, flat = jnp.full((BATCH, K), 0.5), jnp.ones(BATCH * (K + 1))
    assert scheduled(confidence, jnp.ones(BATCH, bool), flat).tolist() == [K] * BATCH
    assert scheduled(confidence, jnp.zeros(BATCH, bool), flat).tolist() == [0] * BATCH


@pytest.mark.parametrize("rule", ["scheduled", "confident"])
def test_a_draft_is_kept_by_what_was_known_before_it(rule):
    """Later confidences have seen the draft: changing them must not change whether it is kept, or the output would be biased."""
    rng = np.random.default_rng(1)

    def keep(confidence: np.ndarray, running: np.ndarray, curve: np.ndarray) -> np.ndarray:
        if rule == "confident":
            return np.asarray(confident(jnp.array(confidence), 0.5))
        return np.asarray(scheduled(jnp.array(confidence), jnp.array(running), jnp.array(curve)))

    for _ in range(200):
        confidence, running, curve = random_case(rng)
        before = keep(confidence, running, curve)
        row, draft = rng.integers(BATCH), rng.integers(K)
        changed = confidence.copy()
        changed[row, draft + 1 :] = rng.integers(0, 9, K - draft - 1) / 8
        after = keep(changed, running, curve)
        # Draft `draft` and those before it have the same fate.
        assert min(before[row], draft + 1) == min(after[row], draft + 1)


def test_the_threshold_keeps_the_drafts_before_the_first_below_it():
    confidence = jnp.array([[0.9, 0.5, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.5, 0.6, 0.7, 0.8]])
    assert confident(confidence, 0.5).tolist() == [2, 0, 4]

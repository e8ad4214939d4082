"""Which tokens are left: the way for CPUs and the way for everything else, against a sort in float64."""

import jax
import numpy as np
import pytest
from jitted import QUICK_COMPILE
from scipy import stats

from jaxspec.decoding import sampling, support
from jaxspec.decoding.support import LINE, LISTED, Support, find_support

SIZES = [
    7,
    LISTED,
    300,
    LINE * (LISTED + 3),
    LINE * (LISTED + 3) + 5,
]  # sorted whole, picked in lines, and no multiple of a line
SETTINGS = [
    {"top_k": 1},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": LISTED},
    {"top_k": LISTED + 1, "top_p": 0.9},
    {"top_k": 5000},
    {"top_p": 0.02},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 0.97, "temperature": 20.0},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.3, "top_k": 9, "top_p": 0.8},
    {"min_p": 1.0},
    {},
]


def narrowed_by(way: str) -> jax.stages.Wrapped:
    """`find_support` by `way`."""

    narrow = {"cpu": support.pick_then_search, "elsewhere": lambda start, wanted: support.search(start)}[way]

    def run(*arguments: jax.Array) -> Support:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "pick_then_search", narrow)
            return find_support(*arguments)

    return jax.jit(run, compiler_options=QUICK_COMPILE)


WAYS = {way: narrowed_by(way) for way in ("cpu", "elsewhere")}
log_probs = jax.jit(Support.log_probs)
draw = jax.jit(sampling.draw, compiler_options=QUICK_COMPILE)


def left_by_sorting(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities float64 [V] of one slot, in vLLM's order; of equal logits the lowest ids stay."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0
    if top_k > 0:
        weights[top_k:] = 0
    before = (np.cumsum(weights) - weights) / weights.sum()
    if top_p < 1:
        weights[before >= top_p] = 0
    p = np.zeros(len(logits))
    p[order] = weights / weights.sum()
    return p


def found(way: str, logits: np.ndarray, settings: list[dict]) -> np.ndarray:
    """Probabilities [M, V] of slots logits [M, V], each with its setting."""

    def of(name: str, default: float, dtype: type) -> np.ndarray:
        return np.array([setting.get(name, default) for setting in settings], dtype)

    filters = of("temperature", 1.0, np.float32), of("top_k", 0, np.int32), of("top_p", 1.0, np.float32)
    supports = WAYS[way](np.ascontiguousarray(logits.T), *filters, of("min_p", 0.0, np.float32))
    return np.exp(np.asarray(log_probs(supports, logits), np.float64))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_left_equals_a_sort(way, size):
    logits = (3 * np.random.default_rng(size).standard_normal((len(SETTINGS), size))).astype(np.float32)
    p = found(way, logits, SETTINGS)
    for slot, setting in enumerate(SETTINGS):
        expected = left_by_sorting(logits[slot], **setting)
        np.testing.assert_array_equal(p[slot] > 0, expected > 0, err_msg=str(setting))
        np.testing.assert_allclose(p[slot], expected, rtol=2e-5, err_msg=str(setting))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_among_equals_the_lowest_ids_stay(way, size):
    """Logits with few values: every cut falls among equals."""
    logits = np.random.default_rng(size).integers(0, 4, (len(SETTINGS), size)).astype(np.float32)
    for setting in ({"top_k": 3}, {"top_k": LISTED}, {"top_k": LISTED + 40}):
        p = found(way, logits, [setting] * len(SETTINGS))
        for slot in range(len(SETTINGS)):
            expected = left_by_sorting(logits[slot], **setting)
            np.testing.assert_array_equal(p[slot] > 0, expected > 0, err_msg=str(setting))


@pytest.mark.parametrize("way", WAYS)
def test_top_p_cuts_among_equals_by_id(way):
    size = LINE * (LISTED + 3)
    logits = np.zeros((4, size), np.float32)
    logits[1, size // 2 :] = 1
    logits[2, 1::2] = -np.inf
    logits[3] = -0.0
    p = found(way, logits, [{"top_p": 0.25}, {"top_p": 0.25}, {"top_p": 0.5}, {"top_p": 0.001}])
    for slot, top_p in enumerate((0.25, 0.25, 0.5, 0.001)):
        np.testing.assert_array_equal(p[slot] > 0, left_by_sorting(logits[slot], top_p=top_p) > 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_slot_does_not_depend_on_the_others(way):
    size = LINE * (LISTED + 3)
    logits = (3 * np.random.default_rng(0).standard_normal((len(SETTINGS), size))).astype(np.float32)
    together = found(way, logits, SETTINGS)
    for slot, setting in enumerate(SETTINGS):
        # The rarest have log-probabilities of -16, whose last bit is 2e-6 of p.
        np.testing.assert_allclose(together[slot], found(way, logits[slot : slot + 1], [setting])[0], rtol=4e-6)


def test_the_largest_logits_suffice_where_everything_is_among_them():
    size = LINE * (LISTED + 3)
    peaked = (9 * np.random.default_rng(0).standard_normal((2, size))).astype(np.float32)
    flat = (0.01 * peaked).astype(np.float32)
    logits = np.concatenate([peaked, flat]).T
    ones, none = np.ones(4, np.float32), np.full(4, 0.9, np.float32)
    peak = logits.max(0)
    mass = np.exp(logits - peak).sum(0)
    edge = support.Edge(np.full(4, -np.inf, np.float32), np.full(4, size - 1, np.int32), mass)
    start = support.Narrowing(logits, peak, ones, edge, np.zeros(4, np.int32), none)
    np.testing.assert_array_equal(jax.jit(support.pick)(start)[1], [True, True, False, False])


@pytest.mark.parametrize("size", [5, 128, 300])
def test_draws_are_in_proportion_to_the_weights(size):
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=size).astype(np.float32) ** 3
    weights[::2] = 0
    u = rng.random(40_000).astype(np.float32)
    drawn = np.asarray(draw(np.tile(weights, (len(u), 1)), u))
    counts, expected = np.bincount(drawn, minlength=size), len(u) * weights.astype(np.float64) / weights.sum()
    assert counts[weights == 0].sum() == 0
    rare = expected < 5
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    some = expected > 0
    assert stats.chisquare(counts[some], expected[some] * counts.sum() / expected[some].sum()).pvalue > 1e-3


@pytest.mark.parametrize("size", [5, 128, 300])
def test_a_draw_at_either_end_has_a_weight(size):
    """u is below 1, but u times the sum may round to it."""
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=(500, size)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.7] = 0
    weights[np.arange(500), rng.integers(0, size, 500)] = 1e-6
    rows = np.arange(500)
    for u in (0.0, 1 - 2.0**-24):
        drawn = np.asarray(draw(weights, np.full(500, u, np.float32)))
        assert (weights[rows, drawn] > 0).all()
    first = np.asarray(draw(weights, np.zeros(500, np.float32)))
    np.testing.assert_array_equal(first, (weights > 0).argmax(1))


def test_weights_that_are_not_numbers_give_an_id_in_range():
    drawn = draw(np.full((2, 300), np.nan, np.float32), np.array([0.0, 0.7], np.float32))
    assert (np.asarray(drawn) == 0).all()

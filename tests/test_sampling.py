"""Sampling: parameters, the order and the definition of every operation, and the randomness."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.decoding import cycle, sampling
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.randomness import Purpose, draw_keys, seed_words
from jaxspec.decoding.sampling import SamplingRows, TokenCounts
from jaxspec.drafters.base import greedy
from jaxspec.errors import InputError

V = 64

filter_logits = jax.jit(sampling.filter_logits)
penalize = jax.jit(sampling.penalize)
sample = jax.jit(sampling.sample)


def rows(*params: SamplingParams) -> SamplingRows:
    seeds = [0 if p.seed is None else p.seed for p in params]
    return SamplingRows.of(params, seeds)


def random_logits(*shape: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def reference_filter(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row [V] in vLLM's order, by sorting and in float64: temperature, min-p, top-k, top-p."""
    scaled = logits.astype(np.float64) / params.temperature
    scaled = np.where(softmax(scaled) < params.min_p * softmax(scaled).max(), -np.inf, scaled)
    if params.top_k > 0:
        scaled = np.where(scaled < np.sort(scaled)[-min(params.top_k, len(scaled))], -np.inf, scaled)
    order = np.argsort(-scaled, kind="stable")
    before = np.cumsum(softmax(scaled)[order]) - softmax(scaled)[order]
    dropped = order[before >= params.top_p]
    scaled[dropped] = -np.inf
    return scaled


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", 1e39, "at most 1000000"),
        ("stop", None, "must be a sequence"),
        ("stop_token_ids", 5, "must be a sequence"),
        ("logit_bias", None, "must be a mapping"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", "warm", "at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "whole number"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("repetition_penalty", 0, "at least 0.001 and at most 1000"),
        ("repetition_penalty", 1e39, "at least 0.001 and at most 1000"),
        ("presence_penalty", 2.1, "at most 2"),
        ("frequency_penalty", -2.1, "at least -2"),
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", -5, "at least 1"),
        ("seed", -1, "at least 0"),
        ("seed", 2**64, "at most 18446744073709551615"),
        ("stop", "end", "sequence of strings"),
        ("stop", ("",), "at least one character"),
        ("stop_token_ids", (-1,), "at least 0"),
    ],
)
def test_a_parameter_outside_its_range_is_named(field, value, wanted):
    with pytest.raises(InputError, match=rf"{field} .*{wanted}"):
        SamplingParams(**{field: value})


def test_filters_equal_the_sorted_reference_in_vllm_order():
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 500), (0.05, 0.6, 1.0), (0.0, 0.1))
    ]
    logits = random_logits(len(params), V)
    filtered = np.asarray(filter_logits(jnp.asarray(logits), rows(*params)))
    for row, wanted in enumerate(params):
        expected = reference_filter(logits[row], wanted)
        np.testing.assert_array_equal(np.isfinite(filtered[row]), np.isfinite(expected), err_msg=str(wanted))
        np.testing.assert_allclose(softmax(filtered[row]), softmax(expected), rtol=1e-5, atol=1e-9)


def test_min_p_acts_before_top_p():
    # Without min-p the nucleus of 0.7 holds three tokens; of what min-p leaves it holds two.
    logits = np.log(np.array([[0.4, 0.2, 0.11, 0.1, 0.1, 0.09]], np.float32))
    params = SamplingParams(temperature=1.0, top_p=0.7, min_p=0.4)
    kept = np.isfinite(filter_logits(jnp.asarray(logits), rows(params)))
    np.testing.assert_array_equal(kept, [[True, True, False, False, False, False]])


def test_among_equal_logits_the_lowest_ids_stay():
    logits = jnp.asarray([[0.0, 1.0, 1.0, 1.0, -1.0]])
    for params, expected in (
        (SamplingParams(temperature=1.0, top_k=1), [1]),
        (SamplingParams(temperature=1.0, top_k=2), [1, 2]),
        (SamplingParams(temperature=1.0, top_p=0.01), [1]),
        (SamplingParams(temperature=1.0, top_p=0.5), [1, 2]),
    ):
        assert np.flatnonzero(np.isfinite(filter_logits(logits, rows(params))[0])).tolist() == expected


def test_a_temperature_of_almost_nothing_stays_finite():
    logits = jnp.asarray(random_logits(2, V) * 1e4)
    both = rows(SamplingParams(temperature=2e-5), SamplingParams(temperature=1e-6))
    filtered = np.asarray(filter_logits(logits, both))
    assert not np.isnan(filtered).any()
    np.testing.assert_array_equal(filtered.argmax(-1), np.asarray(logits).argmax(-1))


def test_a_block_of_positions_is_filtered_like_each_position_alone():
    params = (
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(),
        SamplingParams(temperature=2.0, min_p=0.2),
    )
    block = jnp.asarray(random_logits(3, 4, V))
    together = filter_logits(block, rows(*params))
    for position in range(4):
        np.testing.assert_array_equal(together[:, position], filter_logits(block[:, position], rows(*params)))


def test_greedy_rows_of_a_mixed_batch_take_the_argmax():
    logits = jnp.asarray(random_logits(4, V))
    mixed = rows(SamplingParams(), SamplingParams(temperature=5.0), SamplingParams(), SamplingParams(temperature=5.0))
    drawn = sample(logits, mixed, jnp.arange(4, dtype=jnp.int32), jnp.zeros(4, jnp.int32))
    best = np.asarray(logits).argmax(-1)
    assert drawn[0] == best[0] and drawn[2] == best[2]
    point = np.asarray(filter_logits(logits, mixed))
    assert np.isfinite(point[0]).sum() == 1 and point[0].argmax() == best[0]


def test_top_k_one_equals_greedy():
    logits = jnp.asarray(random_logits(8, V))
    one = rows(*[SamplingParams(temperature=1.0, top_k=1)] * 8)
    drawn = sample(logits, one, jnp.arange(8, dtype=jnp.int32), jnp.zeros(8, jnp.int32))
    np.testing.assert_array_equal(drawn, np.asarray(logits).argmax(-1))


def test_draws_follow_the_filtered_distribution():
    number = 20000
    logits = jnp.asarray(random_logits(1, 8, seed=3)) * 0.4
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=5)
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf, number, axis=0), rows(params))
    positions = jnp.arange(number, dtype=jnp.int32)
    drawn = sample(jnp.repeat(logits, number, axis=0), many, positions, jnp.zeros_like(positions))
    counts = np.bincount(np.asarray(drawn), minlength=8)
    expected = softmax(reference_filter(np.asarray(logits)[0], params))
    assert counts[expected == 0].sum() == 0
    assert stats.chisquare(counts[expected > 0], number * expected[expected > 0]).pvalue > 1e-3


def test_penalties_equal_the_reference():
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.4),
        SamplingParams(repetition_penalty=1.2, presence_penalty=1.5, frequency_penalty=0.3),
        SamplingParams(),
    ]
    logits = random_logits(len(params), V)
    prompts = [[1, 2, 2, 3]] * len(params)
    answer = [3, 5, 5, 5, 9]
    counts = TokenCounts.of_prompts(prompts, V)
    add = jax.jit(TokenCounts.add)
    for token in answer:
        counts = add(counts, jnp.full(len(params), token, jnp.int32), jnp.ones(len(params), bool))
    penalized = np.asarray(penalize(jnp.asarray(logits), counts, rows(*params)))
    for row, p in enumerate(params):
        expected = logits[row].astype(np.float64)
        for token in {*prompts[row], *answer}:
            expected[token] *= p.repetition_penalty if expected[token] < 0 else 1 / p.repetition_penalty
        for token in set(answer):
            expected[token] -= p.frequency_penalty * answer.count(token) + p.presence_penalty
        np.testing.assert_allclose(penalized[row], expected, rtol=1e-5, atol=1e-6)


def test_counts_leave_out_rows_that_have_ended():
    counts = TokenCounts.of_prompts([[0], [0]], V)
    counts = counts.add(jnp.array([4, 4], jnp.int32), jnp.array([True, False]))
    assert counts.output.sum(-1).tolist() == [1, 0]


def test_no_two_draws_share_a_key():
    cases = list(itertools.product((0, 1, 2**32, 2**64 - 1), (0, 1, 2, 40000), (0, 1, 2)))
    seeds, positions, slots = zip(*cases, strict=True)
    words, position, slot = jnp.asarray(seed_words(seeds)), jnp.array(positions, jnp.int32), jnp.array(slots, jnp.int32)
    data = [np.asarray(jax.random.key_data(draw_keys(words, position, slot, purpose))) for purpose in Purpose]
    assert len({tuple(key) for key in np.concatenate(data).tolist()}) == len(cases) * len(Purpose)


def test_a_small_seed_gives_the_key_that_jax_makes_of_it():
    np.testing.assert_array_equal(seed_words([7])[0], jax.random.key_data(jax.random.key(7)))


def test_a_draw_depends_on_its_own_row_only():
    logits = jnp.asarray(random_logits(4, V))
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in range(4)]
    position = jnp.array([3, 9, 27, 81], jnp.int32)
    together = sample(logits, rows(*params), position, jnp.zeros(4, jnp.int32))
    for row in range(4):
        alone = sample(logits[row : row + 1], rows(params[row]), position[row : row + 1], jnp.zeros(1, jnp.int32))
        assert alone[0] == together[row]


@pytest.mark.parametrize("how", ["greedy", "drawn"])
def test_drafts_chosen_together_equal_those_chosen_one_by_one(how):
    logits = jnp.asarray(random_logits(2, 3, 2096))  # a size at which a CPU picks the largest logits first
    both = rows(SamplingParams(temperature=9.0, top_p=0.95, seed=1), SamplingParams(temperature=0.3, top_p=0.9, seed=2))
    choose = greedy if how == "greedy" else cycle.sampled(both, jnp.array([5, 6], jnp.int32))
    ids, log_q = jax.jit(choose)(logits, jnp.int32(0))
    one = jax.jit(choose)
    for slot in range(3):
        expected_ids, expected_log_q = one(logits[:, slot : slot + 1], jnp.int32(slot))
        np.testing.assert_array_equal(ids[:, slot], expected_ids[:, 0])
        if expected_log_q is not None:
            np.testing.assert_allclose(log_q[:, slot], expected_log_q[:, 0], rtol=1e-5)
            first, second = np.isfinite(expected_log_q[:, 0]).sum(-1)
            assert first > 128 > second


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=1e-46),
        SamplingParams(temperature=1e6, min_p=1.0),
        SamplingParams(temperature=1.0, top_p=1e-40, repetition_penalty=1e-3),
    ],
)
def test_the_most_extreme_values_still_take_the_likeliest_token(params):
    logits = jnp.zeros((1, 300)).at[0, 7].set(1.0)
    kept = np.asarray(filter_logits(logits, SamplingRows.of([params], [0])))[0]
    assert np.flatnonzero(np.isfinite(kept) & (kept > -1e30)).tolist() == [7]

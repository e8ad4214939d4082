"""With sampling, what comes out is distributed as the verifier says: chi-square tests on a tiny vocabulary, of 200,000 draws under the
`slow` marker and of 20,000 by default.

Every row of a huge batch has a seed of its own and decodes two tokens in one cycle; the joint histogram of the two is compared with the
verifier's. Where a cycle committed one token only, the second is drawn from the verifier by the test, as the next cycle would.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from test_drafters import CONFIGS
from tiny import tiny_config, tiny_decoder

from jaxspec.config import LayerConfig
from jaxspec.decoding import accept as accept_module
from jaxspec.decoding.accept import Rule
from jaxspec.decoding.cycle import Plan, verify_widths
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import Programs
from jaxspec.decoding.sampling import SamplingRows, filter_logits
from jaxspec.decoding.state import DecodeState, Finish, Requests, pad_stop_ids
from jaxspec.drafters.build import build_drafter
from jaxspec.layers.cache import KVCache

V, VD, K, ROWS = 9, 6, 3, 20_000
PROMPT = [3, 1, 4, 1, 5]
CONFIG = tiny_config(vocab_size=V)
DECODER = tiny_decoder(CONFIG)
SETTINGS = {
    "warm": SamplingParams(temperature=0.7),
    "hot top-p": SamplingParams(temperature=1.5, top_p=0.8),
    "top-k min-p": SamplingParams(temperature=1.0, top_k=5, min_p=0.05),
}


def drafter_of(name: str) -> nnx.Module:
    """A random drafter of the given kind with a reduced vocabulary, for the tiny verifier; its logits are scaled up to differ from it."""
    made = CONFIGS[name]

    def fit(layer: LayerConfig) -> LayerConfig:
        wide = 2 * CONFIG.width if layer.attention.in_width else None
        return replace(layer, attention=replace(layer.attention, in_width=wide))

    layers = tuple(map(fit, made.layers))
    made = replace(
        made, vocab_size=V, draft_vocab_size=VD, width=CONFIG.width, taps=(0, 2), layers=layers, mask_token=V - 1
    )
    module = build_drafter(made, rngs=nnx.Rngs(5))
    module.vocabulary.head.weight[...] *= 30.0
    module.vocabulary.target_ids[...] = jnp.array([0, 1, 3, 4, 6, 8], jnp.int32)
    return module


@cache
def expected(setting: str) -> np.ndarray:
    """The verifier's joint distribution of the two tokens behind the prompt, float64 [V, V]."""
    sequences = jnp.array([[*PROMPT, x] for x in range(V)], jnp.int32)
    layers = [layer.attention for layer in CONFIG.layers]
    hidden, _, _ = DECODER(sequences, KVCache.empty(layers, V, len(PROMPT) + 1, jnp.float32))
    rows = SamplingRows.of([SETTINGS[setting]] * V, [0] * V)
    p = jax.nn.softmax(filter_logits(DECODER.logits(hidden)[:, -2:], rows), axis=-1)
    p = np.asarray(p, np.float64)
    return p[0, 0][:, None] * p[:, 1]


def draw(programs: Programs, setting: str, runs: int = 1) -> np.ndarray:
    """Histogram [V, V] of two tokens of runs x ROWS rows."""
    histogram = np.zeros((V, V))
    completed = np.random.default_rng(0)
    joint = expected(setting)
    for run in range(runs):
        seeds = [run * ROWS + row for row in range(ROWS)]
        anchor = np.full(ROWS, PROMPT[-1], np.int32)
        cache_, draft = programs.empty(anchor, 32)
        tokens = np.zeros((ROWS, 9), np.int32)
        tokens[:, : len(PROMPT)] = PROMPT
        cache_, draft = programs.prefill(cache_, draft, tokens, np.full(ROWS, len(PROMPT) - 1, np.int32))
        rows = SamplingRows.of([SETTINGS[setting]] * ROWS, seeds)
        requests = Requests(rows, np.full(ROWS, 99, np.int32), pad_stop_ids([()] * ROWS, 4))
        zeros = jnp.zeros(ROWS, jnp.int32)
        state = DecodeState(cache_, jnp.array(anchor), zeros, jnp.full(ROWS, Finish.RUNNING, jnp.int32), None, draft)
        _, dispatch = programs.decode(state, requests, 1)
        first, second = np.array(dispatch.records.tokens)[0, :, :2].T
        for x in range(V):
            missing = (first == x) & (second < 0)
            if missing.any():
                second[missing] = completed.choice(V, missing.sum(), p=joint[x] / joint[x].sum())
        np.add.at(histogram, (first, second), 1)
    return histogram


def p_value(histogram: np.ndarray, setting: str) -> float:
    """Of the chi-square test against the verifier; 0 where something impossible came out."""
    joint = expected(setting)
    possible = joint > 0
    if histogram[~possible].any():
        return 0.0
    counts, wanted = histogram[possible], joint[possible] * histogram.sum()
    rare = wanted < 5  # too rare for the test's approximation: pooled
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    keep = wanted > 0
    return float(stats.chisquare(counts[keep], wanted[keep] * counts.sum() / wanted[keep].sum()).pvalue)


@cache
def programs_of(name: str, sample_drafts: bool, rule: Rule, threshold: float = 0.0) -> Programs:
    """Compiled once for all settings."""
    plan = Plan(
        drafts=K,
        sample_drafts=sample_drafts,
        rule=rule,
        confidence_threshold=threshold,
        widths=tuple(verify_widths(K, threshold > 0)),
    )
    return Programs(CONFIG, DECODER, drafter_of(name), plan)


CASES = [
    ("eagle3", True, Rule.STANDARD, 0.0),
    ("eagle3", False, Rule.STANDARD, 0.0),
    ("peagle", True, Rule.STANDARD, 0.0),
    ("peagle", False, Rule.STANDARD, 0.0),
    ("dflash", True, Rule.STANDARD, 0.0),
    ("dflash", False, Rule.STANDARD, 0.0),
    ("dspark", True, Rule.STANDARD, 0.0),
    ("dspark", False, Rule.STANDARD, 0.0),
    ("dspark", True, Rule.STANDARD, 0.5),  # confidence cuts
    ("dspark", True, Rule.BLOCK, 0.0),
    ("dflash", False, Rule.BLOCK, 0.0),
]


@pytest.mark.parametrize("setting", ["hot top-p"])
@pytest.mark.parametrize(("name", "sample_drafts", "rule", "threshold"), CASES)
def test_output_has_the_verifiers_distribution(name, sample_drafts, rule, threshold, setting):
    assert p_value(draw(programs_of(name, sample_drafts, rule, threshold), setting), setting) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "sample_drafts", "rule", "threshold"), CASES)
def test_output_has_the_verifiers_distribution_in_200_000_draws(name, sample_drafts, rule, threshold, setting):
    assert p_value(draw(programs_of(name, sample_drafts, rule, threshold), setting, 10), setting) > 1e-4


def test_a_broken_acceptance_rule_fails(monkeypatch):
    def careless(p, drafts, u):
        accepted = accept_module._leading(u < p.probability(drafts.tokens), drafts.kept)
        return accepted, jnp.ones(accepted.shape, jnp.float32)

    monkeypatch.setattr(accept_module, "_judge_each", careless)
    programs = Programs(CONFIG, DECODER, drafter_of("dflash"), Plan(drafts=K, sample_drafts=True, widths=(K,)))
    assert p_value(draw(programs, "warm"), "warm") < 1e-12

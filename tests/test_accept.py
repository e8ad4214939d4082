"""The acceptance rules by themselves, on distributions that are written down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import QUICK_COMPILE

from jaxspec.decoding import support
from jaxspec.decoding.accept import Drafts, Rule, Verdict, accept
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.sampling import SamplingRows, filter_logits

V, K, ROWS = 12, 3, 20_000
rng = np.random.default_rng(0)
P, Q = rng.normal(0, 1.5, (K + 1, V)).astype(np.float32), rng.normal(0, 1.5, (K, V)).astype(np.float32)
judge = jax.jit(accept, static_argnums=4, compiler_options=QUICK_COMPILE)


def rows_of(params: SamplingParams) -> SamplingRows:
    return SamplingRows.of([params] * ROWS, range(ROWS))


def distributions(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Softmax of what temperature, top-k and top-p leave, float64 [T, V]."""
    left = filter_logits(jnp.array(logits), SamplingRows.of([params] * len(logits), [0] * len(logits)))
    return np.asarray(jax.nn.softmax(left, axis=-1), np.float64)


def run(params: SamplingParams, rule: Rule, q: np.ndarray | None, kept: int = K) -> tuple[np.ndarray, Verdict]:
    """Drafts [ROWS, K] drawn from q [K, V] (None: the likeliest of Q), and the verdict on them."""
    draws = np.random.default_rng(1)
    if q is None:
        tokens = np.tile(Q.argmax(-1), (ROWS, 1))
    else:
        tokens = np.stack([draws.choice(V, ROWS, p=each) for each in q / q.sum(-1, keepdims=True)], axis=1)
    tokens = tokens.astype(np.int32)
    with np.errstate(divide="ignore"):
        log_q = None if q is None else np.broadcast_to(np.log(q).astype(np.float32), (ROWS, K, V))
    drafts = Drafts(tokens, tokens, log_q, None, np.full(ROWS, kept, np.int32))
    logits = np.broadcast_to(P, (ROWS, K + 1, V))
    return tokens, judge(logits, drafts, rows_of(params), np.full(ROWS, 9, np.int32), rule)


def test_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """At each slot, given that those before were accepted, with probability sum min(p, q) at the row's temperature (FAULTS 6)."""
    params = SamplingParams(temperature=0.5)
    p, q = distributions(P, params), distributions(Q, params)
    _, verdict = run(params, Rule.STANDARD, q)
    accepted = np.asarray(verdict.accepted)
    for slot in range(K):
        tried = (accepted >= slot).sum()
        wanted = np.minimum(p[slot], q[slot]).sum()
        rate = (accepted > slot).sum() / tried
        assert abs(rate - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / tried)


def test_block_verification_accepts_no_less():
    params = SamplingParams(temperature=0.5)
    q = distributions(Q, params)
    means = {rule: np.asarray(run(params, rule, q)[1].accepted).mean() for rule in (Rule.STANDARD, Rule.BLOCK)}
    assert means[Rule.BLOCK] > means[Rule.STANDARD] - 0.01


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
@pytest.mark.parametrize("drafted", ["filtered alike", "unfiltered", "point masses"])
def test_nothing_outside_the_nucleus_comes_out(rule, drafted):
    """Neither as a draft, nor as its replacement, nor as the bonus token (FAULTS 8)."""
    params = SamplingParams(temperature=1.0, top_p=0.5)
    p = distributions(P, params)
    assert ((p > 0).sum(-1) < V / 2).all()
    q = {
        "filtered alike": distributions(Q, params),
        "unfiltered": distributions(Q, SamplingParams(temperature=1.0)),
        "point masses": None,
    }[drafted]
    tokens, verdict = run(params, rule, q)
    accepted, token = np.asarray(verdict.accepted), np.asarray(verdict.token)
    assert (p[accepted, token] > 0).all()
    for slot in range(K):
        assert (p[slot, tokens[accepted > slot, slot]] > 0).all()
    assert {int(each) for each in accepted} >= {0} and len(np.unique(token)) > 1


def test_of_cut_drafts_none_is_accepted():
    params = SamplingParams(temperature=0.5)
    for kept in range(K):
        _, verdict = run(params, Rule.STANDARD, distributions(Q, params), kept)
        assert set(np.asarray(verdict.accepted).tolist()) == set(range(kept + 1))


@pytest.mark.parametrize(("rates", "wanted"), [((1.0, 1.0, 0.0), 2), ((1.0, 1.0, 1.0), 3), ((0.0, 1.0, 1.0), 0)])
def test_synthetic_rates_decide_alone(rates, wanted):
    params = SamplingParams(temperature=0.0)
    drafts = Drafts(*[np.zeros((ROWS, K), np.int32)] * 2, None, None, np.full(ROWS, K, np.int32))
    arguments = (drafts, rows_of(params), np.full(ROWS, 9, np.int32), Rule.SYNTHETIC, jnp.array(rates))
    verdict = judge(np.broadcast_to(P, (ROWS, K + 1, V)), *arguments)
    assert (np.asarray(verdict.accepted) == wanted).all()
    assert (np.asarray(verdict.token) == P[wanted].argmax()).all()


def test_synthetic_rates_are_conditional():
    drafts = Drafts(*[np.zeros((ROWS, K), np.int32)] * 2, None, None, np.full(ROWS, K, np.int32))
    arguments = (drafts, rows_of(SamplingParams()), np.full(ROWS, 9, np.int32), Rule.SYNTHETIC)
    verdict = judge(np.broadcast_to(P, (ROWS, K + 1, V)), *arguments, jnp.array([0.8, 0.5, 0.5]))
    for slot, wanted in enumerate((0.8, 0.4, 0.2)):
        assert abs((np.asarray(verdict.accepted) > slot).mean() - wanted) < 0.015


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_slots_that_are_never_searched_decide_nothing(rule, monkeypatch):
    """Flat distributions over a vocabulary of which a CPU lists a part: a search of every slot gives the same verdicts."""
    size, batch = 2096, 64
    draws = np.random.default_rng(2)
    logits = draws.normal(0, 1, (batch, K + 1, size)).astype(np.float32)
    tokens = np.argsort(logits[:, :K], axis=-1)[..., -1 - draws.integers(0, 3)].astype(np.int32)
    log_q = np.full((batch, K, size), -40.0, np.float32)  # likelier to be accepted than rejected
    np.put_along_axis(log_q, tokens[..., None], draws.uniform(-7, -3, (batch, K, 1)).astype(np.float32), axis=-1)
    drafts = Drafts(tokens, tokens, log_q, None, np.full(batch, K, np.int32))
    rows = SamplingRows.of([SamplingParams(temperature=1.0, top_p=0.9)] * batch, range(batch))
    arguments = (logits, drafts, rows, np.full(batch, 9, np.int32))

    def run() -> Verdict:
        return jax.jit(lambda *arguments: accept(*arguments, rule), compiler_options=QUICK_COMPILE)(*arguments)

    verdict = run()
    assert len(np.unique(verdict.accepted)) > 2
    monkeypatch.setattr(support, "pick_then_search", lambda start, wanted: support.search(start))
    everywhere = run()
    np.testing.assert_array_equal(verdict.accepted, everywhere.accepted)
    np.testing.assert_array_equal(verdict.token, everywhere.token)

"""The draft-then-verify cycle: lossless whatever the drafter does."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_drafters import CONFIGS
from tiny import tiny_config, tiny_decoder

from jaxspec.config import LayerConfig
from jaxspec.decoding import batch
from jaxspec.decoding.cycle import Plan, verify_widths
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.profile import measure_steps_per_s
from jaxspec.decoding.result import Result
from jaxspec.drafters.build import build_drafter

VERIFIER = tiny_config()
DECODER = tiny_decoder(VERIFIER)
V = VERIFIER.vocab_size
rng = np.random.default_rng(0)
PROMPTS = [[int(t) for t in rng.integers(0, V, n)] for n in (1, 2, 5, 17, 30, 40, 9, 3)]
K = 5


def real_drafter(name: str) -> nnx.Module:
    """A random drafter of the given kind that fits the verifier."""
    made = CONFIGS[name]
    wide = 2 * VERIFIER.width

    def fit(layer: LayerConfig) -> LayerConfig:
        return replace(layer, attention=replace(layer.attention, in_width=wide if layer.attention.in_width else None))

    made = replace(
        made,
        vocab_size=V,
        draft_vocab_size=60,
        width=VERIFIER.width,
        taps=(0, 2),
        layers=tuple(map(fit, made.layers)),
    )
    module = build_drafter(made, rngs=nnx.Rngs(3))
    module.vocabulary.target_ids[...] = jnp.asarray(np.sort(rng.choice(V, 60, replace=False)), jnp.int32)
    return module


def engine_with(drafter: nnx.Module, **plan: object) -> Engine:
    made = Plan(**{"drafts": K, "widths": (K,), **plan})
    return Engine(VERIFIER, DECODER, drafter, made)


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(VERIFIER, DECODER)


GREEDY = SamplingParams(max_new_tokens=64)
SAMPLED = [SamplingParams(max_new_tokens=30, temperature=1.0, top_k=40, top_p=0.9, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["eagle3", "peagle", "dflash", "dspark", "dspark not from anchor"])
def drafting(request: pytest.FixtureRequest) -> nnx.Module:
    return real_drafter(request.param)


def test_greedy_output_equals_plain_decoding(plain, drafting):
    assert tokens_of(engine_with(drafting).generate(PROMPTS, GREEDY)) == tokens_of(plain.generate(PROMPTS, GREEDY))


def test_sampled_rows_equal_their_solo_runs_and_reruns(drafting):
    engine = engine_with(drafting, sample_drafts=True)
    together = tokens_of(engine.generate(PROMPTS, SAMPLED))
    assert together == tokens_of(engine.generate(PROMPTS, SAMPLED))
    for at in (0, 4, 7):
        assert tokens_of(engine.generate([PROMPTS[at]], SAMPLED[at])) == [together[at]]
    other = [replace(params, seed=99 + params.seed) for params in SAMPLED]
    assert tokens_of(engine.generate(PROMPTS, other)) != together


def test_logprobs_equal_plain_decodings(plain, drafting):
    params = [
        replace(GREEDY, max_new_tokens=20, logprobs=3),
        replace(SAMPLED[0], logprobs=0),
        replace(GREEDY, max_new_tokens=9),
    ]
    for got, want in zip(
        engine_with(drafting).generate(PROMPTS[2:5], params), plain.generate(PROMPTS[2:5], params), strict=True
    ):
        if want.logprobs is None:
            assert got.logprobs is None
            continue
        if got.token_ids != want.token_ids:  # sampled: speculation draws other tokens of the same distribution
            assert len(got.logprobs) == len(got.token_ids)
            continue
        assert [one.token_id for one in got.logprobs] == list(got.token_ids)
        np.testing.assert_allclose(
            [one.logprob for one in got.logprobs], [one.logprob for one in want.logprobs], atol=1e-4
        )
        for one, other in zip(got.logprobs, want.logprobs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert not one.top or one.top[0][1] >= one.logprob - 1e-6


def test_logit_bias_acts_inside_a_block(plain, drafting):
    banned = Engine.generate(plain, [PROMPTS[3]], GREEDY)[0].token_ids[2]
    params = replace(GREEDY, logit_bias={banned: -100.0, 5: 3.0})
    (want,), (got,) = plain.generate([PROMPTS[3]], params), engine_with(drafting).generate([PROMPTS[3]], params)
    assert got.token_ids == want.token_ids
    assert banned not in got.token_ids


def test_past_the_drafters_length_output_is_right_and_a_warning_says_so(plain):
    drafter = real_drafter("dflash")
    drafter.config = replace(drafter.config, max_positions=32)
    with pytest.warns(UserWarning, match="pass the 32 that the drafter was made for"):
        got = engine_with(drafter).generate([PROMPTS[5]], GREEDY)
    assert tokens_of(got) == tokens_of(plain.generate([PROMPTS[5]], GREEDY))


@pytest.mark.parametrize("plan", [{"confidence_threshold": 0.5}, {"steps_per_s": tuple(1 / n for n in range(20, 68))}])
def test_cut_drafts_shrink_verification_and_leave_output_unchanged(plain, plan):
    drafter = real_drafter("dspark")
    engine = engine_with(drafter, widths=tuple(verify_widths(K, True)), **plan)
    results = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(results) == tokens_of(plain.generate(PROMPTS, GREEDY))
    verified = {cycle.verified for result in results for cycle in result.cycles}
    assert min(verified) < K
    for result in results:
        for cycle in result.cycles:
            if "confidence_threshold" in plan:
                low = [at for at, confidence in enumerate(cycle.confidence) if confidence < 0.5]
                assert cycle.verified == (low[0] if low else K)
            assert cycle.accepted <= cycle.verified


def test_the_cost_curve_covers_every_pass_of_the_largest_batch():
    curve = measure_steps_per_s(VERIFIER, DECODER, real_drafter("dspark"), K, verify_widths(K, True), 2)
    assert len(curve) == 2 * (K + 1) and min(curve) > 0


def test_prompts_prefilled_in_several_calls_draft_the_same(drafting, monkeypatch):
    def drafts(prompts: list[list[int]]) -> list[list[tuple[int, ...]]]:
        results = engine_with(drafting).generate(prompts, replace(GREEDY, max_new_tokens=12))
        return [[cycle.draft for cycle in result.cycles] for result in results]

    whole = drafts(PROMPTS)
    assert [drafts([prompt])[0] for prompt in PROMPTS[3:6]] == whole[3:6]
    monkeypatch.setattr(batch, "MAX_PREFILL", 16)
    assert drafts(PROMPTS) == whole

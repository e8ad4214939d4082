"""`python -m jaxspec.evaluate`: its figures, its checks, what the doctor finds, and what it refuses."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_drafters
from flax import nnx
from jitted import quick_programs
from tiny import CHAT_TEMPLATE, WholeSequence, byte_tokenizer, write_model

from jaxspec.cli import BAD_INPUT, FAILED, run
from jaxspec.decoding import accept as accept_module
from jaxspec.decoding import cycle as cycle_module
from jaxspec.decoding.accept import Verdict
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.result import Cycle, Result
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.drafters.base import Choose, Context, Proposal
from jaxspec.drafters.build import build_drafter
from jaxspec.errors import InputError
from jaxspec.evaluate import NAME, main
from jaxspec.evaluation.distribution import check_drafters, check_draws, chi_square
from jaxspec.evaluation.doctor import (
    Subject,
    Trial,
    by_position,
    diagnose,
    expressible,
    judge,
    other_prompts,
    with_shuffled_weights,
    with_taps,
)
from jaxspec.evaluation.lossless import Judge
from jaxspec.evaluation.measure import Acceptance, measure
from jaxspec.evaluation.models import Models, Run, load_models, make_runs
from jaxspec.evaluation.prompt_sets import read_prompts, spread
from jaxspec.evaluation.report import losses
from jaxspec.evaluation.scripted import Scripted, oracle_table
from jaxspec.layers.cache import KVCache
from jaxspec.tokenizer import Tokenizer

K = 3
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [1, 2, 3, 4]]
TOKENS = 3 * (K + 1)
GREEDY = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs(), mock.patch.multiple("jaxspec.evaluation.split", ROUNDS=1, ROUND_S=0.01):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A verifier, two drafters that fit, one that doesn't, and prompts."""
    made = tmp_path_factory.mktemp("evaluate")
    write_model(made / "model")
    tiny_drafters.write(made / "flash", tiny_drafters.block("dflash"), "z-lab")
    tiny_drafters.write(made / "eagle", tiny_drafters.eagle("eagle3", **tiny_drafters.REDUCED), "speculators")
    other = tiny_drafters.eagle("eagle3", vocab_size=300, draft_vocab_size=300)
    tiny_drafters.write(made / "stranger", other, "speculators")
    (made / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt_ids": ids}) for ids in PROMPTS))
    return made


@pytest.fixture(scope="module")
def models(folder) -> Models:
    return load_models(folder / "model", [str(folder / "flash")], SpeculativeConfig(), None)


@pytest.fixture(scope="module")
def plain(models) -> list[Result]:
    """Plain decoding's, one token longer than what the tests compare."""
    params = replace(GREEDY, max_new_tokens=TOKENS + 1)
    return models.engine(max_batch_size=4).generate(PROMPTS, params)


@pytest.fixture(scope="module")
def answers(plain) -> list[list[int]]:
    return [list(result.token_ids) for result in plain]


def evaluate(folder: Path, *argv: str, prompts: bool = True) -> int:
    given = ["--prompt-file", str(folder / "prompts.jsonl")] if prompts else []
    fixed = ["--max-new-tokens", str(TOKENS), "--ignore-eos", "--no-chat"]
    return run(NAME, main, ["--model", str(folder / "model"), *given, *fixed, *argv])


def cycles(*accepted: int, position: int = 0) -> list[Cycle]:
    return [
        Cycle(at, position, 0, (0,) * K, None, K, number, (0,) * (number + 1)) for at, number in enumerate(accepted)
    ]


@pytest.mark.parametrize(
    ("accepted", "length", "rates", "histogram"),
    [
        ((0, 0), 1.0, (0.0, 0.0, 0.0), (2, 0, 0, 0)),  # FAULTS 28: the bonus token is no accepted draft
        ((3, 3), 4.0, (1.0, 1.0, 1.0), (0, 0, 0, 2)),
        ((0, 1, 3, 1), 2.25, (0.75, 0.25, 0.25), (1, 2, 0, 1)),
    ],
)
def test_acceptance_counts_every_cycle(accepted, length, rates, histogram):
    found = Acceptance.of("dflash", K, cycles(*accepted))
    assert found.totals.acceptance_length == length
    assert found.totals.acceptance_per_position == rates
    assert found.histogram == histogram


def test_oracle_drafts_are_all_accepted_in_a_measurement(models, answers):
    sequence = [*PROMPTS[1], *answers[1]]
    drafter = Scripted(models.config, oracle_table([sequence], (1, len(sequence), K)))
    engine = models.engine(drafter, Plan(drafts=K, widths=(K,)), max_batch_size=1)
    (oracle,) = measure([Run("oracle", "oracle", drafter, engine)], [PROMPTS[1]], GREEDY, 1, lambda message: None)
    assert oracle.acceptance.totals.acceptance_per_position == (1.0,) * K
    assert oracle.acceptance.totals.acceptance_length == K + 1
    assert oracle.acceptance.histogram == (0, 0, 0, TOKENS // (K + 1))
    assert list(oracle.results[0].token_ids) == answers[1][:TOKENS]
    assert oracle.tokens == TOKENS and oracle.decode_s > 0 and oracle.compile_s > 0
    assert oracle.split.cycle_ms > 0 and oracle.split.length == len(PROMPTS[1]) + TOKENS // 2
    slow, fast = replace(oracle, decode_s=2 * oracle.decode_s), replace(oracle, decode_s=oracle.decode_s / 2)
    assert losses([oracle, fast]) == []
    (line,) = losses([oracle, fast, slow])
    assert "0.50 times" in line and "slower" in line


def test_measuring_prints_tables_and_writes_json_plot_and_trace(folder, tmp_path, capsys):
    files = {flag: tmp_path / f"out.{flag}" for flag in ("json", "png", "jsonl")}
    argv = ["--drafter", str(folder / "flash"), "--num-speculative-tokens", "3"]
    argv += ["--limit", "2", "--json", str(files["json"]), "--plot", str(files["png"]), "--trace", str(files["jsonl"])]
    assert evaluate(folder, *argv) == 0
    out, err = capsys.readouterr()
    found = json.loads(files["json"].read_text())
    names = ["plain", "flash K=3"]
    assert [one["name"] for one in found["runs"]] == names
    assert all(name in out for name in names) and "acceptance per position" in out
    assert found["prompts"] == 2 and found["dtype"] == "float32" and found["peak_memory"]["host_bytes"] > 0
    assert found["runs"][0]["speculative"] is None and found["runs"][0]["ratio"] == 1
    assert found["runs"][0]["split"]["draft_ms"] == 0 < found["runs"][0]["split"]["verify_ms"]
    for one in found["runs"]:
        assert one["tokens"] == 2 * TOKENS
        assert one["ratio"] == pytest.approx(one["tokens_per_s"] / found["runs"][0]["tokens_per_s"])
        assert (f"{one['name']} is slower" in err) == (one["ratio"] < 1)
        drafting = one["speculative"]
        if drafting is not None:
            drafts = drafting["num_speculative_tokens"]
            assert f"K={drafts}" in one["name"] and len(drafting["acceptance_per_position"]) == drafts
            assert sum(drafting["histogram"]) == drafting["cycles"]
            assert drafting["acceptance_length"] == pytest.approx(1 + drafting["accepted"] / drafting["cycles"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert {line["run"] for line in lines} == set(names[1:])
    assert len(lines) == sum(one["speculative"]["cycles"] for one in found["runs"][1:])
    fields = ["run", "row", "cycle", "position", "anchor", "draft", "confidence", "verified", "accepted", "bonus"]
    assert list(lines[0]) == fields


def test_lossless_drafting_passes(folder, capsys):
    assert evaluate(folder, "--check-lossless", "--drafter", str(folder / "flash")) == 0
    out, err = capsys.readouterr()
    assert "sampled output was not checked" in out and err == ""
    assert out.splitlines()[-1] == "lossless: 4 runs, 144 tokens equal plain decoding's"


@pytest.mark.slow
def test_lossless_sampling_passes(folder, capsys):
    assert evaluate(folder, "--check-lossless", "--drafter", str(folder / "flash"), "--draws", "4000") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith(", 3 sampled distributions match") and err == ""
    assert "flash K=5, drawn drafts" in out and "flash K=5, greedy drafts" in out


def test_lossless_drafting_passes_in_bfloat16(folder, capsys):
    assert evaluate(folder, "--check-lossless", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("lossless: 3 runs, 108 tokens equal plain decoding's")


def accept_everything(logits, drafts, rows, position, rule, synthetic_rates=None):
    return Verdict(drafts.kept, jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_acceptance_rule_is_caught(folder, capsys, monkeypatch, dtype):
    monkeypatch.setattr(cycle_module, "accept", accept_everything)
    assert evaluate(folder, "--check-lossless", "--dtype", dtype, "--output", "json") == FAILED
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "failed: junk drafts K=5 is not lossless: prompt 1, token 1" in err
    found = json.loads(out)["lossless"]
    assert not found["passed"]
    assert {one["name"]: one["passed"] for one in found["greedy"]}["junk drafts K=5"] is False


def test_a_sampler_that_takes_every_draft_fails_the_chi_square_test(models, answers, monkeypatch):
    sequence = [*PROMPTS[0], *answers[0]]
    rows = 64
    drafter = Scripted(models.config, oracle_table([sequence] * rows, (rows, len(sequence), K)))
    params = SamplingParams(temperature=1.0, top_p=0.9)
    verifier = Judge(models.verifier.module)
    passed = []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(
                accept_module, "_judge_each", lambda p, drafts, *_: (drafts.kept, jnp.ones(drafts.kept.shape))
            )
        engine = models.engine(drafter, Plan(drafts=K, widths=(K,)), max_batch_size=rows)
        passed.append(check_draws("oracle", engine, verifier, PROMPTS[0], params, 128).passed)
    assert passed == [True, False]


def test_draws_that_can_test_nothing_are_refused(models):
    """A test of no cells holds whatever came out."""
    flat, verifier = SamplingParams(temperature=100.0), Judge(models.verifier.module)
    with pytest.raises(InputError, match="--draws 8 is too few to test anything"):
        check_draws("any", models.engine(None, None, max_batch_size=8), verifier, PROMPTS[0], flat, 8)
    longest = [1] * (models.config.max_positions - 1)
    with pytest.raises(InputError, match="two more do not fit"):
        check_drafters(models, [], longest, flat, 8, lambda line: None)


def test_chi_square_pools_what_is_rare_and_sees_what_is_impossible():
    p = np.array([0.5, 0.3, 0.17, 0.02, 0.01, 0.0])
    assert chi_square(Counter({0: 50, 1: 30, 2: 17, 3: 2, 4: 1}), p) == (pytest.approx(0.0, abs=1e-9), 2, True)
    statistic, cells, possible = chi_square(Counter({0: 30, 1: 50, 2: 20}), p)
    assert (cells, possible) == (2, True)
    assert statistic == pytest.approx(20**2 / 50 + 20**2 / 30)
    assert chi_square(Counter({0: 99, 5: 1}), p)[2] is False


def test_the_judge_computes_the_verifiers_logits(models, answers):
    sequence = [*PROMPTS[1], *answers[1]]
    logits = WholeSequence(models.verifier.module).logits(sequence)
    gaps, allowed = Judge(models.verifier.module).gaps(sequence, [(3, 5)] * len(sequence))
    np.testing.assert_allclose(gaps, logits.max(axis=1)[:, None] - logits[:, [3, 5]], atol=1e-4)
    assert not allowed.any()  # float32
    half = load_models(models.verifier.path, [], SpeculativeConfig(), "bfloat16").verifier.module
    _, allowed = Judge(half).gaps(sequence, [(3, 5)] * len(sequence))
    np.testing.assert_allclose(allowed, 2.0**-8 * 2 * np.abs(logits).max(axis=1), rtol=0.1)


class TapSensitive(Scripted):
    """Drafts its table where it is fed from tap 1, and token 0 elsewhere."""

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        proposal, cache = super().draft(context, cache, drafts, choose)
        right = self.config.taps == (1,)
        return proposal if right else replace(proposal, tokens=0 * proposal.tokens, ids=0 * proposal.ids), cache


def test_the_doctor_finds_taps_that_are_off_by_one(models, answers):
    order = sorted(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
    sequences = [[*PROMPTS[row], *answers[row]] for row in order]
    drafter = TapSensitive(models.config, oracle_table(sequences, (4, 32, K)))
    subject = Subject(
        models=models,
        drafter=drafter,
        plan=Plan(drafts=K, widths=(K,)),
        items=[{"prompt_ids": prompt} for prompt in PROMPTS],
        chat=False,
        system=None,
        params=GREEDY,
        batch_size=4,
        reload=("float32 again", lambda: (models, drafter)),
    )
    found = diagnose(subject, lambda message: None)
    trials = {trial.name: trial for trial in found.trials}
    assert list(trials) == [
        "as given",
        "tap ids -1",
        "tap ids +1",
        "chat template on",
        "dtype float32 again",
        "weights shuffled",
    ]
    assert trials["as given"].accepted < 1 and trials["tap ids +1"].accepted == K
    assert "outside" in trials["tap ids -1"].note and trials["chat template on"].note == "the same prompts"
    assert trials["dtype float32 again"].accepted == trials["as given"].accepted
    assert "off by one: [1] fits, not [0]" in found.verdict


def test_the_doctor_tries_every_form_of_prompt_that_the_template_has(models):
    fast = byte_tokenizer()
    fast.chat_template = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    tokenizer = Tokenizer(fast)
    assert tokenizer.has_thinking_mode and not Tokenizer(byte_tokenizer()).has_thinking_mode
    drafter = Scripted(models.config, np.zeros((1, 8, K), np.int32))
    items = [{"prompt": "Hi"}]
    subject = Subject(replace(models, tokenizer=tokenizer), drafter, Plan(), items, True, None, GREEDY, 1, None)
    forms = dict(other_prompts(subject))
    (chat,) = subject.prompts(True)
    assert forms == {
        "chat template off": [tokenizer.encode("Hi")],
        "thinking mode on": [chat],
        "thinking mode off": [[*chat, *tokenizer.encode("!")]],
    }


def test_warming_up_leaves_nothing_to_compile(models):
    engine = models.engine(max_batch_size=1)
    prompts = [[1], [2, 3], list(range(40)), list(range(41))]
    engine.warm_up(prompts, GREEDY)
    compiled = len(engine.compiled_programs)
    assert [result.timing.compile_s for result in engine.generate(prompts, GREEDY)] == [0.0] * 4
    assert len(engine.compiled_programs) == compiled


def test_the_doctor_tells_an_untrained_drafter(folder, capsys):
    assert evaluate(folder, "--doctor", "--drafter", str(folder / "eagle"), "--output", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["doctor"]
    assert "no better than with shuffled weights" in found["verdict"]
    assert 0 < found["vocabulary"] < 1 and found["max_positions"] == 512
    assert [one["name"] for one in found["positions"]] == ["0-255"]


def test_the_doctors_verdicts():
    config = tiny_drafters.block("dflash")
    poor, good, shuffled = (
        Trial.of(name, name, cycles(*(counts * 40)))
        for name, counts in (("as given", (0, 1)), ("dtype", (2, 3)), ("weights shuffled", (0,)))
    )
    assert judge([poor, good, shuffled], (), config, 1.0).startswith("dtype (acceptance length 1.50 -> 3.50)")
    assert "shuffled" in judge([shuffled, shuffled, shuffled], (), config, 1.0)
    assert "holds only 40%" in judge([poor, poor, shuffled], (), config, 0.4)
    falling = by_position([*cycles(*[2, 3] * 40, position=255), *cycles(*[0, 1] * 40, position=256)])
    assert [one.name for one in falling] == ["0-255", "256-511"]
    assert "from 3.50 at 0-255 to 1.50 at 256-511" in judge([poor, poor, shuffled], falling, config, 1.0)
    assert "nothing tried" in judge([poor, poor, shuffled], falling[:1], config, 1.0)


def test_a_trials_drafter_differs_in_one_thing(plain):
    drafter = build_drafter(tiny_drafters.block("dflash", **tiny_drafters.REDUCED), rngs=nnx.Rngs(0))
    shifted = with_taps(drafter, (1, 3))
    assert shifted.config.taps == (1, 3) and drafter.config.taps == (0, 2)
    assert shifted.fc.weight[...] is drafter.fc.weight[...]
    shuffled = with_shuffled_weights(drafter)
    before, after = np.asarray(drafter.fc.weight[...]), np.asarray(shuffled.fc.weight[...])
    assert (before != after).any()
    np.testing.assert_array_equal(np.sort(before, axis=None), np.sort(after, axis=None))
    assert shuffled.vocabulary.head.weight[...] is drafter.vocabulary.head.weight[...]
    drafter.vocabulary.target_ids[...] = jnp.arange(96, dtype=jnp.int32)
    assert expressible(drafter, [replace(plain[0], token_ids=(1, 95, 96, 200))]) == 0.5


def test_prompts_of_the_common_sets_are_read(tmp_path):
    lines = [
        {"question": "How many?", "answer": "7"},
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."},
        {"question_id": 81, "category": "writing", "turns": ["First", "Second"]},
        {"messages": [{"role": "user", "content": "Hi"}], "id": 3},
        {"prompt_ids": [1, 2]},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    items = read_prompts(file, "--set")
    assert items == [
        {"prompt": "How many?"},
        {"prompt": "def f():"},
        {"prompt": "First"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt_ids": [1, 2]},
    ]
    assert spread(items, 2) == [items[0], items[2]]
    assert spread(items, 9) == spread(items, None) == items


def test_runs_are_named_apart_and_share_the_verifier(folder):
    (folder / "copies").mkdir(exist_ok=True)
    twin = tiny_drafters.write(folder / "copies" / "flash", tiny_drafters.block("dflash"), "z-lab")
    given = [str(folder / "flash"), str(twin)]
    models = load_models(folder / "model", given, SpeculativeConfig(max_model_len=64), None)
    runs = make_runs(models, SpeculativeConfig(), [2, 4], 1)
    assert [one.name for one in runs] == ["plain", *(f"{name} K={k}" for name in given for k in (2, 4))]
    assert {one.engine.config.max_positions for one in runs} == {64}


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--set", "gsm9k", "--data-dir", "{}"], "--set gsm9k: no such set in --data-dir {}; sets there: prompts"),
        (["--set", "x", "--data-dir", "{}/nowhere"], "--data-dir {}/nowhere: no such directory"),
        ([], "give --prompt-file or --set"),
        (["--prompt-file", "{}/nowhere.jsonl"], "--prompt-file {}/nowhere.jsonl: No such file"),
        (["--set", "prompts", "--data-dir", "{}", "--limit", "0"], "--limit is 0; it must be at least 1"),
    ],
)
def test_bad_prompts_are_one_line(folder, capsys, argv, wanted):
    assert evaluate(folder, *(part.format(folder) for part in argv), prompts=False) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and wanted.format(folder) in err


SYNTHETIC = [
    "--speculative-config",
    '{{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}}',
]


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (
            ["--drafter", "{}/flash", "--num-speculative-tokens", "2,9"],
            "--drafter {}/flash: num_speculative_tokens is 9",
        ),
        (["--drafter", "{}/flash", "--num-speculative-tokens", "two"], "--num-speculative-tokens 'two'"),
        (["--drafter", "{}/flash", "--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
        (
            ["--drafter", "{}/flash", "--confidence-threshold", "0.5"],
            "confidence_threshold needs a drafter with a confidence",
        ),
        (
            ["--drafter", "{}/stranger"],
            "--drafter {0}/stranger: {0}/stranger: this drafter is for a verifier of 300 tokens",
        ),
        (
            ["--drafter", "{}/flash", "--speculative-config", '{{"revision": "main"}}'],
            "--drafter {0}/flash: {0}/flash: is local and has no revision 'main'",
        ),
        (["--num-speculative-tokens", "3"], "--num-speculative-tokens needs --drafter"),
        (["--doctor"], "--doctor needs --drafter"),
        (["--doctor", "--drafter", "none"], "--doctor needs --drafter"),
        (
            [*SYNTHETIC, "--doctor", "--drafter", "{}/flash"],
            "--doctor: rejection_sample_method synthetic accepts whatever the drafts are",
        ),
        (
            [*SYNTHETIC[:1], SYNTHETIC[1].replace("2", "NaN"), "--drafter", "{}/flash"],
            "synthetic_acceptance_length is nan",
        ),
        (["--doctor", "--check-lossless"], "not allowed with"),
        (["--draws", "5"], "--draws 5 must be at least 1, and goes with --check-lossless"),
        (["--check-lossless", "--draws", "5", "--dtype", "bfloat16"], "--draws needs --dtype float32"),
        (["--check-lossless", "--trace", "{}/t"], "--trace goes with measuring"),
        (["--plot", "{}/nowhere/a.png"], "--plot {}/nowhere/a.png: cannot be written"),
        (["--plot", "{}/a.bmp"], "must end in one of .png, .svg, .pdf"),
        (["--max-batch-size", "0"], "max_batch_size is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--kernels", "triton"], "--kernels triton needs an NVIDIA GPU, and the device here is a cpu"),
    ],
)
def test_bad_flags_are_one_line(folder, capsys, argv, wanted):
    assert evaluate(folder, *(part.format(folder) for part in argv)) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and wanted.format(folder) in err

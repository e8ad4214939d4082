"""`--profile-dir`: a trace of what runs behind the warm-up, whose operations say which part of the cycle they belong to."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_drafters
from flax import nnx
from jitted import quick_programs
from tiny import write_model

from jaxspec import evaluate, generate
from jaxspec.cli import BAD_INPUT, run
from jaxspec.drafters.base import Context, attention_layers, greedy
from jaxspec.drafters.build import build_drafter
from jaxspec.evaluation.split import Split
from jaxspec.layers.cache import KVCache

SCOPES = ("draft", "draft/inject", "verify", "accept", "commit")


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("profile")
    write_model(made / "model")
    tiny_drafters.write(made / "flash", tiny_drafters.block("dflash"), "z-lab")
    (made / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    return made


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """What happens, in order: programs are compiled, traces begin."""
    seen: list[str] = []
    compile_, trace = jax.stages.Lowered.compile, jax.profiler.trace
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: seen.append("compile") or compile_(*a, **k))
    monkeypatch.setattr(jax.profiler, "trace", lambda *a, **k: seen.append("trace") or trace(*a, **k))
    return seen


def scopes(profile_dir: Path) -> set[str]:
    """Those of SCOPES in the names of the operations of decoding's loop, in the one trace in there."""
    [trace] = profile_dir.rglob("*.xplane.pb")
    found = re.findall(rb"while/body/((?:draft|verify|accept|commit)(?:/inject)?)/", trace.read_bytes())
    return {scope.decode() for scope in found}


def test_generate_traces_what_runs_after_everything_is_compiled(folder, tmp_path, order, capsys):
    argv = ["--model", str(folder / "model"), "--drafter", str(folder / "flash"), "--prompt-ids", "5,6,7"]
    argv += ["--max-new-tokens", "8", "--ignore-eos", "--profile-dir", str(tmp_path / "new" / "folder")]
    assert run(generate.NAME, generate.main, [*argv, "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["timing"]["compile_s"] == 0 and len(answer["token_ids"]) == 8
    assert "compile" in order and order.index("trace") == len(order) - 1
    assert scopes(tmp_path) == set(SCOPES)
    order.clear()
    assert run(generate.NAME, generate.main, [*argv[:-1], str(tmp_path / "streamed"), "--stream"]) == 0
    assert order.index("trace") == len(order) - 1
    assert scopes(tmp_path / "streamed") == set(SCOPES)


def test_evaluate_traces_every_run_after_measuring(folder, tmp_path, order, monkeypatch, capsys):
    monkeypatch.setattr("jaxspec.evaluation.measure.measure_split", lambda *_: Split(4, 1.0, 1.0, 1.0))
    argv = ["--model", str(folder / "model"), "--drafter", str(folder / "flash")]
    argv += ["--prompt-file", str(folder / "prompts.jsonl"), "--max-new-tokens", "8", "--ignore-eos"]
    assert run(evaluate.NAME, evaluate.main, [*argv, "--profile-dir", str(tmp_path)]) == 0
    assert "flash" in capsys.readouterr().out
    assert order.index("trace") == len(order) - 1
    assert scopes(tmp_path) == set(SCOPES)
    [trace] = tmp_path.rglob("*.xplane.pb")
    assert b"plain" in trace.read_bytes() and b"flash K=5" in trace.read_bytes()


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark"])
def test_every_drafter_marks_its_injection_in_drafts_and_prefill(name):
    config = tiny_drafters.spark() if name == "dspark" else tiny_drafters.eagle(name)
    graph, state = nnx.split(nnx.eval_shape(lambda: build_drafter(config, rngs=nnx.Rngs(0))))
    rows = np.ones((1, 4), np.int32)
    context = Context(np.zeros((1, 4, config.feature_width), np.float32), rows, rows[0, :1])

    def names(method: str, *more: object) -> str:
        def call(state: nnx.State, context: Context) -> object:
            cache = KVCache.empty(attention_layers(config), 1, 32, np.float32)
            with jax.named_scope("draft"):
                return getattr(nnx.merge(graph, state), method)(context, cache, *more)

        return jax.jit(call).lower(state, context).as_text(debug_info=True)

    assert re.search("draft/inject/.*dot_general", names("draft", 3, greedy))
    assert re.search("draft/inject/.*dot_general", names("prefill"))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    source = ["--prompt-file", str(tmp_path / "none.jsonl")]
    (tmp_path / "none.jsonl").write_text('{"prompt_ids": [5]}\n')
    for module in (generate, evaluate):
        for where in ("file", "file/below"):
            argv = ["--model", "nowhere", *source, "--profile-dir", str(tmp_path / where)]
            assert run(module.NAME, module.main, argv) == BAD_INPUT
            error = capsys.readouterr().err
            assert error.startswith(f"{module.NAME}: error: --profile-dir {tmp_path / where}: cannot be written: ")
            assert error.count("\n") == 1
    argv = ["--model", "nowhere", "--drafter", "nowhere", *source, "--doctor", "--profile-dir", str(tmp_path)]
    assert run(evaluate.NAME, evaluate.main, argv) == BAD_INPUT
    assert "--profile-dir goes with measuring" in capsys.readouterr().err

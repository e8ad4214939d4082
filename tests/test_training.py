"""Runs of training: their steps, what they leave behind, and recipes that are refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import byte_tokenizer
from tiny_training import DRAFT_VOCAB, VOCAB, workspace
from trainer_run import METHODS, ROOT, assert_same_to_the_bit, checkpoint, command, prepared, process, refused, trained

import jaxspec
from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.checkpoint.safetensors import SafetensorsSource
from jaxspec.errors import InputError
from jaxspec.sharding import split
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.report import read_metrics

# A whole run of each method ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=METHODS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run of six steps."""
    directory = tmp_path_factory.mktemp(request.param)
    assert command("--config", workspace(directory, request.param)) == 0
    return directory


def test_a_run_leaves_checkpoints_logs_and_a_drafter(finished: Path):
    output = finished / "run"
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["3", "6"]
    entries = read_metrics(output)
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in entries if entry["kind"] == "validation"] == [3, 6]
    assert all(np.isfinite(entry["loss"]) for entry in entries if entry["kind"] == "train")
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")
    (events,) = (output / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content and b"validation/acceptance_per_position/1" in content
    summary = json.loads((output / "summary.json").read_text())
    assert summary["exported_step"] in (3, 6)


def test_the_finished_drafter_is_the_best_checkpoint(finished: Path):
    output = finished / "run"
    step = json.loads((output / "summary.json").read_text())["exported_step"]
    best = {
        entry["step"]: entry["acceptance_length"] for entry in read_metrics(output) if entry["kind"] == "validation"
    }
    assert best[step] == max(best.values())
    params = {name: value for name, value in checkpoint(output, step).items() if name.startswith("params")}
    stored = SafetensorsSource(output / "drafter")
    assert {entry.dtype for entry in stored.tensors.values()} == {"F32", "I64", "BOOL"}
    fc = stored.read("fc.weight")
    np.testing.assert_array_equal(fc, params["params['fc.weight']"])


def test_the_finished_drafter_generates_losslessly(finished: Path):
    verifier, drafter = finished / "verifier", finished / "run" / "drafter"
    loaded = load_drafter(drafter, verifier=load_verifier(verifier))
    assert loaded.config.draft_vocab_size == DRAFT_VOCAB < VOCAB
    assert loaded.format == "speculators"
    assert loaded.verifier.name == "owner/verifier"
    params = jaxspec.SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [97, 98, 99, 100]]
    plain = jaxspec.Engine.from_pretrained(verifier).generate(prompts, params)
    drafted = jaxspec.Engine.from_pretrained(verifier, str(drafter)).generate(prompts, params)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]


@pytest.mark.parametrize(
    ("method", "how", "lent"),
    [
        ("eagle3", {"format": "eagle3", "drop": ["head"]}, ("embed", "head")),
        ("peagle", {"format": "orbax", "drop": ["head"]}, ("embed", "head")),
        ("dflash", {"format": "speculators", "drop": ["head"]}, ("embed", "head")),
        ("dspark", {"format": "speculators"}, ("embed",)),
    ],
)
def test_exports_without_what_the_verifier_lends_draft_the_same(
    tmp_path: Path, method: str, how: dict[str, Any], lent: tuple[str, ...]
):
    def short(made: dict[str, Any]) -> None:
        made["optimizer"]["steps"] = 2
        made["run"]["export"] |= how

    assert command("--config", workspace(tmp_path, method, short)) == 0
    verifier = load_verifier(tmp_path / "verifier")
    small = load_drafter(tmp_path / "run" / "drafter", verifier=verifier)
    assert small.borrowed == lent
    setup = prepared(tmp_path / "recipe.yaml")
    assert setup.target_ids is not None
    head = np.asarray(verifier.module.embed.weight[...])[setup.target_ids]
    np.testing.assert_array_equal(np.asarray(small.module.vocabulary.head.weight[...]), head)


def test_a_finished_run_is_not_trained_again(finished: Path, capsys: pytest.CaptureFixture[str]):
    before = checkpoint(finished / "run", 6)
    assert "holds checkpoints up to step 6; --resume goes on" in refused(capsys, "--config", finished / "recipe.yaml")
    assert command("--config", finished / "recipe.yaml", "--resume") == 0
    assert_same_to_the_bit(checkpoint(finished / "run", 6), before)


# The step ----------------------------------------------------------------------------------------------------------------------------


def one_document_a_row(made: dict[str, Any]) -> None:
    made["data"] |= {"pack": False, "validation_share": 0}
    made["optimizer"] |= {"steps": 3, "warmup": 0, "lr": 1e-3}
    # more anchors than any answer has: nothing depends on the random choices
    made["objective"]["anchors"] = 48
    made["objective"]["down_sample_min"] = 1.0


@pytest.mark.parametrize("method", [pytest.param("eagle3", marks=pytest.mark.slow), "dspark"])
def test_accumulated_micro_batches_are_one_large_batch(tmp_path: Path, method: str):
    file = workspace(tmp_path, method, one_document_a_row)
    whole, metrics = trained(file, "data.rows=4")
    parts, in_parts = trained(file, "data.rows=1", "optimizer.accumulation=4")
    for ours, theirs in zip(in_parts, metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["acceptance_length"] == pytest.approx(theirs["acceptance_length"])
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=0, atol=5e-5, err_msg=name)


def test_frozen_parts_stay_and_trained_ones_move(tmp_path: Path):
    file = workspace(tmp_path, "dspark")
    before = prepared(file).drafter
    assert {".".join(map(str, path[:2])) for path in before.values} >= {
        "vocabulary.embed",
        "vocabulary.head",
        "markov.w1",
    }
    after, _ = trained(file)
    assert not any("vocabulary" in name for name in after)
    for name, value in after.items():
        path = name.removeprefix("params['").removesuffix("']")
        start = next(v for p, v in before.values.items() if ".".join(map(str, p)) == path)
        assert not np.array_equal(value, start), name


def test_trained_embedding_and_head_move_and_are_written(tmp_path: Path):
    file = workspace(tmp_path, "peagle")
    overrides = ("drafter.train_embed=null", "drafter.train_head=true")
    after, _ = trained(file, *overrides)
    assert {name for name in after if "vocabulary" in name} == {
        "params['vocabulary.embed.weight']",
        "params['vocabulary.head.weight']",
    }
    stored = SafetensorsSource(tmp_path / "run" / "drafter")
    step = json.loads((tmp_path / "run" / "summary.json").read_text())["exported_step"]
    wanted = checkpoint(tmp_path / "run", step)
    np.testing.assert_array_equal(stored.read("embed_tokens.weight"), wanted["params['vocabulary.embed.weight']"])
    np.testing.assert_array_equal(stored.read("lm_head.weight"), wanted["params['vocabulary.head.weight']"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(tmp_path: Path, optimizer: str):
    file = workspace(tmp_path, "dflash", lambda made: made["objective"].update(decay="none", labels="data"))
    _, metrics = trained(
        file, f"optimizer.name={optimizer}", "optimizer.steps=40", "data.validation_share=0", "optimizer.lr=0.01"
    )
    losses = [entry["loss"] for entry in metrics]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])


def test_the_draft_vocabulary_is_counted_in_what_the_recipe_names(tmp_path: Path):
    """The answers hold ids 97 to 116 and the end's 256; x stands more often in the text than each of them in the answers, y once."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"question": "x" * 40, "answer": "xy"}) + "\n")
    x, y, line = Tokenizer(byte_tokenizer()).encode("xy\n")
    assert not {x, y, line} & {*range(97, 117)}
    file, texts = workspace(tmp_path, "dflash"), f"data.vocabulary.texts={{{tmp_path / 'text.jsonl'}: 1}}"

    def found(size: int, *overrides: str) -> set[int]:
        ids = prepared(file, f"drafter.draft_vocab_size={size}", *overrides).target_ids
        assert ids is not None
        return set(ids.tolist())

    assert found(21) == {*range(97, 117), 256}
    assert found(22, texts) == {*range(97, 117), 256, x}
    assert found(2, texts) == {256, x}
    assert x not in found(2, texts, "data.vocabulary.answers=10")
    assert found(4, texts, "data.vocabulary.answers=0") == {256, x, y, line}


def test_bfloat16_steps_keep_float32_weights(tmp_path: Path):
    file = workspace(tmp_path, "dspark")
    after, metrics = trained(file, "optimizer.compute=bfloat16", "optimizer.lr=1e-4")
    assert {value.dtype for value in after.values()} == {np.dtype(np.float32)}
    exact, reference = trained(file, "optimizer.lr=1e-4")
    for ours, theirs in zip(metrics, reference, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)
    # steps smaller than bfloat16 can tell apart are not lost
    assert any(not np.array_equal(value, value.astype(jnp.bfloat16).astype(np.float32)) for value in after.values())
    assert exact.keys() == after.keys()


def test_features_from_disk_train_like_those_made_in_the_step(tmp_path: Path):
    file = workspace(tmp_path, "dflash")
    online, metrics = trained(file)
    directory = f"data.features={tmp_path / 'features'}"
    assert (
        command("--config", file, "--set", directory, "--set", "data.features_dtype=float32", "--write-features") == 0
    )
    stored, from_disk = trained(file, directory, "data.features_dtype=float32")
    for ours, theirs in zip(from_disk, metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for name, value in online.items():
        np.testing.assert_allclose(stored[name], value, rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("verifier", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_several_devices_train_like_one(tmp_path: Path, verifier: str):
    rng = np.random.default_rng(0)
    lines = [
        {"prompt_ids": rng.integers(3, 96, 5).tolist(), "token_ids": rng.integers(3, 96, rng.integers(6, 20)).tolist()}
        for _ in range(16)
    ]
    documents = tmp_path / "small.jsonl"
    documents.write_text("\n".join(json.dumps(line) for line in lines))

    def of_fixture(made: dict[str, Any]) -> None:
        made["verifier"]["model"] = str(ROOT / "tests" / "goldens" / verifier)
        made["data"] |= {"train": [str(documents)], "rows": 4, "validation_share": 0.2}
        made["drafter"]["mask_token"] = 1

    file = workspace(tmp_path, "dspark", of_fixture)
    one, metrics = trained(file)
    mesh = ["--set", "mesh.data=2", "--set", "mesh.tensor=2", "--set", f"run.output={tmp_path / 'four'}"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = process(file, *mesh, **flags).communicate()
    assert (tmp_path / "four" / "summary.json").is_file(), done
    entries = [entry for entry in read_metrics(tmp_path / "four") if entry["kind"] == "train"]
    for ours, theirs in zip(entries, metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    four = checkpoint(tmp_path / "four", 6)
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, rtol=0, atol=1e-3, err_msg=name)


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    axes, shape = ("kv_heads", "head_dim", "embed"), (6, 8, 32)
    mesh = jax.sharding.AbstractMesh((1, 4, 1), ("data", "tensor", "expert"))
    message = "mesh.tensor is 4, which does not divide the 6 kv_heads of the drafter's k; what does: 1, 2, 3, 6"
    with pytest.raises(InputError, match=message):
        split(mesh, axes, shape, "the drafter's k")
    assert split(mesh, axes, (8, 8, 32), "k").spec == jax.sharding.PartitionSpec("tensor", None, None)


# Bad input ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.block_size=40"], "drafter.block_size is 40, and no answer has as many tokens"),
        (["drafter.taps=[0, 3]"], "drafter.taps: aux layer ids [0, 3] must lie in 0..2"),
        (["drafter.taps=null"], "has no default tap layers"),
        (["drafter.mask_token=259"], "drafter.mask_token is 259"),
        (["drafter.draft_vocab_size=300"], "drafter.draft_vocab_size is 300"),
        (["drafter.heads=3", "drafter.kv_heads=2"], "drafter.heads is 3, no multiple of the 2"),
        (["drafter.train=heads"], "drafter.train is heads, but this dflash drafter has none"),
        (["drafter.full_layers=[1]", "drafter.sliding_window=8"], "drafter.full_layers has 1"),
        (["data.features=nowhere"], "data.features nowhere: has no features.json"),
        (["data.rows=3", "mesh.data=2"], "mesh: data 2 are 2 devices; there are 1"),
        (["optimizer.steps=null", "optimizer.epochs=1", "optimizer.accumulation=500"], "optimizer.accumulation is 500"),
        (["verifier.model=nowhere"], "nowhere: no such directory or file"),
        (["drafter.init_from=nowhere"], "nowhere: no such directory or file"),
        (["data.train=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["run.output=/proc/none"], "run.output /proc/none: cannot be written"),
    ],
)
def test_bad_recipes_are_one_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
):
    directory = tmp_path_factory.getbasetemp() / "bad"
    directory.mkdir(exist_ok=True)
    file = workspace(directory)
    flags = [part for override in overrides for part in ("--set", override)]
    assert message in refused(capsys, "--config", file, *flags)


def test_questions_become_answers_features_and_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [json.dumps({"question": f"What is {number}?"}) for number in range(6)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))

    def from_questions(made: dict[str, Any]) -> None:
        made["data"] |= {
            "train": [str(tmp_path / "answers.jsonl")],
            "validation_share": 0,
            "max_tokens": 64,
            "row_tokens": 64,
            "questions": [str(tmp_path / "questions.jsonl")],
            "answers": {"output": str(tmp_path / "answers.jsonl"), "max_new_tokens": 8, "rows": 2},
            "features": str(tmp_path / "features"),
        }
        made["optimizer"]["steps"] = 2

    file = workspace(tmp_path, "dflash", from_questions)
    assert command("--config", file, "--set", "data.limit=4", "--write-answers") == 0
    assert command("--config", file, "--write-answers") == 0  # the two that are left
    answered = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(one["index"] for one in answered) == list(range(6))
    assert command("--config", file, "--write-features") == 0
    assert command("--config", file) == 0
    assert "6 of 6 questions answered; 4 of them before" in capsys.readouterr().err
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()


def test_answers_need_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path)
    assert "data.questions and data.answers" in refused(capsys, "--config", file, "--write-answers")
    assert "data.features names no directory" in refused(capsys, "--config", file, "--write-features")

"""Runs of training: steps, checkpoints, resuming, validation, the finished drafter."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny import byte_tokenizer
from tiny_drafters import REDUCED, block, eagle, gemma, spark
from tiny_drafters import write as write_drafter
from tiny_training import DRAFT_VOCAB, VOCAB, workspace

import jaxspec
from jaxspec import train
from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.checkpoint.safetensors import SafetensorsSource
from jaxspec.cli import run as run_command
from jaxspec.errors import InputError
from jaxspec.sharding import split
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.batch import Batch
from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.events import EventFile, _checksum
from jaxspec.training.placement import make_mesh
from jaxspec.training.recipe import read_recipe
from jaxspec.training.report import read_metrics
from jaxspec.training.setup import Setup, set_up
from jaxspec.training.step import TrainState
from jaxspec.training.trainer import Trainer
from jaxspec.training.validation import answers, validate, walk
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.implementation import use

ROOT = Path(__file__).resolve().parent.parent
METHODS = ["eagle3", "peagle", "dflash", "dspark"]


def command(*arguments: object) -> int:
    """`python -m jaxspec.train` in this process; the exit status."""
    return run_command(train.NAME, train.main, [str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    """What the command says when it fails: one line behind those that tell what it was doing."""
    capsys.readouterr()
    assert command(*arguments) == status
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("jaxspec.train: "), lines
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def prepared(file: Path, *overrides: str) -> Setup:
    return set_up(read_recipe(file, overrides), lambda line: None)


def trainer(file: Path, *overrides: str) -> Trainer:
    return Trainer(prepared(file, *overrides), make_mesh(None), lambda line: None)


def checkpoint(output: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path."""
    found, reader = {}, ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    for item in ("params", "rest"):
        path = (output / "checkpoints" / str(step) / item).absolute()
        metadata = reader.metadata(path).item_metadata
        assert metadata is not None
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        found |= {
            f"{item}{jax.tree_util.keystr(key)}": np.asarray(leaf) for key, leaf in jax.tree.leaves_with_path(tree)
        }
    return found


def assert_same_to_the_bit(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


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


def trained(file: Path, *overrides: str) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Parameters after a run, and its training metrics."""
    output = Path(read_recipe(file, overrides).run.output)
    shutil.rmtree(output, ignore_errors=True)
    made = trainer(file, *overrides)
    outcome = made.run(resume=False)
    arrays = {name: value for name, value in checkpoint(output, outcome.step).items() if name.startswith("params")}
    return arrays, [entry for entry in read_metrics(output) if entry["kind"] == "train"]


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


# Stopping and going on ---------------------------------------------------------------------------------------------------------------


def process(file: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxspec.train", "--config", str(file), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], running: "subprocess.Popen[str]") -> None:
    """Polls until the condition holds; the process must not end before."""
    begun = time.monotonic()
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() - begun < 600
        time.sleep(0.002)


def last_step(output: Path) -> int:
    return max((entry["step"] for entry in read_metrics(output)), default=0)


def test_kill_and_sigterm_at_any_step_and_resume_change_nothing(tmp_path: Path):
    def longer(made: dict[str, Any]) -> None:
        made["optimizer"] |= {"steps": 150, "schedule": "cosine", "accumulation": 2}
        made["run"] |= {"checkpoint_every": 20, "validate_every": 60}

    file = workspace(tmp_path, "dspark", longer)
    output = tmp_path / "run"
    terminated = process(file)
    wait_for(lambda: last_step(output) >= 30, terminated)
    terminated.send_signal(signal.SIGTERM)
    out, err = terminated.communicate()
    assert terminated.returncode == 0, err
    assert "--resume goes on from there" in err and not out
    stopped = last_step(output)
    assert 30 <= stopped < 150
    assert (output / "checkpoints" / str(stopped)).is_dir()

    killed = process(file, "--resume")
    wait_for(lambda: last_step(output) >= stopped + 30, killed)
    killed.kill()
    killed.communicate()
    assert last_step(output) < 150

    assert command("--config", file, "--resume") == 0
    interrupted = checkpoint(output, 150)
    entries = {(entry["kind"], entry["step"]): entry for entry in read_metrics(output)}
    assert len(entries) == len(read_metrics(output)) == 150 + 3

    shutil.move(output, tmp_path / "interrupted")
    assert command("--config", file) == 0
    assert_same_to_the_bit(interrupted, checkpoint(output, 150))
    differing = [
        (entry["kind"], entry["step"], key, value, entries[entry["kind"], entry["step"]].get(key))
        for entry in read_metrics(output)
        for key, value in entry.items()
        if key != "tokens_per_s" and value != entries[entry["kind"], entry["step"]].get(key)
    ]
    assert not differing, (stopped, differing)


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path: Path):
    file = workspace(tmp_path, "dflash")
    whole, _ = trained(file)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "6", folder / "6.orbax-checkpoint-tmp")
    shutil.rmtree(folder / "6")
    (folder / "6.orbax-checkpoint-tmp" / "params" / "manifest.ocdbt").unlink(missing_ok=True)
    assert command("--config", file, "--resume") == 0
    again = {name: value for name, value in checkpoint(tmp_path / "run", 6).items() if name.startswith("params")}
    assert_same_to_the_bit(again, whole)


def test_the_latest_checkpoints_and_the_best_are_kept_across_processes(tmp_path: Path):
    def opened(**how: bool) -> Checkpoints:
        return Checkpoints(tmp_path, {"drafter": 1}, keep=2, keep_best=True, **how)

    state = TrainState(jnp.int32(0), {"w": jnp.ones((2, 2))}, {"m": jnp.zeros(2)})
    first = opened()
    for step, acceptance in ((10, 1.5), (20, 1.9), (30, None), (40, 1.2)):
        first.save(replace(state, step=jnp.int32(step)), {"next_index": step}, 1.9, acceptance)
    first.close()
    second = opened()
    second.save(replace(state, step=jnp.int32(50)), {"next_index": 50}, 1.9, None)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [20, 40, 50]
    assert (second.best_step(), second.latest) == (20, 50)
    found = second.restore(state)
    assert (int(found.state.step), found.data, found.best) == (50, {"next_index": 50}, 1.9)
    assert opened(read_only=True).best_step() == 20
    second.save(replace(state, step=jnp.int32(60)), {"next_index": 60}, 2.5, 2.5)
    assert opened(read_only=True).best_step() == 60


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path, "dflash")
    assert command("--config", file) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6" / "rest")
    message = refused(capsys, "--config", file, "--resume")
    assert f"{tmp_path / 'run' / 'checkpoints' / '6'}: cannot be read (damaged or incomplete)" in message


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = workspace(
        tmp_path, "dflash", lambda made: made["optimizer"].update(lr=1e30, warmup=0, clip=None, weight_decay=0.5)
    )
    message = refused(capsys, "--config", file, status=1)
    assert "failed: step 2: the loss is nan" in message or "failed: step 2: the loss is inf" in message, message
    assert "documents.jsonl:" in message
    assert not (tmp_path / "run" / "drafter").exists()


def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = workspace(tmp_path, "dflash")
    save = ocp.CheckpointManager.save

    def full(manager: Any, step: int, *arguments: Any, **named: Any) -> Any:
        if step == 6:
            raise OSError(28, "No space left on device")
        return save(manager, step, *arguments, **named)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    message = refused(capsys, "--config", file)
    assert "the checkpoint of step 6 cannot be written: No space left on device; the one of step 3 stands" in message
    monkeypatch.undo()
    assert command("--config", file, "--resume") == 0


def test_a_disk_that_fills_while_logging_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, scalar = workspace(tmp_path, "dflash"), EventFile.scalar

    def full(events: EventFile, tag: str, value: float, step: int) -> None:
        if step == 5:
            raise OSError(28, "No space left on device")
        scalar(events, tag, value, step)

    monkeypatch.setattr(EventFile, "scalar", full)
    message = refused(capsys, "--config", file)
    assert "cannot be written: No space left on device; the checkpoint of step 3 stands" in message


def test_event_files_are_records_of_scalars(tmp_path: Path):
    for first in (0, 4):
        events = EventFile(tmp_path, first)
        events.scalar("train/loss", 1.5, first + 1)
        events.close()
    # one file, or two where a second has passed in between
    data, records = b"".join(file.read_bytes() for file in sorted(tmp_path.iterdir())), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    assert len(records) == 5  # version and point; version, beginning at step 5, and point
    assert records[0].endswith(b"brain.Event:2")
    assert b"train/loss" in records[1] and records[1].endswith(struct.pack("<f", 1.5))
    check = 0xE3069283  # CRC-32C of "123456789" (RFC 3720, appendix B.4)
    masked = ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _checksum(b"123456789") == struct.pack("<I", masked)


def test_the_run_of_another_drafter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path, "dflash")
    assert command("--config", file) == 0
    message = refused(capsys, "--config", file, "--resume", "--set", "drafter.block_size=6")
    assert "holds the run of another drafter: its drafter differs" in message
    message = refused(capsys, "--config", file, "--resume", "--set", "drafter.draft_vocab_size=32")
    assert "drafter.draft_vocab_size is 32" in message
    assert command("--config", file, "--fresh", "--set", "drafter.draft_vocab_size=32") == 0
    loaded = load_drafter(tmp_path / "run" / "drafter", verifier=load_verifier(tmp_path / "verifier"))
    assert loaded.config.draft_vocab_size == 32


def test_export_writes_the_best_checkpoint_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path, "dspark")
    assert command("--config", file) == 0
    first = (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "drafter")
    capsys.readouterr()
    assert command("--config", file, "--export") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "drafter")
    assert (tmp_path / "run" / "drafter" / "model.safetensors").read_bytes() == first
    assert "holds no run" in refused(capsys, "--config", file, "--export", "--set", f"run.output={tmp_path / 'other'}")
    assert not (tmp_path / "other").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path, "dspark")
    assert command("--config", file, "--dry-run") == 0
    assert "6 steps" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


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


# Beginning from a checkpoint ---------------------------------------------------------------------------------------------------------


def started(
    tmp_path: Path, method: str, drafter: Any, to: str = "speculators", **changes: Any
) -> tuple[Setup, list[str]]:
    """A setup whose recipe begins from a random checkpoint, and what it said."""
    source = write_drafter(tmp_path / "start", drafter, to)

    def begin(made: dict[str, Any]) -> None:
        made["drafter"] = {"method": method, "init_from": str(source), **changes}

    said: list[str] = []
    return set_up(read_recipe(workspace(tmp_path, method, begin)), said.append), said


def stored(tmp_path: Path) -> SafetensorsSource:
    return SafetensorsSource(tmp_path / "start")


def value(setup: Setup, name: str) -> np.ndarray:
    return np.asarray(next(v for path, v in setup.drafter.values.items() if ".".join(map(str, path)) == name))


def test_fine_tuning_begins_with_the_checkpoints_weights(tmp_path: Path):
    setup, said = started(tmp_path, "dspark", spark("gated", **REDUCED))
    assert replace(setup.drafter.config, speculative_tokens=None) == replace(
        spark("gated", **REDUCED), speculative_tokens=None
    )
    np.testing.assert_array_equal(value(setup, "fc.weight"), stored(tmp_path).read("fc.weight").astype(np.float32))
    np.testing.assert_array_equal(
        value(setup, "vocabulary.head.weight"), stored(tmp_path).read("lm_head.weight").astype(np.float32)
    )
    assert setup.target_ids is not None and len(setup.target_ids) == 96
    assert not any("new" in line or "not used" in line for line in said)


def test_dspark_begins_from_dflash(tmp_path: Path):
    setup, said = started(tmp_path, "dspark", block("dflash"), "z-lab", markov={"kind": "vanilla", "rank": 4})
    assert setup.drafter.config.method == "dspark"
    assert setup.drafter.config.block is not None and not setup.drafter.config.block.sample_from_anchor
    np.testing.assert_array_equal(
        value(setup, "layers.1.mlp.up.weight"), stored(tmp_path).read("layers.1.mlp.up_proj.weight").astype(np.float32)
    )
    new = next(line for line in said if line.startswith("new: "))
    assert "markov.w1.weight" in new and "confidence.projection.weight" in new and "fc" not in new


def test_peagle_begins_from_eagle3(tmp_path: Path):
    setup, said = started(tmp_path, "peagle", eagle("eagle3"), layers=3, train_embed=False, mask_token=258)
    assert len(setup.drafter.config.layers) == 3
    new = next(line for line in said if line.startswith("new: "))
    assert "mask_hidden" in new and "layers.1.mlp.up.weight" in new and "layers.0" not in new
    # the checkpoint has an embedding of its own, which stays as it is
    np.testing.assert_array_equal(
        value(setup, "vocabulary.embed.weight"), stored(tmp_path).read("embed_tokens.weight").astype(np.float32)
    )
    assert ("vocabulary", "embed", "weight") not in setup.drafter.trainable


def test_what_a_checkpoint_has_and_the_drafter_has_not_is_said(tmp_path: Path):
    _, said = started(tmp_path, "dspark", spark("vanilla"), markov={"rank": 0}, confidence={"enabled": False})
    unused = next(line for line in said if line.startswith("not used: "))
    assert "markov.w1.weight" in unused and "confidence.projection.weight" in unused


def test_heads_alone_are_trained(tmp_path: Path):
    setup, _ = started(tmp_path, "dspark", spark("rnn"), train="heads")
    assert {path[0] for path in setup.drafter.trainable} == {"markov", "confidence"}


def test_gemma4s_layer_scalars_are_no_weights(tmp_path: Path):
    """In the original they are buffers: neither gradient nor weight decay reaches them."""
    setup, _ = started(tmp_path, "dspark", gemma(), "deepspec")
    scalars = {path for path in setup.drafter.values if path[-1] == "scalar"}
    assert scalars == {("layers", 0, "scalar"), ("layers", 1, "scalar")}
    lent = {("vocabulary", "embed", "weight"), ("vocabulary", "head", "weight")}
    assert setup.drafter.trainable == setup.drafter.values.keys() - scalars - lent
    for layer in range(2):
        kept = stored(tmp_path).read(f"layers.{layer}.layer_scalar").astype(np.float32)
        assert kept != 1
        np.testing.assert_array_equal(value(setup, f"layers.{layer}.scalar"), kept)


@pytest.mark.parametrize("method", METHODS)
def test_training_programs_call_no_pallas_kernel(tmp_path: Path, method: str):
    """Decoding takes XLA's operations where a kernel does not compile on a GPU; training compiles on its own, and must not need that."""
    made = trainer(workspace(tmp_path, method))
    packed, features = next(made._batches.iterator(made._joined))
    (batch, _), anchors = made._stacked([(packed, features)]), np.zeros((2, 8), np.int32)
    one = jax.tree.map(lambda x: x[0], batch)
    programs, state, frozen = made._programs, made._state, made._frozen
    with use("interpret"):
        step = programs.step.trace(state, frozen, batch, None).jaxpr
        accepts = programs.accepts.trace(state.params, frozen, one, None, anchors).jaxpr
        decoding = jax.make_jaxpr(partial(block_attention, scale=1.0))(
            *(jnp.zeros(shape) for shape in ((1, 2, 2, 16), (1, 2, 16, 16), (1, 2, 16, 16))), jnp.zeros(1, jnp.int32)
        )
    assert "pallas_call" in str(decoding)
    assert "dot_general" in str(step) and "pallas_call" not in str(step)
    assert "pallas_call" not in str(accepts)


def test_a_warm_start_is_trained_and_written(tmp_path: Path):
    source = write_drafter(tmp_path / "start", spark("gated", **REDUCED), "speculators")

    def begin(made: dict[str, Any]) -> None:
        made["drafter"] = {"method": "dspark", "init_from": str(source), "train": "heads"}
        made["optimizer"]["steps"] = 2

    assert command("--config", workspace(tmp_path, "dspark", begin)) == 0
    before, after = SafetensorsSource(source), SafetensorsSource(tmp_path / "run" / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        same = np.array_equal(before.read(name).astype(np.float32), after.read(name).astype(np.float32))
        assert same != name.startswith(("markov_head", "confidence_head")), name


@pytest.mark.parametrize(
    ("method", "drafter", "changes", "message"),
    [
        ("dflash", spark("vanilla"), {}, "is a dspark drafter; dflash begins from dflash"),
        ("eagle3", eagle("peagle"), {}, "is a peagle drafter; eagle3 begins from eagle3"),
        ("dspark", spark("vanilla", **REDUCED), {"draft_vocab_size": 64}, "draft_vocab_size is 64, and the checkpoint"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(
    tmp_path: Path, method: str, drafter: Any, changes: dict[str, Any], message: str
):
    with pytest.raises(InputError, match=message):
        started(tmp_path, method, drafter, **changes)


# Validation --------------------------------------------------------------------------------------------------------------------------


def batch_of(mask: list[list[int]], documents: list[list[int]]) -> Batch:
    tokens = np.zeros(np.shape(mask), np.int32)
    return Batch(tokens, np.array(documents, np.int32), tokens, np.array(mask, bool))


def test_the_walk_goes_as_generation_does():
    # one answer of seven tokens, indices 2 .. 8, behind a prompt of two
    batch = batch_of([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0]], [[0] * 9 + [-1]])
    accepted = np.array([[9, 2, 9, 9, 0, 3, 9, 9, 9, 9]])
    # from 1: 2 accepted, next anchor 4; from 4: none, next 5; from 5: 3 accepted are all that is left
    found = walk(batch, accepted)
    assert found.cycles == 3
    assert found.accepted[:4].tolist() == [2, 2, 1, 0]
    assert found.length == pytest.approx(1 + 5 / 3)


def test_every_answer_of_every_document_is_walked():
    batch = batch_of(
        [[0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, 1, 1, 1], [0] * 4 + [-1] * 4]
    )
    found = list(answers(batch))
    # the second document begins with an answer token, which nothing can draft
    assert found == [(0, (1, 2)), (0, (4, 4)), (0, (7, 7)), (1, (1, 3))]
    assert walk(batch, np.zeros((2, 8), int)).cycles == 2 + 1 + 1 + 3


def test_anchors_are_asked_for_in_parts():
    batch = batch_of([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]], [[0] * 6, [0] * 5 + [-1]])
    asked: list[list[list[int]]] = []

    def accepts(anchors: np.ndarray) -> np.ndarray:
        asked.append(anchors.tolist())
        return np.stack([anchors >= 0, anchors == 2], axis=-1)

    found = validate(batch, accepts, drafts=2, chunk=2)
    assert asked == [[[0, 1], [2, 3]], [[2, 3], [-1, -1]], [[4, -1], [-1, -1]]]
    # row 0: 0 takes 1 -> 2 takes 2 -> end; row 1: 2 takes all there is
    assert found.cycles == 3
    assert found.per_position == pytest.approx([1.0, 2 / 3])


def test_held_out_acceptance_is_that_of_generation(tmp_path: Path):
    """A drafter trained on the tiny verifier's own greedy answers: what validation foresees is what generation does."""
    verifier = workspace(tmp_path, "dflash").parent / "verifier"
    engine = jaxspec.Engine.from_pretrained(verifier)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(97, 120, 6).tolist() for _ in range(6)]
    params = jaxspec.SamplingParams(max_new_tokens=24, ignore_eos=True)
    lines = [
        json.dumps({"prompt_ids": prompt, "token_ids": list(result.token_ids)})
        for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True)
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))

    def overfit(made: dict[str, Any]) -> None:
        made["data"] |= {
            "train": [str(tmp_path / "answers.jsonl")],
            "validation": [str(tmp_path / "answers.jsonl")],
            "rows": 4,
        }
        made["optimizer"] |= {"steps": 150, "lr": 0.01}
        made["run"] |= {"validate_every": 0, "checkpoint_every": 0, "log_every": 50}

    assert command("--config", workspace(tmp_path, "dflash", overfit)) == 0
    foreseen = [entry for entry in read_metrics(tmp_path / "run") if entry["kind"] == "validation"][-1]
    drafted = jaxspec.Engine.from_pretrained(verifier, str(tmp_path / "run" / "drafter"))
    found = [result.speculative for result in drafted.generate(prompts, params)]
    cycles = sum(one.cycles for one in found if one is not None)
    accepted = sum(one.accepted for one in found if one is not None)
    assert foreseen["acceptance_length"] > 2
    assert foreseen["acceptance_length"] == pytest.approx(1 + accepted / cycles, rel=0.05)

"""Stopping at any moment and going on: checkpoints, signals, full disks, logs."""

import json
import shutil
import signal
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_training import workspace, write_documents
from trainer_run import assert_same_to_the_bit, checkpoint, command, last_step, process, refused, trained, wait_for

from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.events import EventFile, _checksum
from jaxspec.training.report import read_metrics
from jaxspec.training.step import TrainState


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
    assert (second.best()[0], second.latest) == (20, 50)
    found = second.restore(state)
    assert (int(found.state.step), found.data, found.best) == (50, {"next_index": 50}, 1.9)
    assert opened(read_only=True).best()[0] == 20
    second.save(replace(state, step=jnp.int32(60)), {"next_index": 60}, 2.5, 2.5)
    assert opened(read_only=True).best()[0] == 60


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


def test_fresh_removes_nothing_before_all_else_is_known_to_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = workspace(tmp_path, "dflash")
    assert command("--config", file) == 0
    before = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    for override in (
        "data.train=[nowhere.jsonl]",
        "mesh.data=64",
        "data.features=nowhere",
        "optimizer.accumulation=9999",
    ):
        epochs = ("--set", "optimizer.steps=null", "--set", "optimizer.epochs=1")
        refused(capsys, "--config", file, "--fresh", "--set", override, *epochs)
        assert sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file()) == before
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    assert "tensorboard: cannot be removed: " in (said := refused(capsys, "--config", file, "--fresh"))
    assert not said.endswith("None")


def test_a_run_without_a_checkpoint_counts_its_vocabulary_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, output = workspace(tmp_path, "dflash"), tmp_path / "run"
    assert command("--config", file) == 0
    own = np.load(output / "vocabulary.npy")
    other = np.sort(np.setdiff1d(np.arange(259, dtype=np.int32), own)[: len(own)])
    np.save(output / "vocabulary.npy", other)
    assert "its draft vocabulary differs" in refused(capsys, "--config", file, "--resume")  # with one it is the run's
    shutil.rmtree(output / "drafter")
    shutil.rmtree(output / "checkpoints")
    assert command("--config", file, "--set", "drafter.draft_vocab_size=32") == 0
    assert len(np.load(output / "vocabulary.npy")) == 32


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (np.arange(64, dtype=np.int32) + 300, "vocabulary.npy: holds no draft vocabulary of a verifier of 259 tokens"),
        (np.ones((2, 2)), "vocabulary.npy: holds no draft vocabulary"),
        (None, "vocabulary.npy: cannot be read"),
    ],
)
def test_a_damaged_vocabulary_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: np.ndarray | None, said: str
):
    file, kept = workspace(tmp_path, "dflash"), tmp_path / "run" / "vocabulary.npy"
    (tmp_path / "run" / "checkpoints" / "6").mkdir(parents=True)
    kept.write_bytes(b"")
    if content is not None:
        np.save(kept, content)
    assert said in refused(capsys, "--config", file, "--resume")


@pytest.mark.parametrize(
    "override",
    ["optimizer.accumulation=2", "data.rows=1", "data.row_tokens=40", "data.pack=false", "run.seed=3"],
)
def test_a_run_goes_on_with_the_batches_that_it_was_begun_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
):
    """The place in the documents is the number of a batch: with others it would be another place."""
    data = {"train": [str(tmp_path / "documents.jsonl")], "validation": [str(tmp_path / "documents.jsonl")]}
    file = workspace(tmp_path, "dflash", lambda made: made["data"].update(data))
    assert command("--config", file) == 0
    name = override.partition("=")[0]
    message = refused(capsys, "--config", file, "--resume", "--set", override)
    assert f"{name} is " in message and "was begun with" in message and "--fresh" in message


def test_fewer_documents_than_a_run_has_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def by_epochs(made: dict[str, Any]) -> None:
        made["optimizer"] |= {"steps": None, "epochs": 2}
        made["data"]["validation"] = [str(write_documents(tmp_path / "held.jsonl", 4, seed=1))]

    file = workspace(tmp_path, "dflash", by_epochs)
    assert command("--config", file) == 0
    longer = ("--set", "optimizer.epochs=3", "--set", "data.limit=3")
    assert "--resume: step " in refused(capsys, "--config", file, "--resume", *longer)


def test_other_held_out_documents_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    held = write_documents(tmp_path / "held.jsonl", 4, seed=1)
    file = workspace(tmp_path, "dflash", lambda made: made["data"].update(validation=[str(held)]))
    assert command("--config", file) == 0
    write_documents(held, 4, seed=2)
    capsys.readouterr()
    assert command("--config", file, "--resume", "--set", "optimizer.steps=7") == 0
    assert "the held-out documents have changed since then" in capsys.readouterr().err


def test_the_acceptance_told_is_that_of_the_drafter_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without keep_best the best checkpoint may be gone."""
    file = workspace(tmp_path, "dflash", lambda made: made["optimizer"].update(steps=12))
    assert command("--config", file, "--set", "run.keep_best=false", "--set", "run.keep=1") == 0
    (last,) = (e for e in read_metrics(tmp_path / "run") if (e["kind"], e["step"]) == ("validation", 12))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == {"steps": 12, "exported_step": 12, "acceptance_length": last["acceptance_length"]}
    assert f"finished after 12 steps, acceptance length {last['acceptance_length']:.3f}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "override", "said"),
    [
        ("dflash", "run.export.format=eagle3", "run.export: eagle3 holds EAGLE-3 and P-EAGLE drafters, not dflash"),
        ("dflash", "run.export.format=z-lab", "run.export: z-lab has no d2t"),
        ("dspark", "run.export.drop=[nonsense]", "run.export: --drop nonsense: known are"),
        ("dflash", "run.export.drop=[markov]", "run.export: --drop markov: this drafter has none"),
    ],
)
def test_a_drafter_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, override: str, said: str
):
    file = workspace(tmp_path, method)
    for how in ((), ("--dry-run",)):
        assert said in refused(capsys, "--config", file, *how, "--set", override)
    assert not (tmp_path / "run").exists()

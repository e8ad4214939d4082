"""Stopping at any moment and going on: checkpoints, signals, full disks, logs."""

import shutil
import signal
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from tiny_training import workspace
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

"""Several processes on one machine: the same answers, one voice, and an end for all when one dies."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesh_run import GOLDENS, ROOT, write_drafter
from test_training_mesh import CLOSE, even
from tiny import write_model
from tiny_training import workspace
from trainer_run import checkpoint, command, last_step, process, trained, wait_for

from jaxspec import distributed, generate, train
from jaxspec.cli import run
from jaxspec.errors import InputError

FLAGS = [
    "--model",
    str(GOLDENS / "llama"),
    "--output",
    "json",
    "--max-new-tokens",
    "8",
    "--ignore-eos",
    "--prompt-ids",
    "5,3",
]
MORE = ["--temperature", "1", "--seed", "3"]


def start(
    *argv: str, module: str = "jaxspec.generate", devices: int = 1, folder: Path | None = None
) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", module, *argv]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def pair(
    *argv: str,
    second: tuple[str, ...] | None = None,
    module: str = "jaxspec.generate",
    devices: int = 1,
    folders: tuple[Path | None, Path | None] = (None, None),
) -> "list[subprocess.Popen[str]]":
    """Two processes of one run; `second`: other flags for the second one; `devices` of each; `folders` that they work in."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    meet = ("--distributed", "--coordinator-address", address, "--num-processes", "2")
    each = [argv, argv if second is None else second]
    return [
        start(*flags, *meet, "--process-id", str(i), module=module, devices=devices, folder=folders[i])
        for i, flags in enumerate(each)
    ]


def train_pair(file: Path, *argv: str, devices: int = 1) -> "list[subprocess.Popen[str]]":
    """Two processes of one training run."""
    return pair("--config", str(file), *argv, module="jaxspec.train", devices=devices)


def finish(processes: "list[subprocess.Popen[str]]") -> list[tuple[str, str]]:
    """What the processes printed, once they have ended well."""
    outputs = [one.communicate(timeout=600) for one in processes]
    assert [one.returncode for one in processes] == [0, 0], outputs
    return outputs


def overrides(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def assert_close(output: Path, step: int, wanted: dict[str, np.ndarray]) -> None:
    """The parameters of a run's checkpoint against others."""
    found = checkpoint(output, step)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, **CLOSE, err_msg=name)


def tokens(out: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in out.splitlines()]


def test_two_processes_generate_what_one_does_and_the_first_prints(capsys):
    first, second = pair(*FLAGS, *MORE)
    assert run(generate.NAME, generate.main, [*FLAGS, *MORE]) == 0
    (out, err), (nothing, said) = first.communicate(timeout=300), second.communicate(timeout=300)
    assert first.returncode == second.returncode == 0, err + said
    assert tokens(out) == tokens(capsys.readouterr().out)
    assert nothing == ""


def test_two_processes_train_what_one_does_and_the_first_writes(tmp_path):
    flags = ["data.validation_share=0", "optimizer.lr=1e-4", "optimizer.warmup=0", "optimizer.steps=2"]
    file = workspace(tmp_path, "dflash")
    processes = train_pair(file, *overrides(*flags, f"run.output={tmp_path / 'two'}"))
    one, _ = trained(file, *flags)
    (out, err), silent = finish(processes)
    assert out == f"{tmp_path / 'two' / 'drafter'}\n" and "step 2/2" in err
    assert silent[0] == "" and not [line for line in silent[1].splitlines() if "[Gloo]" not in line and line]
    assert_close(tmp_path / "two", 2, one)
    assert [path.name for path in (tmp_path / "two" / "tensorboard").iterdir()][1:] == []
    written = [(tmp_path / name / "drafter" / "config.json").read_text() for name in ("run", "two")]
    assert written[0] == written[1]


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_processes(tmp_path):
    """Each process reads the features of its own rows, two micro-batches a step, over a mesh with both axes."""

    def stored(made: dict[str, Any]) -> None:
        even(made)
        made["data"] |= {"features": str(tmp_path / "features"), "features_dtype": "float32", "rows": 2}
        made["data"]["validation"] = made["data"]["train"]
        made["optimizer"] |= {"steps": 4, "lr": 1e-4, "warmup": 0, "accumulation": 2}
        made["run"] |= {"checkpoint_every": 2, "validate_every": 2, "keep": 9}

    file = workspace(tmp_path, "dspark", stored)
    assert command("--config", file, "--write-features") == 0
    mesh, two = ["--mesh", "data=2,tensor=2"], tmp_path / "two"
    processes = train_pair(file, *mesh, *overrides(f"run.output={two}"), devices=2)
    alone = process(file, *mesh, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert alone.communicate()[0], "the run of one process has failed"
    finish(processes)
    one = {name: value for name, value in checkpoint(tmp_path / "run", 4).items() if name.startswith("params")}
    assert_close(two, 4, one)
    summaries = [json.loads((output / "summary.json").read_text()) for output in (tmp_path / "run", two)]
    assert summaries[0] == summaries[1]

    shutil.rmtree(two / "checkpoints" / "4")
    assert command("--config", file, "--resume", *overrides(f"run.output={two}")) == 0  # on one device
    assert_close(two, 4, one)
    shutil.rmtree(two / "checkpoints" / "4")
    outputs = finish(train_pair(file, *overrides(f"run.output={two}"), "--resume"))  # without a mesh: data=2
    assert "going on from step 2" in outputs[0][1]
    assert_close(two, 4, one)


def long(made: dict[str, Any]) -> None:
    made["optimizer"] |= {"steps": 20_000}
    made["run"] |= {"checkpoint_every": 20, "validate_every": 0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_ends_all_at_the_same_step(tmp_path, number):
    file, output = workspace(tmp_path, "dflash", long), tmp_path / "run"
    processes = train_pair(file)
    wait_for(lambda: last_step(output) >= 30, processes[1])
    processes[1].send_signal(number)
    outputs = [one.communicate(timeout=120) for one in processes]
    status = 0 if number == signal.SIGTERM else 130
    assert [one.returncode for one in processes] == [status, status], outputs
    stopped = max(int(path.name) for path in (output / "checkpoints").iterdir())
    assert f"stopped at step {stopped}, which is saved" in outputs[0][1]
    outputs = finish(train_pair(file, "--resume", *overrides(f"optimizer.steps={stopped + 2}")))
    assert f"going on from step {stopped}" in outputs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_when_a_process_dies_the_training_of_the_other_ends_soon(tmp_path, dies):
    file, output = workspace(tmp_path, "dflash", long), tmp_path / "run"
    processes = train_pair(file)
    wait_for(lambda: last_step(output) >= 30, processes[0])
    killed(processes, dies)
    assert (output / "checkpoints" / "20").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "tensor=4", "data=2,tensor=2"])
def test_meshes_across_processes_generate_what_one_device_does(mesh, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": list(range(1, n))}) + "\n" for n in (3, 9, 20)))
    drafter = str(write_drafter(tmp_path / "drafter", "dspark"))
    trace = tmp_path / "trace.jsonl"
    flags = [*FLAGS, "--prompt-file", str(prompts), "--drafter", drafter]
    profile = ["--profile-dir", str(tmp_path / "profile")]
    several = [*flags, "--trace", str(trace), *(profile if mesh is None else ["--mesh", mesh])]
    processes = pair(*several, devices=2)
    assert run(generate.NAME, generate.main, flags) == 0
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert tokens(outputs[0][0]) == tokens(capsys.readouterr().out)
    assert {json.loads(line)["row"] for line in trace.read_text().splitlines()} == {0, 1, 2, 3}
    traces = {path.relative_to(tmp_path / "profile").parts[0] for path in (tmp_path / "profile").rglob("*.xplane.pb")}
    assert traces == ({"process-0", "process-1"} if mesh is None else set())


def disagree(processes: "Sequence[subprocess.Popen[str]]", name: str) -> None:
    """Both processes end with the line that names what differs."""
    for one in processes:
        out, err = one.communicate(timeout=300)
        assert one.returncode == 2 and out == ""
        assert f"{name} differs between processes 0 and 1; all must be started alike" in err


def test_different_flags_are_an_error_that_names_the_flag():
    disagree(pair(*FLAGS, second=(*FLAGS, "--top-k", "5")), "--top-k")


@pytest.mark.slow
def test_evaluate_too_names_flags_and_prompts_that_differ(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.jsonl").write_text('{"prompt_ids": [5, 3]}\n' * number)
    flags = ("--model", str(GOLDENS / "llama"), "--prompt-file", str(tmp_path / "1.jsonl"))
    other = (*flags[:-1], str(tmp_path / "2.jsonl"))
    disagree(pair(*flags, second=other, module="jaxspec.evaluate"), "--prompt-file")
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}.jsonl").rename(tmp_path / str(number) / "prompts.jsonl")
    folders = (tmp_path / "1", tmp_path / "2")
    disagree(pair(*flags[:-1], "prompts.jsonl", module="jaxspec.evaluate", folders=folders), "prompts")


@pytest.mark.slow
def test_different_recipes_and_documents_are_an_error_too(tmp_path):
    file = workspace(tmp_path / "a", "dflash")
    flags = ("--config", str(file))
    module = "jaxspec.train"
    disagree(pair(*flags, second=(*flags, "--set", "optimizer.lr=1"), module=module), "--set")
    disagree(pair(*flags, second=(*flags, "--mesh", "data=2"), module=module), "--mesh")
    # The same recipe by its text, read in two folders.
    lines = (tmp_path / "a" / "documents.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "documents.jsonl").rename(tmp_path / "documents.jsonl")
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "documents.jsonl").write_text("".join(lines[number:]))
    again = (*flags, "--set", "data.train=[documents.jsonl]")
    disagree(pair(*again, module=module, folders=(tmp_path / "0", tmp_path / "1")), "documents")


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_when_a_process_dies_the_other_ends_soon(dies, tmp_path):
    model = str(write_model(tmp_path / "model"))
    processes = pair("--model", model, "--stream", "--max-new-tokens", "1000", "--ignore-eos", "Hello")
    stream = processes[0].stdout
    assert stream is not None and stream.read(1)  # both have met and generate
    killed(processes, dies)


def killed(processes: "Sequence[subprocess.Popen[str]]", dies: int) -> None:
    """Kills one of two processes; the other ends in time, and says why."""
    processes[dies].send_signal(signal.SIGKILL)
    died = time.monotonic()
    _, err = processes[1 - dies].communicate(timeout=4 * distributed.HEARTBEAT_S)
    processes[dies].communicate()
    assert processes[1 - dies].returncode not in (0, 2)
    assert time.monotonic() - died < 3 * distributed.HEARTBEAT_S
    assert "another process" in err or "distributed service" in err, err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-processes", "2"], "--num-processes goes with --distributed"),
        (["--distributed", "--num-processes", "0"], "--num-processes is 0"),
        (["--distributed", "--num-processes", "2", "--process-id", "2"], "--process-id is 2; it counts from 0 to 1"),
        (["--distributed", "--process-id", "-1"], "--process-id is -1"),
        (["--distributed", "--coordinator-address", "here"], "--coordinator-address is 'here'; HOST:PORT is wanted"),
    ],
)
def test_bad_flags_are_one_line(flags, said, capsys):
    assert run(generate.NAME, generate.main, [*FLAGS, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--write-answers", "--write-features", "--export", "--calibrate=drafter"])
def test_what_trains_nothing_runs_as_one_process(flag, tmp_path, capsys):
    file = workspace(tmp_path, "dspark")
    assert run(train.NAME, train.main, ["--config", str(file), "--distributed", flag]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"--distributed goes with training; run {flag.partition('=')[0]} as one process" in err


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(InputError, match="JAX_NUM_PROCESSES is 'two'"):
        distributed.start(Namespace(distributed=True, coordinator_address=None, num_processes=None, process_id=None))


def test_alone_a_process_is_the_first_and_agrees_with_itself():
    assert distributed.first() and not distributed.running() and distributed.label() == ""
    distributed.agree(Namespace(a=1))
    assert distributed.same(7) == 7 and distributed.by_first(lambda: 8) == 8
    assert distributed.own_folder("traces") == "traces"


def test_one_of_several_has_a_folder_of_its_own(monkeypatch):
    monkeypatch.setattr(distributed, "_process", (1, 2))
    assert distributed.own_folder("traces") == "traces/process-1"

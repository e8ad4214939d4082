"""Several processes on one machine: the same answers, one voice, and an end for all when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from mesh_run import GOLDENS, ROOT, write_drafter
from tiny import write_model

from jaxspec import distributed, generate
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


def start(*argv: str, module: str = "jaxspec.generate", devices: int = 1) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", module, *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pair(*argv: str, second: tuple[str, ...] | None = None, devices: int = 1) -> "list[subprocess.Popen[str]]":
    """Two processes of one run; `second`: other flags for the second one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    meet = ("--distributed", "--coordinator-address", address, "--num-processes", "2")
    each = [argv, argv if second is None else second]
    return [start(*flags, *meet, "--process-id", str(i), devices=devices) for i, flags in enumerate(each)]


def tokens(out: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in out.splitlines()]


def test_two_processes_generate_what_one_does_and_the_first_prints(capsys):
    first, second = pair(*FLAGS, *MORE)
    assert run(generate.NAME, generate.main, [*FLAGS, *MORE]) == 0
    (out, err), (nothing, said) = first.communicate(timeout=300), second.communicate(timeout=300)
    assert first.returncode == second.returncode == 0, err + said
    assert tokens(out) == tokens(capsys.readouterr().out)
    assert nothing == ""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "tensor=4", "data=2,tensor=2"])
def test_meshes_across_processes_generate_what_one_device_does(mesh, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": list(range(1, n))}) + "\n" for n in (3, 9, 20)))
    drafter = str(write_drafter(tmp_path / "drafter", "dspark"))
    trace = tmp_path / "trace.jsonl"
    flags = [*FLAGS, "--prompt-file", str(prompts), "--drafter", drafter]
    several = [*flags, "--trace", str(trace), *([] if mesh is None else ["--mesh", mesh])]
    processes = pair(*several, devices=2)
    assert run(generate.NAME, generate.main, flags) == 0
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert tokens(outputs[0][0]) == tokens(capsys.readouterr().out)
    assert {json.loads(line)["row"] for line in trace.read_text().splitlines()} == {0, 1, 2, 3}


def test_different_flags_are_an_error_that_names_the_flag():
    for process in pair(*FLAGS, second=(*FLAGS, "--top-k", "5")):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 2 and out == ""
        assert "--top-k differs between processes 0 and 1; all must be started alike" in err


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_when_a_process_dies_the_other_ends_soon(dies, tmp_path):
    model = str(write_model(tmp_path / "model"))
    processes = pair("--model", model, "--stream", "--max-new-tokens", "1000", "--ignore-eos", "Hello")
    stream = processes[0].stdout
    assert stream is not None and stream.read(1)  # both have met and generate
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


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(InputError, match="JAX_NUM_PROCESSES is 'two'"):
        distributed.start(Namespace(distributed=True, coordinator_address=None, num_processes=None, process_id=None))


def test_alone_a_process_is_the_first_and_agrees_with_itself():
    assert distributed.first() and not distributed.running() and distributed.label() == ""
    distributed.agree(Namespace(a=1))
    assert distributed.same(7) == 7

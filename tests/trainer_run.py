"""Training in this process or another, and what it leaves behind."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec import train
from jaxspec.cli import run as run_command
from jaxspec.training.placement import make_mesh
from jaxspec.training.recipe import read_recipe
from jaxspec.training.report import read_metrics
from jaxspec.training.setup import Setup, set_up
from jaxspec.training.trainer import Trainer

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


def trained(file: Path, *overrides: str) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Parameters after a run, and its training metrics."""
    output = Path(read_recipe(file, overrides).run.output)
    shutil.rmtree(output, ignore_errors=True)
    made = trainer(file, *overrides)
    outcome = made.run(resume=False)
    arrays = {name: value for name, value in checkpoint(output, outcome.step).items() if name.startswith("params")}
    return arrays, [entry for entry in read_metrics(output) if entry["kind"] == "train"]


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

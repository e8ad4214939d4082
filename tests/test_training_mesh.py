"""Training on eight devices: the same step as on one, its moments split, and checkpoints that go from one mesh to another."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from mesh_run import DEVICES
from test_training import checkpoint, command, process, trained
from tiny_training import workspace

from jaxspec.sharding import AXES, split, spread

EIGHT = ["--mesh", "data=4,tensor=2"]
# Float32 sums in another order; Adam's first steps divide by the gradient's size, so that rounding shows most in small ones.
CLOSE = {"rtol": 0, "atol": 1e-5}
STEPS = ["data.rows=4", "optimizer.lr=1e-4", "optimizer.warmup=0", "data.validation_share=0"]


def even(made: dict) -> None:
    """A vocabulary that two devices divide, as the draft vocabulary and the fixtures' verifiers have, and documents of its 96 ids."""
    made["verifier"]["model"] = str(Path(__file__).parent / "goldens" / "llama")
    made["drafter"]["mask_token"] = 1
    (documents,) = map(Path, made["data"]["train"])
    rng = np.random.default_rng(0)
    lines = [
        {"prompt_ids": rng.integers(3, 96, 5).tolist(), "token_ids": rng.integers(3, 96, 12).tolist()}
        for _ in range(16)
    ]
    documents.write_text("\n".join(map(json.dumps, lines)))


def test_moments_are_split_along_rows_too():
    mesh = AbstractMesh((4, 2, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    up = split(mesh, ("mlp", "embed"), (48, 32), "up")
    assert spread(up, (48, 32)).spec == PartitionSpec("tensor", "data")
    assert spread(NamedSharding(mesh, PartitionSpec()), (3, 7)).spec == PartitionSpec(None, None)
    assert spread(NamedSharding(mesh, PartitionSpec()), (6, 8)).spec == PartitionSpec(None, "data")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_a_step_on_eight_devices_is_the_step_on_one(tmp_path, method):
    file = workspace(tmp_path, method, even)
    flags = [*STEPS, "optimizer.steps=1"]
    one, _ = trained(file, *flags)
    several = tmp_path / "eight"
    overrides = [part for value in [*flags, f"run.output={several}"] for part in ("--set", value)]
    out = process(file, *EIGHT, *overrides, **DEVICES).communicate()
    assert (several / "summary.json").is_file(), out
    eight = checkpoint(several, 1)
    for name, value in one.items():
        np.testing.assert_allclose(eight[name], value, **CLOSE, err_msg=name)


@pytest.mark.slow
def test_answers_do_not_depend_on_the_mesh(tmp_path):
    """Five questions through two rows on a device: rows are refilled."""
    rng = np.random.default_rng(1)
    questions = [{"prompt_ids": rng.integers(3, 96, size).tolist()} for size in (3, 12, 5, 7, 4)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))

    def asking(made: dict) -> None:
        even(made)
        made["data"]["questions"] = [str(tmp_path / "questions.jsonl")]
        made["data"]["answers"] = {"output": str(tmp_path / "one.jsonl"), "max_new_tokens": 6, "rows": 2}

    file = workspace(tmp_path, "dflash", asking)
    assert command("--config", file, "--write-answers") == 0
    elsewhere = ("--set", f"data.answers.output={tmp_path / 'four.jsonl'}", "--set", "data.answers.rows=4")
    out = process(file, "--mesh", "data=2,tensor=4", *elsewhere, "--write-answers", **DEVICES).communicate()
    one, four = (
        sorted(json.loads(line)["token_ids"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines())
        for name in ("one", "four")
    )
    assert one == four and len(one) == 5, out
    assert "tensor=4 are more devices than the verifier has key/value heads (2)" in out[1]


@pytest.mark.slow
def test_a_checkpoint_of_one_device_goes_on_on_eight(tmp_path):
    file = workspace(tmp_path, "dflash", even)
    flags = [*STEPS, "optimizer.steps=4", "run.checkpoint_every=2", "run.keep=9"]
    one, _ = trained(file, *flags)
    shutil.copytree(tmp_path / "run", tmp_path / "eight")
    shutil.rmtree(tmp_path / "eight" / "checkpoints" / "4")
    overrides = [part for value in [*flags, f"run.output={tmp_path / 'eight'}"] for part in ("--set", value)]
    out = process(file, *EIGHT, *overrides, "--resume", **DEVICES).communicate()
    assert "going on from step 2" in out[1], out
    eight = checkpoint(tmp_path / "eight", 4)
    for name, value in one.items():
        np.testing.assert_allclose(eight[name], value, **CLOSE, err_msg=name)
    assert jax.device_count() == 1

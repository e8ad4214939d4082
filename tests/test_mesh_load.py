"""Weights on their way to and from a mesh: one tensor at a time, and stored as if there were none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from mesh_run import DEVICES, GOLDENS, ROOT
from tiny import write_model
from tiny_drafters import block, write

from jaxspec import convert
from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.checkpoint.load import load_verifier


def on_eight_devices(*argv: str | Path) -> str:
    """What a Python process prints that has them."""
    environment = {**os.environ, **DEVICES, "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])}
    done = subprocess.run([sys.executable, *map(str, argv)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how far memory has risen")
def test_loading_takes_one_tensors_shards_and_the_tensor_beside_what_is_placed(tmp_path):
    model = write_model(
        tmp_path / "model",
        tokenizer=False,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=260,
        head_dim=64,
    )
    found = json.loads(on_eight_devices(ROOT / "tests" / "load_run.py", model, "data=4,tensor=2"))
    stored = (model / "model.safetensors").stat().st_size
    assert found["shards"] == pytest.approx(4 * stored, rel=0.01)  # each device along data has all of it
    assert found["risen"] < 1.15 * found["shards"]
    # 4 copies of the largest tensor are placed, and it was read once: little else is there.
    assert found["growth"] < (4 + 2) * found["largest"] < 0.5 * stored


@pytest.mark.parametrize("target", ["orbax", "safetensors"])
def test_a_checkpoint_written_under_a_mesh_is_the_one_written_without(tmp_path, target):
    """The model has 2 key/value heads: with 4 devices along tensor each is written once all the same."""
    written, wanted = tmp_path / "written", load_verifier(GOLDENS / "llama")
    out = on_eight_devices(
        "-m", "jaxspec.convert", GOLDENS / "llama", written, "--to", target, "--mesh", "data=2,tensor=4"
    )
    assert f"wrote  {written}: {target} llama verifier" in out
    found = load_verifier(written)
    assert found.config == wanted.config
    theirs, ours = (flat_parameters(nnx.state(loaded.module)) for loaded in (wanted, found))
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path][...], leaf[...], err_msg=str(path))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_generates_on_another(tmp_path):
    written, flags = tmp_path / "written", ("--prompt-ids", "5,3", "--max-new-tokens", "6", "--output", "json")
    on_eight_devices("-m", "jaxspec.convert", GOLDENS / "llama", written, "--to", "orbax", "--mesh", "tensor=4")
    found, wanted = (
        json.loads(on_eight_devices("-m", "jaxspec.generate", "--model", model, *flags, "--mesh", mesh))["token_ids"]
        for model, mesh in ((written, "data=2,tensor=2"), (GOLDENS / "llama", "data=1"))
    )
    assert found == wanted and len(wanted) == 6


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("row=2", "--mesh row=2: 'row' is no axis; there are data, tensor, expert"),
        ("tensor=0", "--mesh tensor=0: the size of tensor is '0'"),
        ("tensor=2", "mesh: tensor 2 are 2 devices; there are 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_line(tmp_path, capsys, mesh, message):
    argv = [str(GOLDENS / "llama"), str(tmp_path / "written"), "--to", "orbax", "--mesh", mesh]
    assert convert.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "written").exists()


def test_a_drafter_takes_no_mesh(tmp_path, capsys):
    source = write(tmp_path / "source", block("dflash"), "z-lab")
    assert convert.main([str(source), str(tmp_path / "to"), "--to", "orbax", "--mesh", "data=1"]) == 2
    assert "is a drafter, which host memory holds; --mesh goes with a verifier" in capsys.readouterr().err

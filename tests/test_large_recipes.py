"""The recipes for verifiers of 8 to 31 billion weights: the drafters that they make, and their steps compiled for the meshes they name."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.checkpoint.drafters.formats import detect_format
from jaxspec.drafters.config import DrafterConfig
from jaxspec.training.initial import drafter_config
from jaxspec.training.recipe import read_recipe
from jaxspec.verifiers.families import parse_config
from jaxspec.verifiers.hf import Fields

ROOT = Path(__file__).resolve().parent.parent
DATA, RECIPES = ROOT / "tests" / "data", ROOT / "configs" / "train"
VERIFIERS = {
    "qwen3_8b_peagle": "qwen3_8b",
    "qwen3_8b_dspark": "qwen3_8b",
    "qwen3_30b_a3b_dflash": "qwen3_30b_a3b",
    "gemma4_31b_it_dspark": "gemma4_31b_it",
}
PUBLISHED = {
    "qwen3_8b_peagle": "redhat_qwen3_8b_peagle",
    "qwen3_8b_dspark": "deepspec_qwen3_8b_dspark",
    "qwen3_30b_a3b_dflash": "redhat_qwen3_30b_a3b_dflash",
    "gemma4_31b_it_dspark": "redhat_gemma4_31b_it_dspark",
}


def made(name: str) -> DrafterConfig:
    verifier = parse_config(json.loads((DATA / f"{VERIFIERS[name]}.json").read_text()), name)[0]
    return drafter_config(read_recipe(RECIPES / f"{name}.yaml").drafter, verifier, mask_token=None)


def published(name: str) -> DrafterConfig:
    data = json.loads((DATA / "drafters" / f"{PUBLISHED[name]}.json").read_text())
    tensors = {tensor.replace("layers.0-4", "layers.0").replace("layers.1-3", "layers.1") for tensor in data["tensors"]}
    verifier = parse_config(json.loads((DATA / f"{VERIFIERS[name]}.json").read_text()), name)[0]
    fields = Fields(data["config"], name)
    return detect_format(fields, tensors).read(fields, tensors, verifier.num_layers).config


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_recipe_makes_the_drafter_that_was_published(name: str):
    ours, theirs = made(name), published(name)
    # what a checkpoint holds beside its own weights, and the K it recommends, are its makers' choice
    free = {"own_embed": True, "own_head": True, "speculative_tokens": None, "max_positions": 0}
    assert replace(ours, **free) == replace(theirs, **free)


def check(*names: str, lower_only: bool) -> str:
    pairs = [f"{RECIPES / name}.yaml={DATA / VERIFIERS[name]}.json" for name in names]
    flags = ["--lower-only"] if lower_only else []
    done = subprocess.run(
        [sys.executable, "tools/check_recipes.py", *flags, *pairs],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_step_of_a_large_recipe_is_traced_and_split_over_its_mesh():
    assert "qwen3_8b_peagle: lowered" in check("qwen3_8b_peagle", lower_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_the_step_of_every_large_recipe_compiles(name: str):
    assert f"{name}: compiled" in check(name, lower_only=False)

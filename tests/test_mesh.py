"""Runs on several devices: what a mesh is, where things lie on it, and that output does not depend on it.

Sums that are split over devices round differently in their last bits, so float32 output is the same token by token only as long as no two
tokens of a step are as close as that, nor a draw as close to a boundary. The prompts and seeds of tests/mesh_run.py are such: a random
model's logits differ by far more than 1e-6, but for one step in some ten thousand.
"""

from itertools import product

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from mesh_run import Case, Outcome, run_cases
from tiny import tiny_config
from tiny_training import workspace

from jaxspec import evaluate, generate, plan, train
from jaxspec.cli import run
from jaxspec.errors import InputError
from jaxspec.sharding import AXES, Layout, make_mesh, mesh_of, misfit, parse_mesh

MESHES = ["data=8", "tensor=2", "tensor=4", "data=2,tensor=2,expert=2"]
FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma4_dense"]
DRAFTERS = [None, "eagle3", "peagle", "dflash", "dspark"]

DRAWN = '{"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}'
# Every family, drafter and mesh is in one of them.
CASES = [
    Case("llama", "dflash", "tensor=2"),
    Case("qwen3", "peagle", "tensor=4"),
    Case("qwen3_moe", "dspark", "data=2,tensor=2,expert=2", plan=DRAWN),
    Case("gemma4_dense", "eagle3", "data=8", plan=DRAWN),
]
# The kernels, run step by step; and a drafter that the mesh does not divide.
INTERPRETED = Case("llama", "dflash", "data=2,tensor=2", "interpret")
WHOLE = Case("llama", "odd", "tensor=2", plan=DRAWN)


def abstract(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, Outcome]:
    cases = [CASES[0], INTERPRETED, CASES[1], *CASES[2:], WHOLE]  # the first two share a run on one device
    return dict(zip(cases, run_cases(cases), strict=True))


# The flag ----------------------------------------------------------------------------------------------------------------------------


def test_a_mesh_is_read_by_its_axes():
    assert parse_mesh("tensor=2, data=3") == {"data": 3, "tensor": 2, "expert": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=2", "'model' is no axis; there are data, tensor, expert"),
        ("tensor=0", "the size of tensor is '0'; a whole number from 1 on is wanted"),
        ("tensor=-2", "the size of tensor is '-2'"),
        ("tensor", "the size of tensor is ''"),
        ("tensor=2.5", "the size of tensor is '2.5'"),
        ("", "'' is no axis"),
        ("data=2,data=2", "data is given twice"),
        ("data=64,tensor=2", "mesh: data 64 x tensor 2 are 128 devices; there are 1"),
    ],
)
@pytest.mark.parametrize("command", [generate, evaluate, train, plan])
def test_a_mesh_that_cannot_be_is_one_line(command, text, said, tmp_path, capsys):
    if command is plan and "devices" in said:  # which need not be here
        said = "--batch 1 is no multiple of the 64 devices along data"
    argv = ["--model", "tests/goldens/llama"]
    if command is train:
        argv = ["--config", str(workspace(tmp_path, "dflash"))]
    elif command is not plan:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt_ids": [1]}\n')
        argv += ["--prompt-file", str(prompts)]
    assert run(command.NAME, command.main, [*argv, "--mesh", text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_several_processes_use_all_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [None] * 4)
    for sizes, asked in (({"tensor": 2}, "tensor 2 are 2"), ({"data": 2, "tensor": 4}, "data 2 x tensor 4 are 8")):
        with pytest.raises(InputError, match=f"mesh: {asked} devices; there are 4 in 2 processes"):
            make_mesh(sizes)


def test_one_device_needs_no_mesh():
    assert mesh_of(None) is None and mesh_of("data=1,tensor=1") is None


def test_a_mesh_object_must_have_the_axes():
    with pytest.raises(InputError, match=r"mesh has the axes \('x',\)"):
        mesh_of(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)))
    assert mesh_of(make_mesh({"data": 1})) is not None


# What lies where ---------------------------------------------------------------------------------------------------------------------


def test_dimensions_that_do_not_divide_are_named_with_what_does():
    parameters = {("q",): ((6, 8, 32), ("q_heads", "head_dim", "embed")), ("up",): ((48, 32), ("mlp", "embed"))}
    assert misfit(abstract(tensor=3), parameters) is None
    assert (
        misfit(abstract(tensor=4), parameters)
        == "tensor=4 does not divide the 6 q_heads of q; tensor may be 1, 2, 3, 6"
    )
    few = {**parameters, ("k",): ((2, 8, 32), ("kv_heads", "head_dim", "embed"))}
    assert misfit(abstract(tensor=6), few) is None
    assert misfit(abstract(tensor=3), few) == "tensor=3 does not divide the 2 kv_heads of k; tensor may be 1, 2, 6"
    experts = {**parameters, ("gate",): ((6, 12, 32), ("expert", "mlp", "embed"))}
    assert (
        misfit(abstract(expert=4), experts) == "expert=4 does not divide the 6 expert of gate; expert may be 1, 2, 3, 6"
    )


def test_key_value_heads_are_repeated_up_to_one_a_device():
    config = tiny_config()
    assert [layer.attention.kv_heads for layer in config.layers] == [2, 2]
    fitted = Layout(abstract(tensor=4)).fitted(config)
    assert [layer.attention.kv_heads for layer in fitted.layers] == [4, 4]
    assert Layout(abstract(tensor=2)).fitted(config) == config
    assert Layout(abstract(tensor=4), replicated=True).fitted(config) == config


def test_parts_and_repetitions_are_said(outcomes):
    case = CASES[1]
    assert any("more devices than the verifier has key/value heads (2)" in line for line in outcomes[case].said)
    spread = outcomes[case].spread
    assert spread["0.layers.0.attention.k.weight"] == spread["1.layers.0.attention.q.weight"] == 4
    assert spread["0.layers.0.input_norm.weight"] == 1
    experts = outcomes[CASES[2]].spread
    assert experts["0.layers.0.moe.gate.weight"] == 4 and experts["0.layers.0.attention.q.weight"] == 2


# The same tokens ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, INTERPRETED, WHOLE], ids=str)
def test_output_does_not_depend_on_the_mesh(outcomes, case):
    assert outcomes[case].several == outcomes[case].one


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_output_of_every_pair_does_not_depend_on_any_mesh(family):
    cases = [Case(family, drafter, mesh, plan=drafter and DRAWN) for drafter, mesh in product(DRAFTERS, MESHES)]
    cases += [Case(family, drafter, "data=2,tensor=2", "interpret") for drafter in DRAFTERS]
    for case, outcome in zip(cases, run_cases(cases), strict=True):
        assert outcome.several == outcome.one, case
        # What the rule says: docs/distributed.md.
        assert not [name for name in outcome.collectives if name.startswith(("accept", "commit"))], case


# Exchanges between devices -----------------------------------------------------------------------------------------------------------


def test_a_cycle_exchanges_what_the_rule_says_and_no_more(outcomes):
    """Llama of 3 layers and DFlash of 2: an embedding, and a product behind attention and one behind the MLP of each layer, are summed;
    the logits are gathered."""
    assert outcomes[CASES[0]].collectives == {
        "draft all-reduce": 1 + 2 * 2,
        "draft all-gather": 1,
        "verify all-reduce": 1 + 2 * 3,
        "verify all-gather": 1,
    }


def test_rows_on_different_devices_exchange_nothing_in_a_cycle(outcomes):
    assert not [name for name in outcomes[CASES[3]].collectives if not name.startswith("other")]


def test_kernels_exchange_no_more_than_what_they_replace(outcomes):
    found = {name: number for name, number in outcomes[INTERPRETED].collectives.items() if not name.startswith("other")}
    assert found == outcomes[CASES[0]].collectives


def test_a_drafter_that_lies_whole_exchanges_nothing(outcomes):
    assert "the drafter lies whole on every device: tensor=2 does not divide the 45 mlp" in outcomes[WHOLE].said[0]
    assert not [name for name in outcomes[WHOLE].collectives if not name.startswith(("verify", "other"))]
    assert {number for name, number in outcomes[WHOLE].spread.items() if name.startswith("1.")} == {1}

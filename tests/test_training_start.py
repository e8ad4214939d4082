"""Training that begins from a checkpoint: fine-tuning, warm starts, heads alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_drafters import REDUCED, block, eagle, gemma, spark
from tiny_drafters import write as write_drafter
from tiny_training import workspace
from trainer_run import METHODS, command, trainer

from jaxspec.checkpoint.safetensors import SafetensorsSource
from jaxspec.errors import InputError
from jaxspec.training.recipe import read_recipe
from jaxspec.training.setup import Setup, set_up
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.implementation import use


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


def test_a_confidence_head_that_sees_a_sequential_head_cannot_lose_it(tmp_path: Path):
    start = spark("vanilla", **REDUCED)
    assert start.block.confidence.with_markov
    with pytest.raises(
        InputError, match=r"drafter\.markov\.rank is 0, but the confidence head .* give drafter\.confidence too"
    ):
        started(tmp_path, "dspark", start, markov={"rank": 0})
    (tmp_path / "again").mkdir()
    setup, _ = started(tmp_path / "again", "dspark", start, markov={"rank": 0}, confidence={"enabled": True})
    assert setup.drafter.config.block is not None and setup.drafter.config.block.markov is None

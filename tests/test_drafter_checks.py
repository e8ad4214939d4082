"""Bad drafter checkpoints, drafters of other verifiers, too many drafts, and what a format cannot hold: one line each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_model
from tiny_drafters import (
    OWN,
    REDUCED,
    VD,
    D,
    V,
    block,
    content,
    eagle,
    edit_config,
    edit_tensors,
    gemma,
    layers,
    spark,
    write,
)

from jaxspec import load_drafter, load_verifier
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.drafters.checks import check_drafts
from jaxspec.checkpoint.drafters.content import read_content
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.fit import fit
from jaxspec.checkpoint.drafters.formats import FORMATS
from jaxspec.checkpoint.drafters.load import EMBED_PATH, open_drafter
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.drafters.transformer import read_windows
from jaxspec.checkpoint.load import LoadedVerifier
from jaxspec.drafters.config import BlockConfig, ConfidenceConfig, DrafterConfig, EagleConfig, MarkovConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.hf import Fields

FC_NORM = EagleConfig(norm_before_residual=False, fc_norm=True)
SLIDING = {"windows": (7, None)}
NOT_FROM_ANCHOR = spark(
    block=BlockConfig(6, False, MarkovConfig("vanilla", 4), ConfidenceConfig(True)), speculative_tokens=5
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LoadedVerifier:
    return load_verifier(write_model(tmp_path_factory.mktemp("verifier") / "model"))


def config_edit(**changes: Any) -> tuple[Any, Any]:
    return (lambda data: data.update(changes), None)


def decoder_edit(**changes: Any) -> tuple[Any, Any]:
    return (lambda data: data["transformer_layer_config"].update(changes), None)


def tensor_edit(change: Any) -> tuple[Any, Any]:
    return (None, change)


def put(name: str, value: np.ndarray) -> tuple[Any, Any]:
    return tensor_edit(lambda tensors: tensors.update({name: value}))


def shuffled(tensors: dict[str, np.ndarray]) -> None:
    ids = tensors["d2t"] + np.arange(VD)
    ids[[3, 4]] = ids[[4, 3]]
    tensors["d2t"] = ids - np.arange(VD)


def unmarked(tensors: dict[str, np.ndarray]) -> None:
    first, other = np.flatnonzero(tensors["t2d"])[0], np.flatnonzero(~tensors["t2d"])[0]
    tensors["t2d"][[first, other]] = [False, True]


def outside(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"][-1] += V


def with_nan(tensors: dict[str, np.ndarray]) -> None:
    tensors["fc.weight"][0, 0] = np.nan


def only_config(data: dict[str, Any]) -> None:
    del data["mask_token_id"]


REDUCED_FLASH, FLASH = block("dflash", **REDUCED), block("dflash")
REFUSED = {
    "d2t missing": (
        REDUCED_FLASH,
        "speculators",
        tensor_edit(lambda t: t.pop("d2t")),
        "tensor d2t is wanted; it is missing",
    ),
    "d2t out of order": (REDUCED_FLASH, "speculators", tensor_edit(shuffled), "they must increase"),
    "d2t outside": (REDUCED_FLASH, "speculators", tensor_edit(outside), f"vocab_size is {V}"),
    "d2t of another size": (
        REDUCED_FLASH,
        "speculators",
        put("d2t", np.zeros(5, np.int64)),
        rf"d2t is I64 \[5\]; whole numbers or bool \[{VD}\]",
    ),
    "t2d differs": (REDUCED_FLASH, "speculators", tensor_edit(unmarked), "t2d marks other verifier ids than d2t"),
    "d2t without need": (FLASH, "speculators", put("d2t", np.ones(V, np.int64)), "draft_vocab_size equals vocab_size"),
    "draft vocabulary too large": (
        FLASH,
        "speculators",
        config_edit(draft_vocab_size=999),
        "draft_vocab_size is 999, more",
    ),
    "mask token missing": (FLASH, "speculators", (only_config, None), "has no mask token; mask_token_id is wanted"),
    "mask token outside": (
        FLASH,
        "speculators",
        config_edit(mask_token_id=V),
        f"mask_token_id is {V}, not an id .* 0 to 258",
    ),
    "not finite": (FLASH, "speculators", tensor_edit(with_nan), "tensor fc.weight has NaN or Inf"),
    "rank 0 with the Markov feature": (
        spark(),
        "speculators",
        config_edit(markov_rank=0),
        "confidence_head_with_markov is true, but markov_rank is 0",
    ),
    "another kind of head": (
        spark(),
        "speculators",
        config_edit(markov_head_type="lstm"),
        "markov_head_type is 'lstm'",
    ),
    "another method": (
        FLASH,
        "speculators",
        config_edit(speculators_model_type="dflash2"),
        "'dflash2'; supported: eagle3",
    ),
    "another decoder": (FLASH, "speculators", decoder_edit(model_type="qwen3_next"), "model_type is 'qwen3_next'"),
    "another target width": (FLASH, "speculators", config_edit(target_hidden_size=64), "target_hidden_size is 64, not"),
    "norms before fc twice": (
        eagle("eagle3"),
        "speculators",
        config_edit(norm_before_fc=True, fc_norm=True),
        "only one of them can be",
    ),
    "a trained embedding missing": (
        eagle("peagle"),
        "speculators",
        tensor_edit(lambda t: t.pop("embed_tokens.weight")),
        "embed_requires_grad is true",
    ),
    "decreasing taps": (
        FLASH,
        "speculators",
        config_edit(aux_hidden_state_layer_ids=[2, 1]),
        "distinct and increasing",
    ),
    "attention sinks": (FLASH, "z-lab", config_edit(attention_sink_bias=True), "attention_sink_bias is True"),
    "scaled values": (FLASH, "z-lab", config_edit(attention_value_scale=0.5), "attention_value_scale is 0.5"),
    "convolutions": (FLASH, "z-lab", config_edit(conv_kernel_size=2), "conv_kernel_size is 2"),
    "other rope pairs": (FLASH, "z-lab", config_edit(is_neox_style=False), "is_neox_style is False"),
    "another window key": (FLASH, "z-lab", config_edit(use_swa=True), "use_swa is True"),
    "another projector": (FLASH, "z-lab", config_edit(projector_type="domino"), "projector_type is 'domino'"),
    "quantised": (
        FLASH,
        "z-lab",
        config_edit(quantization_config={"quant_method": "fp8"}),
        "quantization_config is set",
    ),
    "no theta": (FLASH, "z-lab", config_edit(rope_theta=None), "rope_theta is missing"),
    "sliding layers in DeepSpec": (
        spark(**OWN),
        "deepspec",
        config_edit(layer_types=["sliding_attention", "full_attention"]),
        "another type than full_attention",
    ),
    "two EAGLE layers in DeepSpec": (
        eagle("eagle3", layers=layers(1, wide=True, causal=True)),
        "deepspec",
        config_edit(num_hidden_layers=2, layer_types=None),
        "DeepSpec's EAGLE-3 is supported with one layer",
    ),
    "a window for unnamed layers": (
        eagle("eagle3"),
        "eagle3",
        config_edit(sliding_window=512, use_sliding_window=True, layer_types=None),
        "sliding_window is 512, but no layer_types",
    ),
    "the last hidden state alone": (
        eagle("eagle3"),
        "eagle3",
        config_edit(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false",
    ),
    "an extra tensor": (
        FLASH,
        "z-lab",
        put("layers.0.mlp_conv.base_kernel", np.zeros(3, np.float32)),
        "extra: layers.0.mlp",
    ),
    "one parameter under two names": (
        FLASH,
        "z-lab",
        put("model.fc.weight", np.zeros((D, 2 * D), np.float32)),
        "tensors .*fc.weight and .*fc.weight are the same parameter",
    ),
    "rope by layer type": (
        FLASH,
        "speculators",
        decoder_edit(rope_theta=None, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
        "rope_parameters differs by layer type",
    ),
    "rope by layer type in a flat file": (
        eagle("eagle3"),
        "eagle3",
        config_edit(rope_theta=None, rope_parameters={"sliding_attention": {"rope_theta": 1e6}}),
        "rope_parameters differs by layer type",
    ),
    "too few temperatures": (
        spark(),
        "speculators",
        config_edit(jaxspec={"confidence_temperatures": [1.0] * 5}),
        "has 5 confidence temperatures, and the block drafts 6",
    ),
    "a tensor of another shape": (
        FLASH,
        "z-lab",
        put("fc.weight", np.zeros((D, D), np.float32)),
        r"fc.weight is \[32, 32\]",
    ),
}


@pytest.mark.parametrize(("config", "to", "edits", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_checkpoints_are_refused_with_one_line(
    config: DrafterConfig, to: str, edits: tuple[Any, Any], message: str, tmp_path: Path
):
    directory = write(tmp_path / "drafter", config, to)
    change_config, change_tensors = edits
    if change_config is not None:
        edit_config(directory, change_config)
    if change_tensors is not None:
        edit_tensors(directory, change_tensors)
    with pytest.raises(InputError, match=message) as refused:
        read_content(open_drafter(directory))
    assert "\n" not in str(refused.value)
    assert str(directory) in str(refused.value)


def test_a_drafter_of_another_verifier_is_refused(tmp_path: Path, verifier: LoadedVerifier):
    cases = {
        "width 64; this verifier's is 32": replace(block("dflash"), width=64),
        "300 tokens; this verifier has 259": block("dflash", vocab_size=300, draft_vocab_size=300),
        r"aux layer ids \[1, 5\] must lie in 0..2 for a verifier of 2 layers": block("dflash", taps=(1, 5)),
    }
    for index, (message, config) in enumerate(cases.items()):
        directory = write(tmp_path / str(index), config, "speculators", VerifierFacts())
        with pytest.raises(InputError, match=message):
            load_drafter(directory, verifier=verifier)
    stored = write(tmp_path / "orbax", block("dflash", taps=(1, 5)), "orbax", VerifierFacts())
    with pytest.raises(InputError, match="taps aux layer 5; this verifier's go up to 2"):
        load_drafter(stored, verifier=verifier)
    directory = write(tmp_path / "layers", block("dflash"), "z-lab")
    edit_config(directory, lambda data: data.update(num_target_layers=36))
    with pytest.raises(InputError, match="verifier of 36 layers; this verifier has 2"):
        load_drafter(directory, verifier=verifier)


def test_borrowing_needs_a_verifier(tmp_path: Path):
    with pytest.raises(InputError, match="no embed and no head of its own: give the verifier"):
        load_drafter(write(tmp_path / "drafter", block("dflash"), "z-lab"), verifier=None)


def test_a_drafter_with_its_own_embedding_and_head_needs_none(tmp_path: Path):
    loaded = load_drafter(write(tmp_path / "drafter", gemma(), "deepspec"), verifier=None, dtype="float32")
    assert loaded.borrowed == ()
    own = content(gemma()).parameters[EMBED_PATH].astype(np.float32)
    np.testing.assert_array_equal(loaded.module.vocabulary.embed.weight[...], own)


def test_a_verifier_is_no_drafter(tmp_path: Path, verifier: LoadedVerifier):
    with pytest.raises(InputError, match="this is a model, not a drafter; give it as --model"):
        load_drafter(verifier.path, verifier=verifier)
    with pytest.raises(InputError, match="DFlash drafter, not a verifier; give it as --drafter"):
        load_verifier(write(tmp_path / "drafter", block("dflash"), "z-lab"))
    legacy = write(tmp_path / "legacy", eagle("eagle3"), "eagle3")
    edit_config(legacy, lambda data: data.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(InputError, match="EAGLE-3 drafter, not a verifier"):
        load_verifier(legacy)


@pytest.mark.parametrize(("config", "most"), [(block("dflash"), 5), (spark(), 6), (NOT_FROM_ANCHOR, 5)])
def test_more_drafts_than_the_block_gives_are_refused(config: DrafterConfig, most: int):
    check_drafts(config, most)
    with pytest.raises(InputError, match=f"is {most + 1}, but this .* makes at most {most} a cycle"):
        check_drafts(config, most + 1)
    with pytest.raises(InputError, match="at least 1"):
        check_drafts(config, 0)


def test_eagle_drafters_set_no_bound():
    check_drafts(eagle("peagle"), 40)


LOSSES = {
    "dspark as z-lab": (spark(), "z-lab", "no sequential head and no confidence head.*--drop markov,confidence"),
    "reduced as z-lab": (block("dflash", **REDUCED), "z-lab", "has no d2t"),
    "from anchor as z-lab": (block("dflash", block=BlockConfig(6, True)), "z-lab", "the anchor's slot drafts nothing"),
    "window as z-lab": (
        block("dflash", layers=layers(**SLIDING, from_block=True)),
        "z-lab",
        "window_from_block is True.*--drop window",
    ),
    "own head as z-lab": (block("dflash", own_head=True), "z-lab", "has one .*--drop head"),
    "gemma as speculators": (gemma(), "speculators", "has no Gemma-4 layers"),
    "scaled as speculators": (block("dflash", embed_scale=2.0), "speculators", "embed_scale is 2.0, and would be 1.0"),
    "causal as speculators": (block("dflash", layers=layers(causal=True)), "speculators", "causal is True"),
    "eagle flags as deepspec": (
        eagle("eagle3", eagle=FC_NORM, layers=layers(1, wide=True, causal=True)),
        "deepspec",
        "fc_norm is True, and would be False",
    ),
    "llama eagle as deepspec": (eagle("eagle3"), "deepspec", "qk_norm is False"),
    "peagle as deepspec": (eagle("peagle"), "deepspec", "not peagle"),
    "dflash as eagle3": (block("dflash"), "eagle3", "holds EAGLE-3 and P-EAGLE"),
    "eagle3 as z-lab": (eagle("eagle3"), "z-lab", "not eagle3"),
    "borrowed as deepspec": (spark(), "deepspec", "give --verifier"),
}


@pytest.mark.parametrize(("config", "to", "message"), LOSSES.values(), ids=LOSSES)
def test_what_a_format_cannot_hold_is_refused(config: DrafterConfig, to: str, message: str):
    with pytest.raises(InputError, match=message):
        fit(content(config), FORMATS[to])


def test_dropped_parts_are_named(tmp_path: Path):
    config = replace(NOT_FROM_ANCHOR, layers=layers(**SLIDING, from_block=True))
    drop = ("markov", "confidence", "window")
    notes = save_drafter(tmp_path / "drafter", content(config), "z-lab", drop=drop)
    assert notes[:2] == ("dropped the sequential head", "dropped the confidence head")
    held = open_drafter(tmp_path / "drafter").config
    assert held == block("dflash", layers=layers(**SLIDING))


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (("markov",), "drop both: --drop markov,confidence"),
        (("wings",), "--drop wings: known are markov, confidence"),
        (("head",), "--drop head: this drafter has none"),
    ],
)
def test_what_cannot_be_dropped_is_an_error(drop: tuple[str, ...], message: str):
    with pytest.raises(InputError, match=message):
        fit(content(spark()), FORMATS["speculators"], drop)


def test_a_mask_embedding_beside_the_weights_is_not_passed_over(tmp_path: Path):
    directory = write(tmp_path / "drafter", FLASH, "z-lab")
    (directory / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"mask_embedding\.pt: a mask slot's embedding of its own is not supported"):
        open_drafter(directory)


def test_a_qwen3_window_without_a_size_is_transformers_own():
    data = {"num_hidden_layers": 2, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert read_windows(Fields(data, "f"), qwen3=True) == [(True, 4096), (False, None)]
    assert read_windows(Fields(data | {"sliding_window": None}, "f"), qwen3=True) == [(True, None), (False, None)]
    assert read_windows(Fields(data, "f"), qwen3=False) == [(True, None), (False, None)]


def test_orbax_of_parts_that_do_not_go_together_is_named(tmp_path: Path):
    directory = write(tmp_path / "drafter", spark(), "orbax")
    manifest = json.loads((directory / "jaxspec.json").read_text())
    manifest["config"]["block"] = None
    (directory / "jaxspec.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=f"{directory} config: ") as refused:
        open_drafter(directory)
    assert "\n" not in str(refused.value)


def test_orbax_keeps_what_the_verifier_tells_of_itself(tmp_path: Path, verifier: LoadedVerifier):
    drafter = write(tmp_path / "drafter", FLASH, "z-lab")
    convert(drafter, tmp_path / "orbax", "orbax", verifier=verifier.path)
    found = open_drafter(tmp_path / "orbax").verifier
    assert (found.name, found.num_layers) == (str(verifier.path), verifier.config.num_layers)
    wide = write(tmp_path / "wide", replace(FLASH, width=64, layers=FLASH.layers), "orbax")
    with pytest.raises(InputError, match="width 64"):
        convert(wide, tmp_path / "other", "orbax", verifier=verifier.path)

"""Drafter checkpoints: every format read, written, told apart and checked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import write_model
from tiny_drafters import (
    MASK,
    OWN,
    REDUCED,
    TAPS,
    VD,
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
from jaxspec.checkpoint.drafters.content import content_of, read_content
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import HEAD_PATH, open_drafter
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.load import LoadedVerifier
from jaxspec.config import RopeConfig
from jaxspec.drafters.config import BlockConfig, ConfidenceConfig, DrafterConfig, EagleConfig, MarkovConfig
from jaxspec.errors import InputError

YARN = RopeConfig(1e6, 8, "yarn", factor=4.0, original_max_positions=128, beta_fast=16.0, truncate=False)
LLAMA3 = RopeConfig(5e5, 8, "llama3", factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0)


def roped(config: DrafterConfig, rope: RopeConfig) -> DrafterConfig:
    made = tuple(replace(layer, attention=replace(layer.attention, rope=rope)) for layer in config.layers)
    return replace(config, layers=made)


FLAGS = EagleConfig(norm_before_residual=True, norm_before_fc=True, norm_output=True)
FC_NORM = EagleConfig(norm_before_residual=False, fc_norm=True)
SLIDING = {"windows": (7, None)}

EAGLES = {
    "eagle3": eagle("eagle3"),
    "eagle3 flags, reduced": eagle("eagle3", eagle=FLAGS, draft_vocab_size=VD),
    "eagle3 fc_norm, llama3 rope": roped(eagle("eagle3", eagle=FC_NORM), LLAMA3),
    "eagle3 qwen3 style": eagle("eagle3", layers=layers(1, wide=True, causal=True)),
    "eagle3 two layers, sliding, biases": eagle(
        "eagle3", layers=layers(wide=True, qk_norm=False, causal=True, windows=(None, 9), bias=True)
    ),
    "peagle": eagle("peagle", speculative_tokens=8),
    "peagle reduced, flags": eagle("peagle", draft_vocab_size=VD, eagle=FLAGS, speculative_tokens=8),
}
BLOCKS = {
    "dflash": block("dflash"),
    "dflash reduced": block("dflash", **REDUCED),
    "dflash sliding": block("dflash", layers=layers(**SLIDING, from_block=True)),
    "dflash sliding both ways": block("dflash", layers=layers(**SLIDING, from_block=True, causal=False)),
    "dflash from anchor, yarn": roped(block("dflash", block=BlockConfig(6, True), speculative_tokens=6), YARN),
    "dspark vanilla": spark(),
    "dspark gated, reduced": spark("gated", with_markov=False, **REDUCED),
    "dspark rnn, sliding": spark("rnn", layers=layers(**SLIDING, from_block=True)),
    "dspark not from anchor": spark(
        block=BlockConfig(6, False, MarkovConfig("vanilla", 4), ConfidenceConfig(True)), speculative_tokens=5
    ),
    "dspark calibrated": spark(
        block=BlockConfig(6, True, MarkovConfig("vanilla", 4), ConfidenceConfig(True, (1.5, 1.25, 1.0, 0.5, 2.0, 3.0)))
    ),
    "dspark without heads": block("dspark", block=BlockConfig(6, True)),
    "dspark confidence alone": block("dspark", block=BlockConfig(6, True, None, ConfidenceConfig(False))),
}
ROUND_TRIPS = (
    *(("speculators", name, config) for name, config in (EAGLES | BLOCKS).items()),
    *(("eagle3", name, config) for name, config in EAGLES.items()),
    ("eagle3", "borrowed embedding", eagle("eagle3", own_embed=False)),
    ("z-lab", "dflash", BLOCKS["dflash"]),
    ("z-lab", "sliding", block("dflash", layers=layers(**SLIDING))),
    ("z-lab", "all causal", block("dflash", layers=layers(causal=True))),
    ("z-lab", "sliding both ways", block("dflash", layers=layers(**SLIDING, causal=False))),
    ("z-lab", "scaled", block("dflash", embed_scale=2.5, logit_scale=0.5, logit_softcap=20.0)),
    ("z-lab", "linear rope", roped(BLOCKS["dflash"], RopeConfig(1e5, 8, "linear", factor=2.0))),
    ("z-lab", "fewer drafts", block("dflash", speculative_tokens=3)),
    *(("deepspec", kind, spark(kind, **OWN)) for kind in ("vanilla", "gated", "rnn")),
    ("deepspec", "calibrated", replace(BLOCKS["dspark calibrated"], **OWN)),
    ("deepspec", "dflash", block("dflash", block=BlockConfig(6, True), speculative_tokens=6, **OWN)),
    ("deepspec", "eagle3", eagle("eagle3", layers=layers(1, wide=True, causal=True), speculative_tokens=7)),
    ("deepspec", "gemma", gemma()),
    ("deepspec", "gemma with values", gemma(v_from_k=False)),
    *(("orbax", name, config) for name, config in (EAGLES | BLOCKS | {"gemma": gemma()}).items()),
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LoadedVerifier:
    return load_verifier(write_model(tmp_path_factory.mktemp("verifier") / "model"))


@pytest.mark.parametrize(("to", "name", "config"), ROUND_TRIPS, ids=[f"{to}: {name}" for to, name, _ in ROUND_TRIPS])
def test_export_then_import_is_bit_exact(to: str, name: str, config: DrafterConfig, tmp_path: Path):
    dtype = np.float32 if "reduced" in name else ml_dtypes.bfloat16
    original = content(config, dtype)
    save_drafter(tmp_path / "drafter", original, to)
    opened = open_drafter(tmp_path / "drafter")
    read = read_content(opened)
    assert opened.format == to
    assert read.config == config
    assert read.parameters.keys() == original.parameters.keys()
    for path, value in original.parameters.items():
        assert read.parameters[path].dtype == dtype
        np.testing.assert_array_equal(read.parameters[path], value)
    if config.reduced_vocab:
        np.testing.assert_array_equal(read.target_ids, original.target_ids)
    else:
        assert read.target_ids is None


def test_shards_are_read_as_one_file_is(tmp_path: Path):
    save_drafter(tmp_path / "one", content(spark()), "speculators")
    save_drafter(tmp_path / "many", content(spark()), "speculators", max_shard_bytes=8_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    one, many = (read_content(open_drafter(tmp_path / name)) for name in ("one", "many"))
    for path, value in one.parameters.items():
        np.testing.assert_array_equal(many.parameters[path], value)


def test_maps_are_stored_as_speculators_stores_them(tmp_path: Path):
    config = block("dflash", **REDUCED)
    original = content(config)
    save_drafter(tmp_path / "drafter", original, "speculators")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(VD), original.target_ids)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), original.target_ids)
    assert "embed_tokens.weight" not in tensors


def test_a_written_dtype_is_every_weights(tmp_path: Path):
    save_drafter(tmp_path / "drafter", content(spark(**REDUCED), np.float32), "speculators", dtype=np.dtype("bfloat16"))
    dtypes = {str(value.dtype) for value in load_file(tmp_path / "drafter" / "model.safetensors").values()}
    assert dtypes == {"bfloat16", "int64", "bool"}
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"


def test_embedding_and_head_are_the_verifiers_own_arrays(tmp_path: Path, verifier: LoadedVerifier):
    loaded = load_drafter(write(tmp_path / "drafter", block("dflash"), "z-lab"), verifier=verifier)
    assert loaded.borrowed == ("embed", "head")
    lent = verifier.module.embed.weight[...].unsafe_buffer_pointer()
    assert loaded.module.vocabulary.embed.weight[...].unsafe_buffer_pointer() == lent
    assert loaded.module.vocabulary.head.weight[...].unsafe_buffer_pointer() == lent  # the verifier's are tied


def test_a_borrowed_head_of_a_reduced_vocabulary_has_the_rows_of_its_tokens(tmp_path: Path, verifier: LoadedVerifier):
    config = block("dflash", draft_vocab_size=VD)
    loaded = load_drafter(write(tmp_path / "drafter", config, "speculators"), verifier=verifier)
    rows = np.asarray(verifier.module.embed.weight[...])[content(config).target_ids]
    np.testing.assert_array_equal(loaded.module.vocabulary.head.weight[...], rows)
    np.testing.assert_array_equal(loaded.module.vocabulary.target_ids[...], content(config).target_ids)


def test_an_own_head_is_not_replaced(tmp_path: Path, verifier: LoadedVerifier):
    config = block("dflash", **REDUCED)
    loaded = load_drafter(write(tmp_path / "drafter", config, "speculators"), verifier=verifier)
    own = content(config).parameters[HEAD_PATH].astype(np.float32)
    np.testing.assert_array_equal(loaded.module.vocabulary.head.weight[...], own)
    assert loaded.borrowed == ("embed",)


def test_what_was_loaded_can_be_written_again(tmp_path: Path, verifier: LoadedVerifier):
    first = load_drafter(write(tmp_path / "first", spark("rnn"), "speculators"), verifier=verifier)
    save_drafter(tmp_path / "second", content_of(first), "speculators", dtype=np.dtype("bfloat16"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value)
    assert json.loads((tmp_path / "first/config.json").read_text()) == json.loads(
        (tmp_path / "second/config.json").read_text()
    )


def test_the_path_says_nothing_about_the_format(tmp_path: Path, verifier: LoadedVerifier):
    directory = write(tmp_path / "my eagle-x drafter", block("dflash"), "z-lab")
    loaded = load_drafter(directory, verifier=verifier)
    assert (loaded.format, loaded.config.method) == ("z-lab", "dflash")


def test_dflash_keys_may_stand_at_top_level(tmp_path: Path):
    config = block("dflash", embed_scale=2.0)
    nested, top = (write(tmp_path / name, config, "z-lab") for name in ("nested", "top"))

    def lift(data: dict[str, Any]) -> None:
        data.update(data.pop("dflash_config"))

    def sink(data: dict[str, Any]) -> None:
        data["dflash_config"]["block_size"] = data.pop("block_size")

    edit_config(top, lift)
    edit_config(nested, sink)
    assert open_drafter(nested).config == open_drafter(top).config == config


def test_specforge_dspark_is_read_from_dflash_config(tmp_path: Path):
    config = spark()
    directory = write(tmp_path / "drafter", replace(config, **OWN), "deepspec")

    def as_specforge(data: dict[str, Any]) -> None:
        names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
        data["dflash_config"] = {name: data.pop(name) for name in (*names, "confidence_head_with_markov")}
        data["dflash_config"] |= {"projector_type": "dspark", "confidence_head_alpha": 1.0, "attention_mode": "gqa"}
        data["architectures"] = ["DSparkDraftModel"]

    def older_names(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(("markov_head", "confidence_head"))]:
            tensors[f"logit_head.{name}"] = tensors.pop(name)
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    edit_config(directory, as_specforge)
    edit_tensors(directory, older_names)
    opened = open_drafter(directory)
    assert opened.format == "z-lab"
    assert opened.config == config


def test_legacy_eagle3_needs_few_keys(tmp_path: Path):
    """As the first published files are: another architecture's name, no theta, no taps, midlayer names."""
    directory = write(tmp_path / "drafter", eagle("eagle3", draft_vocab_size=VD, own_embed=False), "eagle3")

    def first_files(data: dict[str, Any]) -> None:
        kept = ("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        heads = ("num_attention_heads", "num_key_value_heads", "model_type")
        for name in data.keys() - set(kept) - set(heads):
            del data[name]
        data["architectures"] = ["LlamaForCausalLM"]

    edit_config(directory, first_files)
    names = load_file(directory / "model.safetensors").keys()
    assert "midlayer.hidden_norm.weight" in names
    edit_config(directory, lambda data: data.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}))
    opened = open_drafter(directory)
    attention = opened.config.layers[0].attention
    assert (opened.format, opened.config.method) == ("eagle3", "eagle3")
    assert opened.config.taps == (1, 2)
    assert attention.rope.theta == 10000.0
    assert opened.config.eagle == EagleConfig(norm_before_residual=False)


def test_default_taps_follow_the_verifier(tmp_path: Path):
    config = eagle("eagle3", taps=(2, 4, 5))
    directory = write(tmp_path / "drafter", config, "eagle3", VerifierFacts(num_layers=8))

    def unnamed(data: dict[str, Any]) -> None:
        del data["eagle_aux_hidden_state_layer_ids"], data["eagle_config"]

    edit_config(directory, unnamed)
    assert open_drafter(directory, verifier_layers=8).config.taps == (2, 4, 5)
    with pytest.raises(InputError, match=r"names no tap layers.* give the verifier"):
        open_drafter(directory)


def test_ptd_token_makes_a_legacy_file_a_peagle(tmp_path: Path):
    directory = write(tmp_path / "drafter", eagle("peagle"), "eagle3")
    edit_config(directory, lambda data: data.pop("mask_token_id"))
    assert open_drafter(directory).config.mask_token == MASK
    edit_tensors(directory, lambda tensors: tensors.pop("mask_hidden"))
    with pytest.raises(InputError, match="missing: mask_hidden"):
        open_drafter(directory)


def test_a_models_prefix_is_no_part_of_the_names(tmp_path: Path):
    directory = write(tmp_path / "drafter", eagle("eagle3"), "eagle3")

    def prefixed(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name != "lm_head.weight"]:
            tensors[f"model.{name}"] = tensors.pop(name)

    edit_tensors(directory, prefixed)
    assert open_drafter(directory).config.method == "eagle3"


# speculators' rules of sight: full layers see the whole block, sliding ones what is before them, unless told otherwise; a sliding
# layer without a window is a full one there (create_anchor_block_mask_mod)
@pytest.mark.parametrize(
    ("changes", "non_causal", "expected"),
    [
        ({}, None, [(False, None, False), (False, None, False)]),
        ({"use_sliding_window": True, "sliding_window": 7}, None, [(True, 7, True), (False, None, False)]),
        ({"use_sliding_window": True, "sliding_window": 7}, True, [(False, 7, True), (False, None, False)]),
        ({"use_sliding_window": False, "sliding_window": 7}, None, [(False, None, False), (False, None, False)]),
    ],
)
def test_speculators_layers_see_as_in_training(
    changes: dict[str, Any], non_causal: bool | None, expected: list, tmp_path: Path
):
    directory = write(tmp_path / "drafter", block("dflash"), "speculators")

    def change(data: dict[str, Any]) -> None:
        data["transformer_layer_config"] |= {"layer_types": ["sliding_attention", "full_attention"], **changes}
        data["sliding_window_non_causal"] = non_causal

    edit_config(directory, change)
    seen = [layer.attention for layer in open_drafter(directory).config.layers]
    assert [(layer.causal, layer.window, layer.window_from_block) for layer in seen] == expected


# dflash 0.1: is_causal, then vLLM's causal, for all layers; else by the layer's type
@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        ({}, {}, [True, False]),
        ({"is_causal": False}, {}, [False, False]),
        ({"is_causal": True}, {"causal": False}, [True, True]),
        ({}, {"causal": True}, [True, True]),
        ({}, {"is_causal": False}, [False, False]),
    ],
)
def test_zlab_layers_see_as_configured(top: dict, nested: dict, expected: list[bool], tmp_path: Path):
    directory = write(tmp_path / "drafter", block("dflash", layers=layers(**SLIDING)), "z-lab")

    def change(data: dict[str, Any]) -> None:
        data |= top
        data["dflash_config"] |= nested

    edit_config(directory, change)
    seen = [layer.attention for layer in open_drafter(directory).config.layers]
    assert [layer.causal for layer in seen] == expected
    assert [(layer.window, layer.window_from_block) for layer in seen] == [(7, False), (None, False)]


@pytest.mark.parametrize(("to", "absent"), [("speculators", False), ("deepspec", True)])
def test_whether_the_anchor_drafts_where_the_file_does_not_say(to: str, absent: bool, tmp_path: Path):
    directory = write(tmp_path / "drafter", spark(**OWN), to)
    edit_config(directory, lambda data: data.pop("sample_from_anchor", None))
    config = open_drafter(directory).config
    assert config.block is not None
    assert config.block.sample_from_anchor is absent
    assert config.max_drafts == (6 if absent else 5)


def test_speculators_keys_that_equal_transformers_defaults_may_be_absent(tmp_path: Path):
    directory = write(tmp_path / "drafter", block("dflash"), "speculators")
    edit_config(directory, lambda data: data["transformer_layer_config"].pop("rope_parameters"))
    edit_config(directory, lambda data: data["transformer_layer_config"].pop("rms_norm_eps"))
    config = open_drafter(directory).config
    assert config.layers[0].attention.rope.theta == 10000.0
    assert config.norm_eps == 1e-6


def test_speculators_takes_the_sliding_rope_of_nested_ones(tmp_path: Path):
    directory = write(tmp_path / "drafter", block("dflash"), "speculators")
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    edit_config(directory, lambda data: data["transformer_layer_config"].update(rope_parameters=nested))
    assert open_drafter(directory).config.layers[1].attention.rope == RopeConfig(1e4, 8)


def test_taps_are_written_in_each_formats_convention(tmp_path: Path):
    written = {
        to: json.loads((write(tmp_path / to, block("dflash"), to) / "config.json").read_text())
        for to in ("speculators", "z-lab")
    }
    assert written["speculators"]["aux_hidden_state_layer_ids"] == list(TAPS)
    assert written["z-lab"]["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in TAPS]

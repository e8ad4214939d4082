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
from jaxspec.checkpoint.drafters.checks import check_drafts
from jaxspec.checkpoint.drafters.content import content_of, read_content
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.fit import fit
from jaxspec.checkpoint.drafters.formats import FORMATS
from jaxspec.checkpoint.drafters.load import EMBED_PATH, HEAD_PATH, open_drafter
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


@pytest.mark.parametrize(
    ("config", "most"), [(block("dflash"), 5), (spark(), 6), (BLOCKS["dspark not from anchor"], 5)]
)
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
    "window as z-lab": (BLOCKS["dflash sliding"], "z-lab", "window_from_block is True.*--drop window"),
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
    config = replace(BLOCKS["dspark not from anchor"], layers=layers(**SLIDING, from_block=True))
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


def test_taps_are_written_in_each_formats_convention(tmp_path: Path):
    written = {
        to: json.loads((write(tmp_path / to, block("dflash"), to) / "config.json").read_text())
        for to in ("speculators", "z-lab")
    }
    assert written["speculators"]["aux_hidden_state_layer_ids"] == list(TAPS)
    assert written["z-lab"]["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in TAPS]

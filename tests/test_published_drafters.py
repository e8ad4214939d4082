"""The published drafters that users bring, built without a weight: config in, tensor names and shapes out, all accounted for.

Each file under tests/data/drafters says where its facts come from; the expected tensors are written out by hand, not by this project's
code.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoint.drafters.checks import check_drafts, check_verifier
from jaxspec.checkpoint.drafters.formats import FORMATS, detect_format
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.drafters.parsed import Parsed, VerifierFacts
from jaxspec.checkpoint.drafters.table import D2T, T2D, table
from jaxspec.drafters.config import ConfidenceConfig, MarkovConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.families import parse_config
from jaxspec.verifiers.hf import Fields
from jaxspec.verifiers.names import expand

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in (DATA / "drafters").glob("*.json"))


def published(name: str) -> dict[str, Any]:
    return json.loads((DATA / "drafters" / f"{name}.json").read_text())


def tensors(data: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor; a name with layers.0-4 stands for five."""
    found = {}
    for pattern, shape in data["tensors"].items():
        several = re.search(r"layers\.(\d+)-(\d+)\.", pattern)
        layers = range(int(several[1]), int(several[2]) + 1) if several else (None,)
        for layer in layers:
            name = pattern if several is None else pattern.replace(several[0], f"layers.{layer}.")
            found[name] = tuple(shape)
    return found


def parsed(data: dict[str, Any]) -> Parsed:
    fields, names = Fields(data["config"], data["checkpoint"]), tensors(data).keys()
    found = detect_format(fields, names)
    assert found.name == data["format"]
    return found.read(fields, names, None)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_its_parameter(name: str):
    data = published(name)
    config = parsed(data).config
    wanted = {link.name: link.shape for link in expand(table(config), own_shapes(config), "")}
    if config.reduced_vocab:
        wanted |= {D2T: (config.draft_vocab_size,), T2D: (config.vocab_size,)}
    assert wanted == tensors(data)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_published_ones(name: str):
    data = published(name)
    shapes = own_shapes(parsed(data).config)
    if data["parameters"] is not None:
        assert sum(map(math.prod, shapes.values())) == data["parameters"]


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_with_its_verifier(name: str):
    data = published(name)
    verifier = parse_config(json.loads((DATA / f"{data['verifier']}.json").read_text()), data["verifier"])[0]
    read = parsed(data)
    check_verifier(read.config, read.verifier.num_layers, verifier, name)
    other = "gemma4_31b_it" if data["verifier"] != "gemma4_31b_it" else "qwen3_8b"
    with pytest.raises(InputError, match=r"this drafter is for a verifier of width"):
        wrong = parse_config(json.loads((DATA / f"{other}.json").read_text()), other)[0]
        check_verifier(read.config, None, wrong, name)


@pytest.mark.parametrize("name", NAMES)
def test_its_config_survives_being_written(name: str):
    data = published(name)
    read = parsed(data)
    facts = VerifierFacts(read.verifier.name, read.verifier.architectures, read.verifier.num_layers)
    written = FORMATS[data["format"]].write(read.config, facts)
    again = FORMATS[data["format"]].read(Fields(written, name), tensors(data).keys(), None)
    assert again.config == read.config


def test_qwen3_8b_peagle_drafts_in_parallel():
    config = parsed(published("redhat_qwen3_8b_peagle")).config
    assert (config.method, config.taps, config.mask_token, config.speculative_tokens) == (
        "peagle",
        (2, 10, 18, 26, 34),
        151669,
        7,
    )
    assert config.feature_width == 5 * 4096
    assert not config.layers[0].attention.qk_norm


def test_qwen3_30b_dflash_sees_its_whole_block():
    config = parsed(published("redhat_qwen3_30b_a3b_dflash")).config
    assert (config.taps, config.draft_vocab_size, config.max_drafts) == ((1, 12, 23, 34, 45), 32000, 7)
    assert not any(layer.attention.causal for layer in config.layers)
    assert config.own_embed and config.own_head


def test_gemma4_31b_dspark_runs_as_speculators_trained_it():
    config = parsed(published("redhat_gemma4_31b_it_dspark")).config
    assert config.embed_scale == 1.0  # raw rows, though the verifier scales its own
    assert config.logit_softcap is None
    assert config.layers[0].attention.rope.theta == 10000.0
    sights = {
        (layer.attention.causal, layer.attention.window, layer.attention.window_from_block) for layer in config.layers
    }
    assert sights == {(True, 2048, True)}
    check_drafts(config, 7)
    with pytest.raises(InputError, match="makes at most 7 a cycle: its block has 8 slots"):
        check_drafts(config, 8)


def test_gemma4_12b_dspark_runs_as_deepspec_trained_it():
    config = parsed(published("deepspec_gemma4_12b_dspark")).config
    attention = config.layers[0].attention
    assert config.embed_scale == 3840**0.5
    assert config.logit_softcap == 30.0
    assert config.taps == (6, 18, 30, 42, 47)  # outputs 5 17 29 41 46
    assert (attention.scale, attention.v_from_k, attention.v_norm, attention.causal) == (1.0, True, True, False)
    assert (attention.rope.kind, attention.rope.partial) == ("proportional", 0.25)
    check_drafts(config, 7)


def test_qwen3_8b_dspark_has_both_heads():
    config = parsed(published("deepspec_qwen3_8b_dspark")).config
    assert config.block is not None
    assert config.block.markov == MarkovConfig("vanilla", 256)
    assert config.block.confidence == ConfidenceConfig(with_markov=True)
    assert config.max_drafts == 7


def test_zlab_qwen3_8b_borrows_embedding_and_head():
    config = parsed(published("zlab_qwen3_8b_dflash")).config
    assert (config.own_embed, config.own_head) == (False, False)
    assert config.taps == (2, 10, 18, 26, 34)
    assert config.max_drafts == 15

"""Published models, built without allocating a weight: parameter counts and name tables.

The configs under tests/data are those of the published repositories (SPEC 14; Gemma-4's from jax-ml/jax-llm-examples,
gemma4/gemma4_jax/ hf_configs.py, without the fields of the image and audio towers). The expected counts are worked out
below from the papers' shapes, not from this project's code.
"""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.checkpoint.load import abstract_decoder
from jaxspec.config import VerifierConfig
from jaxspec.verifiers.families import FAMILIES, parse_config
from jaxspec.verifiers.names import expand

DATA = Path(__file__).parent / "data"


def published(name: str) -> tuple[VerifierConfig, dict]:
    data = json.loads((DATA / f"{name}.json").read_text())
    return parse_config(data, name)[0], data


@cache
def shapes(config: VerifierConfig) -> dict[tuple, tuple[int, ...]]:
    state = nnx.state(abstract_decoder(config, jnp.bfloat16))
    return {path: tuple(leaf.shape) for path, leaf in nnx.to_flat_state(state)}


def gemma4_layer(width: int, heads: int, kv_heads: int, head_dim: int, projections: int, mlp_width: int) -> int:
    """One layer without its scalar: q and o, k and v (`projections` of them, none where shared), their norms, the MLP,
    four norms.
    """
    attention = 2 * heads * head_dim * width + projections * kv_heads * head_dim * width
    norms = head_dim * (2 if projections else 1) + 4 * width
    return attention + norms + 3 * mlp_width * width


VOCABULARY = 262144
QWEN3_8B = 2 * 151936 * 4096 + 4096 + 36 * (2 * 4096 + 2 * 128 + 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
QWEN3_30B = (
    2 * 151936 * 2048
    + 2048
    + 48 * (2 * 2048 + 2 * 128 + 2048 * (2 * 4096 + 2 * 512) + 128 * 2048 + 128 * 3 * 768 * 2048)
)
GEMMA4_31B = (
    VOCABULARY * 5376
    + 5376
    + 60
    + 50 * gemma4_layer(5376, 32, 16, 256, 2, 21504)
    + 10 * gemma4_layer(5376, 32, 4, 512, 1, 21504)
)
GEMMA4_26B = (
    VOCABULARY * 2816
    + 2816
    + 30
    + 25 * gemma4_layer(2816, 16, 8, 256, 2, 2112)
    + 5 * gemma4_layer(2816, 16, 2, 512, 1, 2112)
    + 30 * (128 * 3 * 704 * 2816 + 128 * 2816 + 2816 + 128 + 3 * 2816)  # experts, router and its scales, three norms
)
GEMMA4_12B = (
    VOCABULARY * 3840
    + 3840
    + 48
    + 40 * gemma4_layer(3840, 16, 8, 256, 2, 15360)
    + 8 * gemma4_layer(3840, 16, 1, 512, 1, 15360)
)


def per_layer_embeddings(layers: int, width: int) -> int:
    """Table, projection and norm of the model; gate, projection and norm of every layer."""
    return VOCABULARY * layers * 256 + layers * 256 * width + 256 + layers * (2 * 256 * width + width)


# 42 layers, every sixth full; the last 18 share: the unshared 24 hold 4 full ones, the shared 18 three
GEMMA4_E4B = (
    VOCABULARY * 2560
    + 2560
    + 42
    + 20 * gemma4_layer(2560, 8, 2, 256, 2, 10240)
    + 4 * gemma4_layer(2560, 8, 2, 512, 2, 10240)
    + 15 * gemma4_layer(2560, 8, 2, 256, 0, 10240)
    + 3 * gemma4_layer(2560, 8, 2, 512, 0, 10240)
    + per_layer_embeddings(42, 2560)
)
# 35 layers, every fifth full; the last 20 share and have MLPs of twice the width
GEMMA4_E2B = (
    VOCABULARY * 1536
    + 1536
    + 35
    + 12 * gemma4_layer(1536, 8, 1, 256, 2, 6144)
    + 3 * gemma4_layer(1536, 8, 1, 512, 2, 6144)
    + 16 * gemma4_layer(1536, 8, 1, 256, 0, 12288)
    + 4 * gemma4_layer(1536, 8, 1, 512, 0, 12288)
    + per_layer_embeddings(35, 1536)
)

COUNTS = {
    "qwen3_8b": QWEN3_8B,
    "qwen3_30b_a3b": QWEN3_30B,
    "gemma4_31b_it": GEMMA4_31B,
    "gemma4_26b_a4b_it": GEMMA4_26B,
    "gemma4_12b_it": GEMMA4_12B,
    "gemma4_e4b_it": GEMMA4_E4B,
    "gemma4_e2b_it": GEMMA4_E2B,
}


def test_hand_counts_are_the_published_ones():
    assert QWEN3_8B == 8_190_735_360
    assert QWEN3_30B == 30_532_122_624


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    config, _ = published(name)
    assert sum(math.prod(shape) for shape in shapes(config).values()) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_name_table_accounts_for_every_parameter_exactly_once(name):
    config, data = published(name)
    table = FAMILIES[data["model_type"]].table
    parameters = shapes(config)
    for layout in table.layouts:
        links = expand(table, parameters, layout)
        filled = Counter()
        for link in links:
            filled[link.path] += math.prod(link.shape) // (1 if link.half is None else 2)
        assert filled == {path: math.prod(shape) for path, shape in parameters.items()}
        whole = [link.name for link in links if link.half is None]
        assert len(set(whole)) == len(whole)
        first, second = ([link.name for link in links if link.half == half] for half in (0, 1))
        assert first == second
        assert not set(first) & set(whole)


def test_gemma4_31b_layers():
    config, _ = published("gemma4_31b_it")
    sliding, full = config.layers[4].attention, config.layers[5].attention
    assert (sliding.heads, sliding.kv_heads, sliding.head_dim, sliding.window) == (32, 16, 256, 1024)
    assert (full.heads, full.kv_heads, full.head_dim, full.window) == (32, 4, 512, None)
    assert (sliding.v_from_k, full.v_from_k) == (False, True)
    assert (sliding.rope.kind, sliding.rope.theta) == ("default", 1e4)
    assert (full.rope.kind, full.rope.theta, full.rope.partial) == ("proportional", 1e6, 0.25)
    assert [i for i, layer in enumerate(config.layers) if layer.attention.window is None] == list(range(5, 60, 6))
    assert (config.logit_softcap, config.tied, config.max_positions) == (30.0, True, 131072)
    assert config.embed_scale == math.sqrt(5376)


def test_gemma4_e2b_shares_keys_and_values_of_the_last_unshared_layer_of_the_same_type():
    config, _ = published("gemma4_e2b_it")
    sources = [layer.attention.kv_source for layer in config.layers]
    assert sources[:15] == list(range(15))
    assert sources[15:] == [14 if config.layers[i].attention.window is None else 13 for i in range(15, 35)]
    assert [config.layers[i].mlp_width for i in (14, 15)] == [6144, 12288]
    assert config.per_layer_width == 256


def test_qwen3_30b_a3b_layers():
    config, _ = published("qwen3_30b_a3b")
    moe = config.layers[0].moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.width, moe.normalize) == (128, 8, 768, True)
    assert all(layer.mlp_width is None for layer in config.layers)
    assert config.layers[0].attention.scale == 128**-0.5

"""config.json to VerifierConfig, and rotary frequencies against transformers (tests/goldens/rope.json,
tools/make_rope_goldens.py).
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import RopeConfig, VerifierConfig
from jaxspec.errors import InputError
from jaxspec.layers.rope import apply_rope, inverse_frequencies
from jaxspec.verifiers.families import parse_config
from jaxspec.verifiers.hf import Fields, rope_config

ROPES = json.loads((Path(__file__).parent / "goldens" / "rope.json").read_text())["cases"]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}
GEMMA4 = {**GEMMA3, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


def parse(base: dict, **changes: object) -> VerifierConfig:
    return parse_config({**base, **changes}, "config.json")[0]


def without(base: dict, *names: str) -> dict:
    return {name: value for name, value in base.items() if name not in names}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name):
    case = ROPES[name]
    rope = rope_config(Fields(case["rope_parameters"], name), case["head_dim"], 131072)
    frequencies, scaling = inverse_frequencies(rope)
    expected = np.array(case["frequencies"], np.float32)
    assert frequencies.dtype == np.float32
    assert scaling == case["scaling"]
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=1)


def test_proportional_rope_rotates_a_share_of_the_pairs_and_keeps_the_rest():
    rope = RopeConfig(theta=1e4, head_dim=16, kind="proportional", partial=0.25)
    x = jnp.arange(2 * 3 * 1 * 16, dtype=jnp.float32).reshape(2, 3, 1, 16)
    turned = apply_rope(x, jnp.array([[5, 6, 7], [0, 1, 2]]), rope)
    kept = [j for j in range(16) if j % 8 >= 2]
    np.testing.assert_array_equal(turned[..., kept], x[..., kept])
    np.testing.assert_array_equal(turned[1, 0], x[1, 0])  # position 0 turns by nothing
    assert float(jnp.abs(turned[0, 0, 0, 0] - x[0, 0, 0, 0])) > 0.1


def test_partial_rope_rotates_the_first_entries_and_passes_the_rest_through():
    rope = RopeConfig(theta=1e4, head_dim=16, partial=0.5)
    x = jnp.ones((1, 1, 2, 16), jnp.bfloat16)
    turned = apply_rope(x, jnp.array([[3]]), rope)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    cos, sin = np.cos(3.0), np.sin(3.0)
    np.testing.assert_allclose(np.asarray(turned[0, 0, 0, [0, 4]], np.float32), [cos - sin, cos + sin], rtol=1e-2)


def test_rope_has_no_table_to_run_past():
    rope = RopeConfig(theta=1e4, head_dim=4)
    x = jnp.ones((1, 2, 1, 4))
    far = apply_rope(x, jnp.array([[100_000, 100_001]]), rope)
    assert float(jnp.abs(far[0, 0] - far[0, 1]).max()) > 0.1


@pytest.mark.parametrize("base", [LLAMA, QWEN3, QWEN3_MOE], ids=lambda base: base["model_type"])
@pytest.mark.parametrize(
    ("top", "nested"), [(1e6, None), (None, 1e6), (1e6, 1e6)], ids=["top level", "rope_parameters", "both"]
)
def test_rope_theta_is_found_in_every_layout(base, top, nested):
    parameters = None if nested is None else {"rope_type": "default", "rope_theta": nested}
    config = parse(base, rope_theta=top, rope_parameters=parameters)
    assert config.layers[0].attention.rope.theta == 1e6


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default"}])
def test_a_config_without_rope_theta_is_an_error(parameters):
    with pytest.raises(InputError, match=r"config\.json: rope_theta is missing"):
        parse(without(LLAMA, "rope_theta"), rope_parameters=parameters)


def test_two_different_thetas_are_an_error():
    with pytest.raises(InputError, match=r"rope_theta is 1000000\.0 at top level but 10000\.0 in rope_parameters"):
        parse(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_rope_scaling_is_read(key):
    rope = parse(LLAMA, rope_scaling={key: "yarn", "factor": 4.0}).layers[0].attention.rope
    assert (rope.kind, rope.factor, rope.theta, rope.original_max_positions) == ("yarn", 4.0, 1e6, 512)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", 3])
def test_an_unknown_rope_kind_is_an_error_that_names_the_field(kind):
    with pytest.raises(InputError, match=r"rope_scaling: rope_type is .*; supported: default, linear, yarn"):
        parse(LLAMA, rope_scaling={"rope_type": kind, "factor": 2.0})


def test_rope_scaling_without_its_factor_is_an_error():
    with pytest.raises(InputError, match="required field factor is missing"):
        parse(LLAMA, rope_scaling={"rope_type": "linear"})


@pytest.mark.parametrize("base", [LLAMA, QWEN3, QWEN3_MOE, GEMMA3, GEMMA4], ids=lambda base: base["model_type"])
def test_a_missing_field_is_named_with_its_file(base):
    with pytest.raises(InputError, match=r"config\.json: required field hidden_size is missing"):
        parse(without(base, "hidden_size"))


@pytest.mark.parametrize("value", ["64", 6.5, -1, True, [64]])
def test_a_field_of_a_wrong_type_is_named_with_its_value(value):
    with pytest.raises(InputError, match=r"hidden_size is .* a positive whole number is wanted"):
        parse(LLAMA, hidden_size=value)


def test_explicit_head_dim_wins():
    assert parse(LLAMA).layers[0].attention.head_dim == 16
    assert parse(LLAMA, head_dim=32).layers[0].attention.head_dim == 32
    assert parse(without(QWEN3, "head_dim")).layers[0].attention.head_dim == 128  # transformers' default for Qwen3


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [(LLAMA, "hidden_act", "relu"), (GEMMA3, "hidden_activation", "gelu"), (GEMMA4, "hidden_activation", "tanh")],
)
def test_an_unknown_activation_is_an_error(base, field, value):
    with pytest.raises(InputError, match=f"{field} is '{value}'; supported"):
        parse(base, **{field: value})


def test_bidirectional_attention_is_refused_but_not_that_of_images():
    for base, value in ((GEMMA3, True), (GEMMA4, "all")):
        with pytest.raises(InputError, match=r"use_bidirectional_attention is .*only causal"):
            parse(base, use_bidirectional_attention=value)
    parse(GEMMA4, use_bidirectional_attention="vision")
    parse(GEMMA3, use_bidirectional_attention=False)


@pytest.mark.parametrize("model_type", ["opt", None, 5])
def test_an_unknown_model_type_lists_the_supported_ones(model_type):
    with pytest.raises(InputError, match=r"model_type is .*; supported: llama, qwen3, qwen3_moe"):
        parse(LLAMA, model_type=model_type)


def test_heads_that_do_not_group_are_an_error():
    with pytest.raises(InputError, match="num_key_value_heads is 3"):
        parse(LLAMA, num_key_value_heads=3)


def test_quantised_checkpoints_are_refused():
    with pytest.raises(InputError, match="quantization_config names method 'fp8'"):
        parse(LLAMA, quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "a DFlash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "an EAGLE-3"),
        ({"architectures": ["PEagleDraftModel"]}, "a P-EAGLE"),
        ({"architectures": ["LlamaForCausalLM"], "ptd_token_id": 7}, "a P-EAGLE"),
        ({"speculators_model_type": "dflash", "model_type": None}, "a DFlash"),
        ({"speculators_model_type": "peagle", "model_type": None}, "a P-EAGLE"),
        ({"speculators_model_type": "eagle3", "model_type": None}, "an EAGLE-3"),
        ({"speculators_model_type": "mtp", "model_type": None}, "a speculators mtp"),
    ],
)
def test_a_drafter_given_as_model_is_recognised(changes, kind):
    with pytest.raises(InputError, match=f"this is {kind} drafter, not a verifier; give it as --drafter"):
        parse(QWEN3, **changes)


def test_qwen3_windows_begin_at_max_window_layers():
    config = parse(QWEN3, use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert [layer.attention.window for layer in config.layers] == [None, None, 16]
    config = parse(QWEN3, use_sliding_window=False, sliding_window=16, max_window_layers=0)
    assert [layer.attention.window for layer in config.layers] == [None, None, None]


def test_qwen3_moe_dense_layers():
    config = parse(QWEN3_MOE, decoder_sparse_step=2)
    assert [layer.moe is None for layer in config.layers] == [True, False, True]
    config = parse(QWEN3_MOE, mlp_only_layers=[0])
    assert [layer.mlp_width for layer in config.layers] == [96, None, None]
    saved_by_transformers_5 = {**without(QWEN3_MOE, "num_experts"), "num_local_experts": 4}
    assert parse(saved_by_transformers_5) == parse(QWEN3_MOE)


def test_gemma3_defaults_and_old_rope_fields():
    config = parse(GEMMA3, query_pre_attn_scalar=64, rope_scaling={"rope_type": "linear", "factor": 8.0})
    sliding, full = config.layers[0].attention, config.layers[5].attention
    assert (config.vocab_size, full.heads, full.kv_heads, full.head_dim) == (262208, 8, 4, 256)
    assert (sliding.window, full.window, full.scale) == (4096, None, 0.125)
    assert (sliding.rope.theta, sliding.rope.kind) == (1e4, "default")
    assert (full.rope.theta, full.rope.kind, full.rope.factor) == (1e6, "linear", 8.0)
    assert (config.norm_offset, config.embed_scale, config.tied) == (1.0, 8.0, True)
    assert parse(GEMMA3, sliding_window_pattern=2).layers[1].attention.window is None
    new = {"sliding_attention": {"rope_theta": 5e3}, "full_attention": {"rope_theta": 2e6, "rope_type": "default"}}
    assert [parse(GEMMA3, rope_parameters=new).layers[i].attention.rope.theta for i in (0, 5)] == [5e3, 2e6]


def test_gemma3_flat_rope_parameters_are_an_error():
    with pytest.raises(InputError, match="rope_parameters must hold the objects"):
        parse(GEMMA3, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_gemma4_head_sizes_by_layer_type_in_both_layouts():
    published = parse(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=32, head_dim=16)
    full = {"head_dim": 32, "num_key_value_heads": 1}
    saved_by_transformers_5 = parse(GEMMA4, attention_k_eq_v=True, head_dim=16, per_layer_config={"5": full, "6": full})
    assert published == saved_by_transformers_5
    assert published.layers[5].attention.kv_heads == 1
    ignored = parse(GEMMA4, attention_k_eq_v=False, num_global_key_value_heads=1)
    assert ignored.layers[5].attention.kv_heads == 4


def test_gemma4_last_layer_is_full_whatever_the_list_says():
    config = parse(GEMMA4, layer_types=["sliding_attention"] * 7)
    assert [layer.attention.window for layer in config.layers] == [512] * 6 + [None]


def test_gemma4_sharing_without_a_source_is_an_error():
    with pytest.raises(InputError, match="num_kv_shared_layers is 2: no layer of type full_attention"):
        parse(GEMMA4, num_kv_shared_layers=2)


def test_gemma4_per_layer_config_of_other_fields_is_an_error():
    with pytest.raises(InputError, match="per_layer_config 5: num_attention_heads cannot differ by layer"):
        parse(GEMMA4, per_layer_config={"5": {"num_attention_heads": 2}})


def test_multimodal_configs_nest_the_text_model():
    nested = {"model_type": "gemma4", "text_config": GEMMA4, "vision_config": {}, "tie_word_embeddings": False}
    assert parse(nested) == parse(GEMMA4, tie_word_embeddings=False)
    assert not parse({**nested, "text_config": {**GEMMA4, "tie_word_embeddings": True}}).tied
    with pytest.raises(InputError, match="required field text_config is missing"):
        parse({"model_type": "gemma3"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*a number is wanted"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number is wanted"),
        ({"rms_norm_eps": -5.0}, "rms_norm_eps is -5; a number above 0 is wanted"),
        ({"rope_theta": 0}, "rope_theta is 0; a number above 0 is wanted"),
        ({"hidden_act": ["silu"]}, "hidden_act is .*supported: "),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs by layer type"),
    ],
)
def test_numbers_that_are_none_are_named(changes, said):
    with pytest.raises(InputError, match=said):
        parse(LLAMA, **changes)


@pytest.mark.parametrize("named", [5, "LlamaForCausalLM", [5], {}])
def test_classes_named_in_an_unknown_form_are_passed_over(named):
    assert parse(LLAMA, architectures=named).num_layers == 3

"""Reading GGUF: a small file written here with the gguf package, and the demo model's own file where the demo is in the
cache.
"""

import json
from itertools import pairwise

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import regex
from flax import nnx
from small_gguf import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MERGES,
    WIDTH,
    byte_letters,
    vocabulary,
    weights,
    write_gguf,
    write_moe_gguf,
)
from transformers import AutoTokenizer

from jaxspec import demo
from jaxspec.checkpoint.export import save_verifier
from jaxspec.checkpoint.gguf import GgufMetadata
from jaxspec.checkpoint.gguf_tokenizer import gguf_tokenizer, write_tokenizer
from jaxspec.checkpoint.load import load_verifier
from jaxspec.errors import InputError
from jaxspec.tokenizer import load_tokenizer

TEXTS = [
    "Hello 12345 world's  été 日本語 🙂\n\n  x",
    " a  b\tc\n\n\nd  ",
    "x=3.14; y[10]+=2",
    "",
    "   ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't we'll I'M ²³ ٣٤ ⅷ naïve a\u0301",
    "\u200b\u00a0\ufeff \U0001f468\u200d\U0001f469\u200d\U0001f467",
]


def parameters(module: nnx.Module) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(module))}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small model.gguf")


def test_weights_are_those_before_llama_cpps_conversion(small):
    loaded, original = load_verifier(small), weights()
    found = parameters(loaded.module)
    for i in range(2):
        layer = f"model.layers.{i}"
        query = original[f"{layer}.self_attn.q_proj.weight"].reshape(HEADS, HEAD_DIM, WIDTH)
        key = original[f"{layer}.self_attn.k_proj.weight"].reshape(KV_HEADS, HEAD_DIM, WIDTH)
        np.testing.assert_array_equal(found["layers", i, "attention", "q", "weight"], query)
        np.testing.assert_array_equal(found["layers", i, "attention", "k", "weight"], key)
        np.testing.assert_array_equal(
            found["layers", i, "mlp", "down", "weight"], original[f"{layer}.mlp.down_proj.weight"]
        )
    np.testing.assert_array_equal(found["embed", "weight"], original["model.embed_tokens.weight"])


def test_config_comes_from_the_metadata(small):
    loaded = load_verifier(small)
    attention = loaded.config.layers[0].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (attention.rope.theta, loaded.config.max_positions) == (50000.0, 128)
    assert loaded.config.norm_eps == pytest.approx(1e-5)
    assert loaded.config.vocab_size == len(vocabulary(MERGES))
    assert loaded.config.tied
    assert loaded.eos_ids == (0, 2)
    assert loaded.tokenizer_source == small


def test_qwen3_moe_keeps_its_rows_and_stacked_experts(tmp_path):
    path = tmp_path / "moe.gguf"
    stored = write_moe_gguf(path)
    loaded = load_verifier(path)
    found = parameters(loaded.module)
    layer, moe = loaded.config.layers[0], loaded.config.layers[0].moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.width, moe.normalize) == (3, 2, 32, True)
    assert (layer.attention.head_dim, layer.attention.qk_norm) == (16, True)
    query = stored["blk.0.attn_q.weight"].reshape(HEADS, 16, WIDTH)
    np.testing.assert_array_equal(found["layers", 0, "attention", "q", "weight"], query)
    for ours, theirs in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
        np.testing.assert_array_equal(found["layers", 0, "moe", ours, "weight"], stored[f"blk.0.{theirs}.weight"])
    np.testing.assert_array_equal(found["layers", 0, "moe", "router", "weight"], stored["blk.0.ffn_gate_inp.weight"])
    np.testing.assert_array_equal(
        found["layers", 0, "attention", "k_norm", "weight"], stored["blk.0.attn_k_norm.weight"]
    )


def test_an_output_tensor_unties_the_head(tmp_path):
    head = np.random.default_rng(1).standard_normal((len(vocabulary(MERGES)), WIDTH), np.float32)
    loaded = load_verifier(write_gguf(tmp_path / "m.gguf", head=head))
    assert not loaded.config.tied
    np.testing.assert_array_equal(parameters(loaded.module)["head", "weight"], head)


def test_quantised_tensors_are_dequantised(tmp_path, small):
    kind = gguf.GGMLQuantizationType.Q8_0
    found = parameters(load_verifier(write_gguf(tmp_path / "m.gguf", quantised=kind)).module)
    for path, exact in parameters(load_verifier(small).module).items():
        assert np.abs(found[path] - exact).max() <= np.abs(exact).max() / 127
    assert not np.array_equal(found["embed", "weight"], weights()["model.embed_tokens.weight"])


def test_saved_as_a_directory_it_loads_the_same(tmp_path, small):
    loaded = load_verifier(small, dtype=jnp.float32)
    save_verifier(tmp_path / "saved", loaded)
    write_tokenizer(small, tmp_path / "saved")
    again = load_verifier(tmp_path / "saved")
    assert again.config == loaded.config
    assert again.eos_ids == loaded.eos_ids
    for path, value in parameters(loaded.module).items():
        np.testing.assert_array_equal(parameters(again.module)[path], value)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert tokenizer.encode(text) == gguf_tokenizer(small).encode(text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"architecture": "phi3"}, "general.architecture is 'phi3'; supported in GGUF: llama, qwen3, qwen3moe"),
        ({"leave_out": ("rope.freq_base",)}, "rope_theta is missing"),
        ({"head": np.ones((3, WIDTH), np.float32)}, "lm_head.weight is [3, 32]"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, options, problem):
    path = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(InputError) as caught:
        load_verifier(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("add", "wanted"),
    [
        ({"llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),  # llama.cpp's default kind
        ({"llama.rope.scale_linear": 4.0}, ("linear", 4.0)),  # the key of older files
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, ("default", 1.0)),
        ({"llama.rope.scaling.factor": 1.0}, ("default", 1.0)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, ("yarn", 2.0)),
    ],
)
def test_rope_scaling_is_as_llama_cpp_reads_it(tmp_path, add, wanted):
    rope = load_verifier(write_gguf(tmp_path / "m.gguf", add=add)).config.layers[0].attention.rope
    assert (rope.kind, rope.factor) == wanted


def test_a_rope_attention_factor_is_not_passed_over(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", add={"llama.rope.scaling.attn_factor": 0.5})
    with pytest.raises(InputError, match=r"rope\.scaling\.attn_factor is 0\.5, which is not supported"):
        load_verifier(path)


def test_a_damaged_tokenizer_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(GgufMetadata, "field", lambda self, key: ["x"] if key.endswith("merges") else "gpt2")
    with pytest.raises(InputError, match=f"{path}: its tokenizer cannot be read"):
        load_tokenizer(path)


@pytest.mark.parametrize("kept", [0, 3, 10, 2000, -100])
def test_a_truncated_file_is_named(tmp_path, small, kept):
    path = tmp_path / "cut.gguf"
    path.write_bytes(small.read_bytes()[:kept])
    with pytest.raises(InputError, match="truncated") as caught:
        load_verifier(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_pre_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre is 'mystery'; supported: gpt-2"):
        gguf_tokenizer(write_gguf(tmp_path / "m.gguf", pre="mystery"))


def reference_ids(text: str, tokens: list[str], merges: list[str], special: list[str]) -> list[int]:
    """Byte-level BPE in its textbook form, with the word splits that llama.cpp states for "smollm"."""
    ids = {token: i for i, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    found = []
    for part in regex.split("(" + "|".join(regex.escape(token) for token in special) + ")", text):
        if part in special:
            found.append(ids[part])
            continue
        for stretch in regex.findall(r"\p{N}|\P{N}+", part):
            for word in regex.findall(words, stretch):
                pieces = [letters[byte] for byte in word.encode()]
                while len(pieces) > 1:
                    pairs = list(pairwise(pieces))
                    best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
                    if best not in rank:
                        break
                    at = pairs.index(best)
                    pieces[at : at + 2] = ["".join(best)]
                found.extend(ids[piece] for piece in pieces)
    return found


def test_tokenizer_equals_textbook_bpe_and_gives_text_back(small):
    tokenizer, tokens = gguf_tokenizer(small), vocabulary(MERGES)
    for text in TEXTS:
        found = tokenizer.encode(text)
        assert found == reference_ids(text, tokens, MERGES, tokens[:3])
        assert tokenizer.decode(found) == text
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
    assert tokenizer.decode([1, *tokenizer.encode("hello"), 2], skip_special_tokens=True) == "hello"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x<|im_end|>"
    )


@pytest.mark.skipif(not demo.is_complete(), reason="the demo model is not in the cache")
def test_the_demo_models_tokenizer_equals_textbook_bpe():
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    model = json.loads((demo.path() / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    special = [token for token in tokens if tokenizer.convert_tokens_to_ids(token) in tokenizer.all_special_ids]
    for text in TEXTS:
        found = tokenizer.encode(text)
        assert found == reference_ids(text, tokens, merges, special)
        assert tokenizer.decode(found, clean_up_tokenization_spaces=False) == text

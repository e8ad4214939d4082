"""Loading safetensors: every fault is one line that names the file or tensor; what loads is what was stored."""

import errno
import json
import os
import tracemalloc
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.export import save_verifier
from jaxspec.checkpoint.load import LoadedVerifier, abstract_decoder, load_verifier
from jaxspec.checkpoint.write import save_tensors
from jaxspec.errors import InputError
from jaxspec.verifiers.families import parse_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size": 32,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 32,
    "enable_moe_block": True,
    "num_experts": 3,
    "top_k_experts": 2,
    "moe_intermediate_size": 6,
}


def llama_weights(seed: int = 0, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The tensors of LLAMA under their Hugging Face names."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {f"{prefix}embed_tokens.weight": draw(32, 16), f"{prefix}norm.weight": draw(16)}
    for i in range(2):
        layer = f"{prefix}layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": draw(16),
            f"{layer}.post_attention_layernorm.weight": draw(16),
            f"{layer}.self_attn.q_proj.weight": draw(16, 16),
            f"{layer}.self_attn.k_proj.weight": draw(8, 16),
            f"{layer}.self_attn.v_proj.weight": draw(8, 16),
            f"{layer}.self_attn.o_proj.weight": draw(16, 16),
            f"{layer}.mlp.gate_proj.weight": draw(24, 16),
            f"{layer}.mlp.up_proj.weight": draw(24, 16),
            f"{layer}.mlp.down_proj.weight": draw(16, 24),
        }
    return {**weights, "lm_head.weight": draw(32, 16)}


def write(directory: Path, config: dict, weights: dict[str, np.ndarray], shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def parameters(module: nnx.Module) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def assert_same(first: nnx.Module, second: nnx.Module) -> None:
    one, two = parameters(first), parameters(second)
    assert one.keys() == two.keys()
    for path, value in one.items():
        assert value.dtype == two[path].dtype
        np.testing.assert_array_equal(value, two[path], err_msg=str(path))


def failure(path: Path | str, **options: object) -> str:
    """The one line that loading `path` fails with."""
    with pytest.raises(InputError) as caught:
        load_verifier(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path / "model", LLAMA, llama_weights())


def test_weights_are_the_stored_ones_in_our_shapes(checkpoint):
    stored, loaded = llama_weights(), load_verifier(checkpoint)
    found = parameters(loaded.module)
    layer = "model.layers.1"
    np.testing.assert_array_equal(found["embed", "weight"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["head", "weight"], stored["lm_head.weight"])
    query = stored[f"{layer}.self_attn.q_proj.weight"].reshape(4, 4, 16)
    np.testing.assert_array_equal(found["layers", 1, "attention", "q", "weight"], query)
    output = stored[f"{layer}.self_attn.o_proj.weight"].reshape(16, 4, 4)
    np.testing.assert_array_equal(found["layers", 1, "attention", "o", "weight"], output)
    norm = stored[f"{layer}.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(found["layers", 1, "mlp_norm", "weight"], norm)
    assert sum(value.size for value in found.values()) == sum(value.size for value in stored.values())
    assert loaded.source_dtype == np.float32
    assert (loaded.path, loaded.tokenizer_source, loaded.left_out) == (checkpoint, checkpoint, "")


def test_shards_equal_a_single_file(checkpoint, tmp_path):
    sharded = write(tmp_path / "sharded", LLAMA, llama_weights(), shards=3)
    assert_same(load_verifier(checkpoint).module, load_verifier(sharded).module)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("asked", [jnp.float32, jnp.bfloat16])
def test_stored_dtypes_become_the_asked_one(tmp_path, stored, asked):
    weights = {name: value.astype(stored) for name, value in llama_weights().items()}
    loaded = load_verifier(write(tmp_path, LLAMA, weights), dtype=asked)
    value = parameters(loaded.module)["layers", 0, "mlp", "up", "weight"]
    assert value.dtype == asked
    expected = weights["model.layers.0.mlp.up_proj.weight"].astype(np.float32).astype(asked)
    np.testing.assert_array_equal(value, expected)
    assert loaded.source_dtype == stored


def test_the_default_dtype_on_a_cpu_is_float32(tmp_path):
    weights = {name: value.astype(ml_dtypes.bfloat16) for name, value in llama_weights().items()}
    loaded = load_verifier(write(tmp_path, LLAMA, weights))
    assert {value.dtype for value in parameters(loaded.module).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_other_dtypes_are_refused(checkpoint, dtype):
    assert failure(checkpoint, dtype=dtype).startswith(f"dtype {np.dtype(dtype)}")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_names_with_every_prefix_load(checkpoint, tmp_path, prefix):
    other = write(tmp_path / "other", LLAMA, llama_weights(prefix=prefix))
    assert_same(load_verifier(checkpoint).module, load_verifier(other).module)


def test_multimodal_checkpoints_load_their_text_part_and_name_the_rest(checkpoint, tmp_path):
    source = load_verifier(checkpoint)
    text = {**{key: value for key, value in GEMMA4.items() if key != "enable_moe_block"}, "num_kv_shared_layers": 0}
    save_verifier_of_random_weights(tmp_path / "text", text)
    weights = load_file(tmp_path / "text" / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    nested["model.vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    nested["model.vision_tower.norm.weight"] = np.ones(2, np.float32)
    nested["model.embed_vision.projection.weight"] = np.full((2, 2), np.nan, np.float32)
    multimodal = write(tmp_path / "multimodal", {"model_type": "gemma4", "text_config": text}, nested)
    loaded = load_verifier(multimodal)
    assert_same(load_verifier(tmp_path / "text").module, loaded.module)
    assert loaded.left_out == "model.embed_vision (1 tensors), model.vision_tower (2 tensors)"
    assert source.left_out == ""


@pytest.mark.parametrize(
    ("tied", "present"), [(True, False), (True, True), (False, True)], ids=["tied", "tied, head stored", "untied"]
)
def test_tied_and_untied_heads(tmp_path, tied, present):
    weights = llama_weights()
    if not present:
        del weights["lm_head.weight"]
    elif tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    module = load_verifier(write(tmp_path, {**LLAMA, "tie_word_embeddings": tied}, weights)).module
    assert (("head", "weight") in parameters(module)) == (not tied)


def test_a_stored_head_that_is_not_the_embedding_is_used_whatever_the_config_says(tmp_path):
    """As transformers does: tie_word_embeddings is then passed over."""
    weights = llama_weights()
    loaded = load_verifier(write(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True}, weights))
    np.testing.assert_array_equal(parameters(loaded.module)["head", "weight"], weights["lm_head.weight"])
    save_verifier(tmp_path / "saved", loaded)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert_same(load_verifier(tmp_path / "saved").module, loaded.module)


def test_an_untied_head_that_is_absent_is_an_error(tmp_path):
    weights = llama_weights()
    del weights["lm_head.weight"]
    assert "tensors missing: lm_head.weight" in failure(write(tmp_path, LLAMA, weights))


def test_everything_that_does_not_fit_is_in_one_line(tmp_path):
    weights = llama_weights()
    del weights["model.norm.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
    weights["model.layers.0.mlp.up_proj.weight"] = np.ones((24, 17), np.float32)
    weights["model.layers.0.mlp.down_proj.weight"] = np.ones((16, 24), np.int8)
    message = failure(write(tmp_path, LLAMA, weights))
    assert message == (
        f"{tmp_path}: tensors missing: model.norm.weight; extra: model.layers.7.mlp.up_proj.weight; of a wrong shape: "
        "model.layers.0.mlp.up_proj.weight is [24, 17], not [24, 16]; of a wrong dtype: "
        "model.layers.0.mlp.down_proj.weight is I8, not BF16, F16, F32"
    )


def test_long_lists_are_shortened(tmp_path):
    message = failure(write(tmp_path, {**LLAMA, "num_hidden_layers": 9}, llama_weights()))
    assert message.count("model.layers.") == 4
    assert "and 59 more" in message


def test_rotary_tables_are_ignored(checkpoint, tmp_path):
    weights = llama_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    assert_same(load_verifier(checkpoint).module, load_verifier(write(tmp_path / "other", LLAMA, weights)).module)


def test_float8_weights_are_a_wrong_dtype(tmp_path):
    weights = llama_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    assert "model.norm.weight is F8_E4M3" in failure(write(tmp_path, LLAMA, weights))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_named(tmp_path, value, dtype):
    weights = {name: weight.astype(dtype) for name, weight in llama_weights().items()}
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    message = failure(write(tmp_path, LLAMA, weights))
    assert message == f"{tmp_path}/model.safetensors: tensor model.layers.1.mlp.down_proj.weight has NaN or Inf"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file_is_named_with_the_bytes_it_lacks(tmp_path, shards):
    directory = write(tmp_path, LLAMA, llama_weights(), shards)
    file = max(directory.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert failure(directory).startswith(f"{file}: truncated: 100 bytes are missing of the ")


PAIR: dict = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def header(text: str = "", **entries: object) -> bytes:
    """A file of 24 bytes of data with this header."""
    written = (text or json.dumps(entries)).encode()
    return len(written).to_bytes(8, "little") + written + bytes(24)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated: 8 bytes of the header's length are missing"),
        (b"\x40\0\0\0\0\0\0\0{}", "truncated: 62 bytes of the header are missing"),
        (b"\x02\0\0\0\0\0\0\0{]", "its safetensors header is damaged"),
        (b"\x02\0\0\0\0\0\0\0[]", "its safetensors header is damaged"),
        (b"\x02\0\0\0\0\0\0\0{}more", "4 bytes too long"),
        (b"GGUF\0\0\0\x7f" + bytes(64), "is not a safetensors file"),
        (header(a={"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}), "its safetensors header is damaged"),
        (header(a={"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}), "its safetensors header is damaged"),
        (header(a={"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}), "its safetensors header is damaged"),
        (header(a=PAIR, b=PAIR), "its safetensors header is damaged: tensor b begins at 0"),
        (
            header(a=PAIR, b=PAIR | {"data_offsets": [16, 24]}),
            "its safetensors header is damaged: tensor b begins at 16",
        ),
        (header("[" * 100_000), "its safetensors header is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_damaged_file_is_named(checkpoint, content, problem):
    file = checkpoint / "model.safetensors"
    file.write_bytes(content)
    assert failure(checkpoint).startswith(f"{file}: {problem}")


def test_a_shard_that_is_not_there_is_named(tmp_path):
    directory = write(tmp_path, LLAMA, llama_weights(), shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "shard model-00002-of-00002.safetensors is not there" in failure(directory)


def test_an_index_that_names_the_wrong_shard_is_an_error(tmp_path):
    directory = write(tmp_path, LLAMA, llama_weights(), shards=2)
    index = directory / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.absent.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    assert failure(directory) == f"{index}: tensor model.absent.weight is not in model-00001-of-00002.safetensors"


def test_an_index_may_not_lead_out_of_the_directory(tmp_path):
    directory = write(tmp_path / "model", LLAMA, llama_weights(), shards=2)
    write(tmp_path, LLAMA, llama_weights())
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    assert failure(directory) == f"{index}: shard ../model.safetensors is not there"


def test_a_directory_without_weights_says_what_is_there(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert failure(checkpoint).endswith(
        "neither model.safetensors nor model.safetensors.index.json is there; found: config.json, pytorch_model.bin"
    )


def test_paths_that_lead_nowhere(tmp_path):
    assert failure(tmp_path) == f"{tmp_path}: has no config.json"
    assert "no such directory or file" in failure(tmp_path / "none")
    assert "no such directory or file" in failure("./none/model.gguf")
    assert "not a directory, and not found in the hub or its cache" in failure("nobody/nothing")
    assert "cannot be read" in failure("~nobody-of-this-name/model")
    assert "File name too long" in failure("x" * 300)
    (tmp_path / "file.bin").write_bytes(b"x")
    assert "is a file, but not a .gguf" in failure(tmp_path / "file.bin")


@pytest.mark.parametrize("text", ["{", "[]", "\xff\xfe", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_a_config_that_is_no_object_is_named(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert failure(checkpoint).startswith(f"{checkpoint}/config.json: ")


def test_a_drafter_given_as_model_is_one_clear_line(tmp_path):
    directory = write(tmp_path, {**LLAMA, "model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, {})
    assert failure(directory).endswith("this is a DFlash drafter, not a verifier; give it as --drafter")


def test_paths_with_spaces(checkpoint, tmp_path):
    target = tmp_path / "a b" / "my eagle-x model"
    target.parent.mkdir()
    checkpoint.rename(target)
    assert load_verifier(str(target)).path == target


def test_progress_counts_stored_bytes(checkpoint):
    seen = []
    load_verifier(checkpoint, progress=lambda done, total: seen.append((done, total)))
    total = sum(value.nbytes for value in llama_weights().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_place_receives_every_parameter_once_with_its_axes(checkpoint):
    placed = {}

    def place(value: np.ndarray, path: tuple, axes: tuple[str, ...]) -> jax.Array:
        assert path not in placed
        assert value.ndim == len(axes)
        placed[path] = axes
        return jnp.asarray(value)

    module = load_verifier(checkpoint, place=place).module
    assert placed.keys() == parameters(module).keys()


def test_host_memory_stays_near_one_tensor(tmp_path):
    big = llama_weights()
    big["model.embed_tokens.weight"] = np.ones((65536, 16), np.float32)
    del big["lm_head.weight"]
    directory = write(tmp_path, {**LLAMA, "vocab_size": 65536, "tie_word_embeddings": True}, big, 3)
    load_verifier(directory)  # imports and caches, so that they do not count
    tracemalloc.start()
    load_verifier(directory, dtype=jnp.bfloat16, place=lambda value, path, axes: jnp.zeros(()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * big["model.embed_tokens.weight"].nbytes


def test_a_hub_id_is_found_in_the_cache(checkpoint, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / ("a" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loaded = load_verifier("owner/tiny")
    assert loaded.config.family == "llama"
    assert loaded.path.name == "a" * 40


def test_eos_ids_are_those_of_generation_config_config_and_tokenizer(checkpoint):
    def put(name: str, data: dict) -> None:
        (checkpoint / name).write_text(json.dumps(data))

    assert load_verifier(checkpoint).eos_ids == ()
    put("config.json", {**LLAMA, "eos_token_id": 5})
    put("generation_config.json", {"eos_token_id": [5, 9]})
    put("tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    put("tokenizer.json", {"added_tokens": [{"id": 11, "content": "<end>"}], "model": {"vocab": {}}})
    assert load_verifier(checkpoint).eos_ids == (5, 9, 11)
    put("tokenizer.json", {"added_tokens": [], "model": {"vocab": {"<end>": 12}}})
    assert load_verifier(checkpoint).eos_ids == (5, 9, 12)
    put("generation_config.json", {"eos_token_id": "five"})
    assert "generation_config.json: eos_token_id is 'five'" in failure(checkpoint)


def save_verifier_of_random_weights(path: Path, config: dict) -> None:
    """A checkpoint directory of `config`, every parameter random."""
    parsed, _ = parse_config(config, "test")
    graph, state = nnx.split(abstract_decoder(parsed, jnp.float32))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)), state)
    module = nnx.merge(graph, state)
    save_verifier(path, LoadedVerifier(parsed, module, path.parent, (), path, np.dtype(np.float32), config, ""))


@pytest.mark.parametrize("config", [LLAMA, MOE, GEMMA4], ids=lambda config: config["model_type"])
def test_export_and_import_give_the_same_weights(tmp_path, config):
    save_verifier_of_random_weights(tmp_path / "one", config)
    loaded = load_verifier(tmp_path / "one")
    save_verifier(tmp_path / "two", loaded, max_shard_bytes=2000)
    assert len(list((tmp_path / "two").glob("model-*.safetensors"))) > 2
    again = load_verifier(tmp_path / "two")
    assert_same(loaded.module, again.module)
    assert again.config == loaded.config
    with pytest.raises(InputError, match="exists already"):
        save_verifier(tmp_path / "two", loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_experts_load_in_every_form(tmp_path):
    save_verifier_of_random_weights(tmp_path / "split", MOE)
    weights = load_file(tmp_path / "split" / "model.safetensors")
    packed = {name: value for name, value in weights.items() if ".experts." not in name}
    for i in range(2):
        experts = f"model.layers.{i}.mlp.experts"
        stack = {
            kind: np.stack([weights[f"{experts}.{e}.{kind}_proj.weight"] for e in range(3)])
            for kind in ("gate", "up", "down")
        }
        packed[f"{experts}.gate_up_proj"] = np.concatenate([stack["gate"], stack["up"]], axis=1)
        packed[f"{experts}.down_proj"] = stack["down"]
    write(tmp_path / "packed", MOE, packed)
    assert_same(load_verifier(tmp_path / "split").module, load_verifier(tmp_path / "packed").module)


def test_a_missing_expert_is_named(tmp_path):
    save_verifier_of_random_weights(tmp_path / "model", MOE)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    message = failure(write(tmp_path / "model", MOE, weights))
    assert message.endswith("tensors missing: model.layers.1.mlp.experts.2.up_proj.weight")


def test_keys_and_values_of_sharing_layers_are_ignored(tmp_path):
    save_verifier_of_random_weights(tmp_path / "model", GEMMA4)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.2.self_attn.k_proj.weight" not in weights
    first = load_verifier(tmp_path / "model")
    weights["model.layers.2.self_attn.k_proj.weight"] = np.ones((8, 16), np.float32)
    weights["model.layers.3.self_attn.v_proj.weight"] = np.ones((16, 16), np.float32)
    weights["model.layers.3.self_attn.k_norm.weight"] = np.ones(8, np.float32)
    assert_same(first.module, load_verifier(write(tmp_path / "model", GEMMA4, weights)).module)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.chmod(0)
    assert failure(checkpoint) == f"{file}: cannot be read: Permission denied"
    checkpoint.chmod(0)
    try:
        assert failure(checkpoint) == f"{checkpoint}: cannot be read: Permission denied"
    finally:
        checkpoint.chmod(0o755)


def test_a_file_that_cannot_be_opened_is_named(checkpoint, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("jaxspec.checkpoint.safetensors.read_header", refuse)
    assert failure(checkpoint) == f"{checkpoint}/model.safetensors: cannot be read: Permission denied"


@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token": "x", "added_tokens_decoder": []}',
        '{"eos_token": "x", "added_tokens_decoder": {"a": {"content": "x"}}}',
    ],
)
def test_a_damaged_tokenizer_config_is_named(checkpoint, content):
    (checkpoint / "tokenizer_config.json").write_text(content.replace("[]", '["x"]'))
    assert f"{checkpoint}: tokenizer_config.json or tokenizer.json is damaged" in failure(checkpoint)


def test_a_converted_verifier_keeps_its_generation_config(checkpoint, tmp_path):
    """Servers take their sampling defaults from it."""
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2], "pad_token_id": 0}
    (checkpoint / "generation_config.json").write_text(json.dumps(given))
    config = json.loads((checkpoint / "config.json").read_text()) | {"torch_dtype": "float16", "bos_token_id": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    convert(checkpoint, tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "back", "safetensors")
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == given | {"bos_token_id": 1}
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path, monkeypatch):
    """safetensors has an error of its own for it."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("jaxspec.checkpoint.write.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_tensors({"a": np.zeros(2)}, tmp_path / "file")
    assert caught.value.errno == errno.ENOSPC

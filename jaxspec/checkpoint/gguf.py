"""Reading .gguf files: weights dequantised to float32 under their Hugging Face names, and the config from the metadata.

Architectures: llama, qwen3, qwen3moe. Every other one is an error that names it.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, quants

from jaxspec.checkpoint.source import StoredTensor
from jaxspec.errors import InputError

# GGUF name -> Hugging Face name; {i} is the layer. The *_exps tensors hold all experts.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_output.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.mlp.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": "model.layers.{i}.mlp.experts.gate_proj",
    "blk.{i}.ffn_up_exps.weight": "model.layers.{i}.mlp.experts.up_proj",
    "blk.{i}.ffn_down_exps.weight": "model.layers.{i}.mlp.experts.down_proj",
}

_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaled frequencies as a tensor instead of as metadata


class GgufMetadata:
    """A .gguf file's header: metadata fields and tensor table. Raises InputError for a damaged or truncated file."""

    def __init__(self, path: Path):
        self.path = path
        self.reader = _open(path)

    def field(self, key: str) -> Any:
        """A metadata value. Raises InputError where it is absent."""
        value = self.optional(key)
        if value is None:
            raise InputError(f"{self.path}: metadata field {key} is missing")
        return value

    def optional(self, key: str) -> Any:
        """A metadata value, None where it is absent."""
        field = self.reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise InputError(f"{self.path}: metadata field {key} is damaged: {error}") from error


class GgufSource:
    """The tensors of a .gguf file under Hugging Face names, read as float32.

    `hf_config`: the fields of an equivalent `config.json`. `eos_ids`: the ids its tokenizer metadata marks as ends.
    """

    def __init__(self, path: Path):
        self.where = str(path)
        metadata = GgufMetadata(path)
        self._stored = {_hf_name(tensor.name): tensor for tensor in metadata.reader.tensors}
        if _ROPE_FACTORS in self._stored:
            raise InputError(f"{path}: {_ROPE_FACTORS} (rope factors as a tensor) is not supported; use safetensors")
        self.hf_config = _config(metadata, self._stored.keys())
        self.eos_ids = _eos_ids(metadata)
        self.tensors = {
            name: StoredTensor(tuple(int(n) for n in reversed(tensor.shape)), "F32", int(tensor.n_bytes), path)
            for name, tensor in self._stored.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`, dequantised to float32."""
        tensor = self._stored[name]
        try:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(
                f"{self.where}: tensor {name} has type {tensor.tensor_type.name}, which cannot be read"
            ) from error
        values = np.array(values, np.float32).reshape(self.tensors[name].shape)
        if self.hf_config["model_type"] == "llama":
            if ".q_proj." in name:
                return _unpermute(values, self.hf_config["num_attention_heads"])
            if ".k_proj." in name:
                return _unpermute(values, self.hf_config["num_key_value_heads"])
        return values


def _config(metadata: GgufMetadata, names: Collection[str]) -> dict[str, Any]:
    """The fields of a `config.json`. `names`: the stored tensors, which tell whether the head is tied and projections
    have biases.
    """
    architecture = metadata.field("general.architecture")
    if architecture not in _MODEL_TYPES:
        supported = ", ".join(_MODEL_TYPES)
        raise InputError(f"{metadata.path}: general.architecture is {architecture!r}; supported in GGUF: {supported}")

    def field(name: str) -> Any:
        return metadata.field(f"{architecture}.{name}")

    def optional(name: str) -> Any:
        return metadata.optional(f"{architecture}.{name}")

    heads = field("attention.head_count")
    head_dim = optional("attention.key_length") or field("embedding_length") // heads
    if optional("attention.value_length") not in (None, head_dim):
        raise InputError(f"{metadata.path}: {architecture}.attention.value_length differs from key_length {head_dim}")
    config = {
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": field("embedding_length"),
        "intermediate_size": optional("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata, architecture, head_dim),
        "vocab_size": len(metadata.field("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "hidden_act": "silu",
        "attention_bias": any(name.endswith("q_proj.bias") for name in names),
        "bos_token_id": metadata.optional("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.optional("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.optional("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "qwen3moe":
        config |= {
            "num_experts": field("expert_count"),
            "num_experts_per_tok": field("expert_used_count"),
            "moe_intermediate_size": field("expert_feed_forward_length"),
            "norm_topk_prob": True,  # not in the metadata; llama.cpp always renormalises for this architecture
        }
    return config


def _rope(metadata: GgufMetadata, architecture: str, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` object."""

    def optional(name: str) -> Any:
        return metadata.optional(f"{architecture}.rope.{name}")

    rope = {"rope_type": "default", "rope_theta": optional("freq_base")}
    # as llama.cpp reads them: the kind is linear where a factor stands alone, which was called scale_linear before
    factor = optional("scaling.factor") if optional("scaling.factor") is not None else optional("scale_linear")
    kind = optional("scaling.type") or ("linear" if factor not in (None, 0, 1) else "none")
    if optional("scaling.attn_factor") not in (None, 1):
        raise InputError(
            f"{metadata.path}: {architecture}.rope.scaling.attn_factor is {optional('scaling.attn_factor')}, which is not supported"
        )
    if kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = metadata.field(f"{architecture}.rope.scaling.factor") if factor is None else factor
        if optional("scaling.original_context_length") is not None:
            rope["original_max_position_embeddings"] = optional("scaling.original_context_length")
    rotated = optional("dimension_count") or head_dim
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return rope


def _eos_ids(metadata: GgufMetadata) -> tuple[int, ...]:
    ids = (metadata.optional(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return tuple(sorted({token for token in ids if token is not None}))


def _open(path: Path) -> GGUFReader:
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: cannot be read as GGUF (damaged or truncated): {reason}") from error
    size = path.stat().st_size
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    if end > size:
        raise InputError(f"{path}: truncated: {end - size} bytes are missing")
    unknown = [tensor for tensor in reader.tensors if not isinstance(tensor.tensor_type, GGMLQuantizationType)]
    if unknown:
        raise InputError(f"{path}: tensor {unknown[0].name} has an unknown type")
    return reader


def _hf_name(name: str) -> str:
    """The Hugging Face name; the GGUF name itself where there is none, so that it shows up as extra."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None:
        return _NAMES.get(name, name)
    pattern = name.replace(layer[0], "blk.{i}.", 1)
    return _NAMES[pattern].replace("{i}", layer[1]) if pattern in _NAMES else name


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of rotary rows: it interleaves the two halves of each head, Hugging Face keeps them
    apart.
    """
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

"""Tiny models and a byte tokenizer for the tests of decoding."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.config import VerifierConfig
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.families import parse_config

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte and three special tokens, 259 in all: random tokens are often half characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def hf_config(vocab_size: int = 259, max_positions: int = 1024) -> dict[str, Any]:
    """A two-layer Llama's config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
    }


def tiny_config(vocab_size: int = 259, max_positions: int = 1024) -> VerifierConfig:
    return parse_config(hf_config(vocab_size, max_positions), "tiny")[0]


def tiny_decoder(config: VerifierConfig, seed: int = 0) -> Decoder:
    """Random weights large enough that the logits differ from token to token by more than rounding."""
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 10.0 if leaf.ndim > 1 else leaf, state))


class WholeSequence:
    """Computes a sequence's logits at once, without the loop, the buckets and the sampling under test."""

    def __init__(self, decoder: Decoder, longest: int = 64):
        """`longest`: tokens are padded to it on the right, where causality keeps them from mattering."""
        graph, state = nnx.split(decoder)
        layers = [layer.attention for layer in decoder.config.layers]
        self._state, self._longest = state, longest

        @jax.jit
        def logits(state: nnx.State, tokens: jax.Array) -> jax.Array:
            decoder = nnx.merge(graph, state)
            return decoder.logits(decoder(tokens, KVCache.empty(layers, 1, longest, jnp.float32))[0])

        self._logits = logits

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits float32 [T, V] of T tokens."""
        padded = np.zeros((1, self._longest), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._logits(self._state, padded))[0, : len(tokens)]

    def greedy(self, prompt: list[int], number: int) -> list[int]:
        """The most likely continuation, everything computed afresh for every token."""
        tokens = list(prompt)
        for _ in range(number):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def write_model(
    directory: Path, chat: bool = True, tokenizer: bool = True, max_positions: int = 1024, **sizes: int
) -> Path:
    """A model directory as transformers would write it; `sizes` go over those of `hf_config`."""
    config = hf_config(max_positions=max_positions) | sizes
    rng = np.random.default_rng(0)
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))

    def matrix(*shape: int) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], width),
        "model.norm.weight": np.ones(width, np.float32),
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in (
            ("input_layernorm", None),
            ("post_attention_layernorm", None),
            ("self_attn.q_proj", (heads, width)),
            ("self_attn.k_proj", (kv, width)),
            ("self_attn.v_proj", (kv, width)),
            ("self_attn.o_proj", (width, heads)),
            ("mlp.gate_proj", (inner, width)),
            ("mlp.up_proj", (inner, width)),
            ("mlp.down_proj", (width, inner)),
        ):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(width, np.float32) if shape is None else matrix(*shape)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    if tokenizer:
        byte_tokenizer(chat).save_pretrained(directory)
    return directory

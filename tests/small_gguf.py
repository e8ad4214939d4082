"""Small GGUF files, written as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, WIDTH, MLP_WIDTH = 4, 2, 8, 32, 64


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def vocabulary(merges: list[str]) -> list[str]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*special, *byte_letters().values(), *(merge.replace(" ", "") for merge in merges)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ċ Ċ", "Ã ©"]


def weights() -> dict[str, np.ndarray]:
    """Two Llama layers under Hugging Face names."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tensors = {"model.embed_tokens.weight": draw(len(vocabulary(MERGES)), WIDTH), "model.norm.weight": draw(WIDTH)}
    for i in range(2):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": draw(WIDTH),
            f"{layer}.self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.o_proj.weight": draw(WIDTH, HEADS * HEAD_DIM),
            f"{layer}.post_attention_layernorm.weight": draw(WIDTH),
            f"{layer}.mlp.gate_proj.weight": draw(MLP_WIDTH, WIDTH),
            f"{layer}.mlp.up_proj.weight": draw(MLP_WIDTH, WIDTH),
            f"{layer}.mlp.down_proj.weight": draw(WIDTH, MLP_WIDTH),
        }
    return tensors


GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_form(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """What llama.cpp's converter stores: its names, and rotary rows of q and k interleaved."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
    if heads is not None:
        rows = value.shape[0]
        value = np.concatenate(
            [value.reshape(heads, 2, -1, WIDTH)[head].transpose(1, 0, 2).reshape(-1, WIDTH) for head in range(heads)]
        ).reshape(rows, WIDTH)
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in ends:
        return ends[name], value
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[part.removesuffix('.weight')]}.weight", value


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    head: np.ndarray | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    leave_out: tuple[str, ...] = (),
    add: Mapping[str, float | str] = MappingProxyType({}),
) -> Path:
    """A two-layer Llama with a byte-level tokenizer. `quantised`: how matrices are stored; `leave_out`, `add`: metadata to omit, and
    to have beside the rest.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if "rope.freq_base" not in leave_out:
        writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in add.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    _add_tokenizer(writer, pre)
    for name, value in weights().items():
        stored, form = llama_cpp_form(name, value)
        if quantised is not None and form.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(form, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(stored, form)
    if head is not None:
        writer.add_tensor("output.weight", head)
    _finish(writer)
    return path


def write_moe_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Qwen3-MoE, 3 experts of width 32, head width 16; returns its tensors under their GGUF names."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(vocabulary(MERGES)), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (HEADS * 16, WIDTH),
        "blk.0.attn_k.weight": (KV_HEADS * 16, WIDTH),
        "blk.0.attn_v.weight": (KV_HEADS * 16, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, HEADS * 16),
        "blk.0.attn_q_norm.weight": (16,),
        "blk.0.attn_k_norm.weight": (16,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate_inp.weight": (3, WIDTH),
        "blk.0.ffn_gate_exps.weight": (3, 32, WIDTH),
        "blk.0.ffn_up_exps.weight": (3, 32, WIDTH),
        "blk.0.ffn_down_exps.weight": (3, WIDTH, 32),
    }
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)
    _add_tokenizer(writer, "qwen2")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    _finish(writer)
    return tensors


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = vocabulary(MERGES)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}")


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

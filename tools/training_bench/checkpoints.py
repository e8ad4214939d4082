"""The training bench's verifier and drafters, on disk in formats that both sides read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.drafters.content import DrafterContent
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.write import write_json
from jaxspec.drafters.config import Method
from jaxspec.training.initial import drafter_config, initial_drafter
from jaxspec.training.recipe import VerifierRecipe
from jaxspec.training.setup import open_side
from training_bench.case import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLP_WIDTH,
    SEED,
    TOKENS,
    VERIFIER,
    VERIFIER_LAYERS,
    VOCAB,
    WIDTH,
    drafter_recipe,
)


def target_ids() -> np.ndarray:
    """Verifier ids int32 [Vd] of the draft vocabulary."""
    ids = np.random.default_rng(SEED).choice(VOCAB, DRAFT_VOCAB, replace=False)
    return np.sort(ids).astype(np.int32)


def write_case(folder: Path, methods: Sequence[Method]) -> None:
    """The verifier and a drafter of each method, with random weights."""
    write_verifier(folder / VERIFIER)
    side = open_side(VerifierRecipe(str(folder / VERIFIER)), lambda line: None)
    for method in methods:
        recipe = drafter_recipe(method)
        config = drafter_config(recipe, side.config, mask_token=None)
        made = initial_drafter(recipe, config, side.lend, target_ids(), None, SEED)
        parameters = {path: np.asarray(made.values[path]) for path in own_shapes(config)}
        content = DrafterContent(config, parameters, target_ids(), side.lend.facts)
        save_drafter(folder / method, content, "speculators", verifier=side.lend)


def write_verifier(directory: Path) -> None:
    """A Llama of SmolLM2-135M's sizes, but for its depth."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": VERIFIER_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    shapes = {"embed_tokens": (VOCAB, WIDTH), "norm": (WIDTH,)}
    for layer in range(VERIFIER_LAYERS):
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj": (MLP_WIDTH, WIDTH),
            "mlp.up_proj": (MLP_WIDTH, WIDTH),
            "mlp.down_proj": (WIDTH, MLP_WIDTH),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    rng = np.random.default_rng(SEED)
    tensors = {
        f"model.{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else np.float32(0.04) * rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    write_json(directory / "config.json", config)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

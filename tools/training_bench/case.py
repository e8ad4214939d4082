"""What both sides of the training bench work on: a verifier's last step, a drafter of each method on disk, a packed batch.

No torch here: the drafters are written in speculators' format, which both sides read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.drafters.content import DrafterContent
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.write import write_json
from jaxspec.drafters.config import Method
from jaxspec.training.initial import drafter_config, initial_drafter
from jaxspec.training.recipe import DrafterRecipe, MarkovRecipe, ObjectiveRecipe, OptimizerRecipe, VerifierRecipe
from jaxspec.training.setup import open_side

# SmolLM2-135M's sizes; its layers never run, so that three of them are enough to have something to tap.
WIDTH, MLP_WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, VERIFIER_LAYERS = 576, 1536, 9, 3, 64, 49152, 3
TAPS, DRAFT_LAYERS, DRAFT_VOCAB, BLOCK, MASK_TOKEN, MARKOV_RANK = (0, 1, 2), 2, 8192, 8, VOCAB - 1, 64
TOKENS, DOCUMENT, PROMPT = 2048, 256, 64  # of the one row, of each document in it, of its prompt

OPTIMIZER = OptimizerRecipe(lr=6e-4, schedule="constant", warmup=0, weight_decay=0.01, clip=1.0, steps=1000)
VERIFIER, SEED = "verifier", 0


@dataclass(frozen=True)
class PackedRow:
    """One row of T tokens, its documents one after the other, and features drawn at random.

    tokens, documents, positions: int32 [1, T]; loss_mask: bool [1, T]; taps: float32 [1, T, n * D]; last: float32 [1, T, D].
    """

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    taps: np.ndarray
    last: np.ndarray


def packed_row() -> PackedRow:
    """The same on every call. No answer reaches its document's end by less than a block: speculators' blocks and chains run on into the
    next document, jaxspec's do not."""
    rng = np.random.default_rng(SEED)
    at = np.arange(TOKENS, dtype=np.int32)[None]
    positions = at % DOCUMENT
    return PackedRow(
        tokens=rng.integers(0, MASK_TOKEN, (1, TOKENS), dtype=np.int32),
        documents=at // DOCUMENT,
        positions=positions,
        loss_mask=(positions >= PROMPT) & (positions < DOCUMENT - BLOCK),
        taps=rng.standard_normal((1, TOKENS, len(TAPS) * WIDTH), np.float32),
        last=rng.standard_normal((1, TOKENS, WIDTH), np.float32),
    )


def objective(anchors: int) -> ObjectiveRecipe:
    """Every method's usual loss."""
    return ObjectiveRecipe(anchors=anchors)


def drafter_recipe(method: Method, folder: Path | None = None) -> DrafterRecipe:
    """The drafter; begun from the one in `folder` if that is given."""
    return DrafterRecipe(
        method=method,
        layers=DRAFT_LAYERS,
        taps=TAPS,
        draft_vocab_size=DRAFT_VOCAB,
        block_size=BLOCK if method in ("dflash", "dspark") else None,
        markov=MarkovRecipe("vanilla", MARKOV_RANK) if method == "dspark" else None,
        sliding_window=0,
        mask_token=MASK_TOKEN,
        init_from=None if folder is None else str(folder / method),
    )


def target_ids() -> np.ndarray:
    """Verifier ids int32 [Vd] of the draft vocabulary."""
    ids = np.random.default_rng(SEED).choice(VOCAB, DRAFT_VOCAB, replace=False)
    return np.sort(ids).astype(np.int32)


def write_case(folder: Path, methods: Sequence[Method]) -> None:
    """The verifier and a drafter of each method, with random weights."""
    write_verifier(folder / VERIFIER)
    side = open_side(VerifierRecipe(str(folder / VERIFIER)), _quiet)
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


def _quiet(line: str) -> None:
    del line

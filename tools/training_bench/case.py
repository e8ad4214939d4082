"""What both sides of the training bench work on: sizes, the recipe, a packed row.

Neither torch nor JAX is imported here: each side's memory is its own.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.drafters.config import Method
from jaxspec.training.recipe import DrafterRecipe, MarkovRecipe, ObjectiveRecipe, OptimizerRecipe

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

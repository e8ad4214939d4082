"""A tiny verifier, documents and a recipe on disk, for the tests of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tiny import write_model

TAPS, VOCAB, DRAFT_VOCAB = [0, 2], 259, 64


def write_documents(file: Path, number: int = 24, seed: int = 0) -> Path:
    """Lines of token ids: prompts at random, answers that count on from a random byte, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(number):
        prompt = rng.integers(0, 256, rng.integers(3, 8)).tolist()
        first, count = int(rng.integers(97, 117)), int(rng.integers(8, 20))
        answer = [97 + (first - 97 + step) % 20 for step in range(count)] + [256]
        lines.append(json.dumps({"index": index, "prompt_ids": prompt, "token_ids": answer, "finish_reason": "stop"}))
    file.write_text("\n".join(lines) + "\n")
    return file


def recipe(directory: Path, method: str = "dflash") -> dict[str, Any]:
    """A recipe's sections, for the verifier and documents of `workspace`."""
    block = method in ("dflash", "dspark")
    drafter: dict[str, Any] = {
        "method": method,
        "layers": 1,
        "taps": TAPS,
        "draft_vocab_size": DRAFT_VOCAB,
        "sliding_window": 0,
        "mask_token": 258,
        "train_embed": False,
    }
    if block:
        drafter["block_size"] = 4
    if method == "dspark":
        drafter["markov"] = {"kind": "vanilla", "rank": 4}
    return {
        "verifier": {"model": str(directory / "verifier"), "name": "owner/verifier"},
        "drafter": drafter,
        "data": {
            "train": [str(directory / "documents.jsonl")],
            "validation_share": 0.2,
            "max_tokens": 32,
            "rows": 2,
            "row_tokens": 48,
        },
        "objective": {"anchors": 8, "ttt_steps": 2, "depths": 3},
        "optimizer": {"lr": 0.01, "steps": 6, "warmup": 2},
        "run": {
            "output": str(directory / "run"),
            "checkpoint_every": 3,
            "validate_every": 3,
            "log_every": 1,
            "export": {"dtype": "float32"},
        },
    }


def workspace(directory: Path, method: str = "dflash", change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Verifier, documents and `recipe.yaml` in `directory`; the path of the latter. Verifier and documents stay if they are there."""
    if not (directory / "verifier").is_dir():
        write_model(directory / "verifier", max_positions=128)
        write_documents(directory / "documents.jsonl")
    made = recipe(directory, method)
    if change is not None:
        change(made)
    file = directory / "recipe.yaml"
    file.write_text(yaml.safe_dump(made))
    return file

"""Held-out acceptance: walked as generation goes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_training import workspace
from trainer_run import command

import jaxspec
from jaxspec.training.batch import Batch
from jaxspec.training.report import read_metrics
from jaxspec.training.validation import answers, validate, walk


def batch_of(mask: list[list[int]], documents: list[list[int]]) -> Batch:
    tokens = np.zeros(np.shape(mask), np.int32)
    return Batch(tokens, np.array(documents, np.int32), tokens, np.array(mask, bool))


def test_the_walk_goes_as_generation_does():
    # one answer of seven tokens, indices 2 .. 8, behind a prompt of two
    batch = batch_of([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0]], [[0] * 9 + [-1]])
    accepted = np.array([[9, 2, 9, 9, 0, 3, 9, 9, 9, 9]])
    # from 1: 2 accepted, next anchor 4; from 4: none, next 5; from 5: 3 accepted are all that is left
    found = walk(batch, accepted)
    assert found.cycles == 3
    assert found.accepted[:4].tolist() == [2, 2, 1, 0]
    assert found.length == pytest.approx(1 + 5 / 3)


def test_every_answer_of_every_document_is_walked():
    batch = batch_of(
        [[0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, 1, 1, 1], [0] * 4 + [-1] * 4]
    )
    found = list(answers(batch))
    # the second document begins with an answer token, which nothing can draft
    assert found == [(0, (1, 2)), (0, (4, 4)), (0, (7, 7)), (1, (1, 3))]
    assert walk(batch, np.zeros((2, 8), int)).cycles == 2 + 1 + 1 + 3


def test_anchors_are_asked_for_in_parts():
    batch = batch_of([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]], [[0] * 6, [0] * 5 + [-1]])
    asked: list[list[list[int]]] = []

    def accepts(anchors: np.ndarray) -> np.ndarray:
        asked.append(anchors.tolist())
        return np.stack([anchors >= 0, anchors == 2], axis=-1)

    found = validate(batch, accepts, drafts=2, chunk=2)
    assert asked == [[[0, 1], [2, 3]], [[2, 3], [-1, -1]], [[4, -1], [-1, -1]]]
    # row 0: 0 takes 1 -> 2 takes 2 -> end; row 1: 2 takes all there is
    assert found.cycles == 3
    assert found.per_position == pytest.approx([1.0, 2 / 3])


def test_held_out_acceptance_is_that_of_generation(tmp_path: Path):
    """A drafter trained on the tiny verifier's own greedy answers: what validation foresees is what generation does."""
    verifier = workspace(tmp_path, "dflash").parent / "verifier"
    engine = jaxspec.Engine.from_pretrained(verifier)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(97, 120, 6).tolist() for _ in range(6)]
    params = jaxspec.SamplingParams(max_new_tokens=24, ignore_eos=True)
    lines = [
        json.dumps({"prompt_ids": prompt, "token_ids": list(result.token_ids)})
        for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True)
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))

    def overfit(made: dict[str, Any]) -> None:
        made["data"] |= {
            "train": [str(tmp_path / "answers.jsonl")],
            "validation": [str(tmp_path / "answers.jsonl")],
            "rows": 4,
        }
        made["optimizer"] |= {"steps": 150, "lr": 0.01}
        made["run"] |= {"validate_every": 0, "checkpoint_every": 0, "log_every": 50}

    assert command("--config", workspace(tmp_path, "dflash", overfit)) == 0
    foreseen = [entry for entry in read_metrics(tmp_path / "run") if entry["kind"] == "validation"][-1]
    drafted = jaxspec.Engine.from_pretrained(verifier, str(tmp_path / "run" / "drafter"))
    found = [result.speculative for result in drafted.generate(prompts, params)]
    cycles = sum(one.cycles for one in found if one is not None)
    accepted = sum(one.accepted for one in found if one is not None)
    assert foreseen["acceptance_length"] > 2
    assert foreseen["acceptance_length"] == pytest.approx(1 + accepted / cycles, rel=0.05)

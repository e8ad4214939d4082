"""A drafter that has learned one sample by heart drafts the whole block right in every cycle of generating it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jitted import quick_programs
from tiny_training import workspace
from trainer_run import command

import jaxspec

PARAMS = jaxspec.SamplingParams(max_new_tokens=37, ignore_eos=True)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a verifier and its greedy answer to one prompt."""
    directory = tmp_path_factory.mktemp("overfit")
    verifier = workspace(directory).parent / "verifier"
    prompt = np.random.default_rng(3).integers(97, 120, 6).tolist()
    with quick_programs():
        (answer,) = jaxspec.Engine.from_pretrained(verifier).generate([prompt], PARAMS)
    assert len(set(answer.token_ids)) > 3  # something to learn
    (directory / "sample.json").write_text(json.dumps({"prompt": prompt, "answer": list(answer.token_ids)}))
    # The prompt is learned too: at an answer's first anchor, the prompt's last token, the originals' masks teach three methods nothing.
    line = {"prompt_ids": prompt[:1], "token_ids": [*prompt[1:], *answer.token_ids]}
    (directory / "sample.jsonl").write_text(json.dumps(line) + "\n")
    return directory


@pytest.mark.parametrize(
    ("method", "drafts"),
    [
        ("peagle", 3),
        ("dspark", 4),
        pytest.param("eagle3", 3, marks=pytest.mark.slow),
        pytest.param("dflash", 3, marks=pytest.mark.slow),
    ],
)
def test_a_sample_learned_by_heart_is_generated_by_whole_blocks(sample: Path, method: str, drafts: int):
    def by_heart(made: dict[str, Any]) -> None:
        made["data"] |= {"train": [str(sample / "sample.jsonl")], "validation_share": 0, "rows": 1, "max_tokens": 48}
        made["objective"] |= {
            "losses": {"ce": 1.0},
            "anchors": 48,
            "ttt_steps": drafts,
            "depths": drafts,
            "down_sample_min": 1.0,
        }
        made["optimizer"] |= {"steps": 150, "lr": 0.01, "warmup": 10}
        made["run"] |= {"output": str(sample / method), "checkpoint_every": 0, "log_every": 150}

    learned = json.loads((sample / "sample.json").read_text())
    with quick_programs():
        assert command("--config", workspace(sample, method, by_heart)) == 0
        engine = jaxspec.Engine.from_pretrained(sample / "verifier", str(sample / method / "drafter"))
        (answer,) = engine.generate([learned["prompt"]], PARAMS)
    assert list(answer.token_ids) == learned["answer"]
    assert answer.speculative is not None and len(answer.speculative.acceptance_per_position) == drafts
    # the last cycle ends with the answer
    assert {cycle.accepted for cycle in answer.cycles[:-1]} == {drafts}
    assert len(answer.cycles) == -(-37 // (drafts + 1))

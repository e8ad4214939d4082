"""Names in a run's directory."""

from pathlib import Path

CHECKPOINTS = "checkpoints"
IDENTITY = "run.json"
VOCABULARY = "vocabulary.npy"
METRICS = "metrics.jsonl"
EVENTS = "tensorboard"
PICTURE = "training.png"
SUMMARY = "summary.json"
DRAFTER = "drafter"
RELIABILITY = "reliability.png"  # in the drafter's own directory

LEFTOVERS = (CHECKPOINTS, IDENTITY, VOCABULARY, METRICS, EVENTS, PICTURE, SUMMARY, DRAFTER)
"""All of them: what `--fresh` removes."""


def begun(output: Path) -> bool:
    """Whether a run has left checkpoints there."""
    folder = output / CHECKPOINTS
    return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())

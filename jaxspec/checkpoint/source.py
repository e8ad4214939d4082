"""What a loader needs from a file format: the stored tensors by name, and one of them at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype`: BF16, F16 or F32, or the file's own word for what cannot be a weight here."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class Source(Protocol):
    """A checkpoint's tensors. `where` names the checkpoint in errors."""

    where: str

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By name, in the file's order."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, in memory of their own."""
        ...

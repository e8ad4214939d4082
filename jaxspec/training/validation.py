"""Acceptance on held-out documents: each is walked as greedy generation would go through it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.training.batch import Batch

Accepts = Callable[[np.ndarray], np.ndarray]
"""anchors int32 [B, A] of a batch (padded with -1) -> bool [B, A, K], as `Objective.accepts`."""


@dataclass(frozen=True)
class Acceptance:
    """What walking gave, over all cycles.

    Fields:
        cycles: of all documents.
        accepted: int64 [K], cycles whose drafts 1 .. k were all accepted.
    """

    cycles: int
    accepted: np.ndarray

    @property
    def length(self) -> float:
        """Mean of accepted + 1; nan without any cycle."""
        return 1 + float(self.accepted.sum()) / self.cycles if self.cycles else float("nan")

    @property
    def per_position(self) -> list[float]:
        """Share of all cycles that accepted each draft."""
        return [float(count) / self.cycles if self.cycles else float("nan") for count in self.accepted]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(self.cycles + other.cycles, self.accepted + other.accepted)


def walk(batch: Batch, accepted: np.ndarray) -> Acceptance:
    """Walks every answer of a batch.

    Decoding begins at the last token before an answer; a cycle commits the accepted drafts and the bonus token, which is the next anchor,
    until the answer's last token is committed.

    accepted: int [B, T], how many drafts in a row an anchor there would have accepted, 0 .. K.
    """
    most = int(accepted.max(initial=0))
    taken = np.array([cycle.taken for cycle in cycles(batch, accepted)], np.int64)
    counts = np.bincount(taken, minlength=most + 1)
    reached = counts[::-1].cumsum()[::-1]  # cycles that accepted at least so many
    return Acceptance(int(counts.sum()), reached[1:])


@dataclass(frozen=True)
class Cycle:
    """A cycle of the walk: its row and anchor, the drafts that it takes, and the answer's last token."""

    row: int
    anchor: int
    taken: int
    last: int


def cycles(batch: Batch, accepted: np.ndarray) -> Iterator[Cycle]:
    """The cycles of `walk`, in order."""
    for row, (first, last) in answers(batch):
        at = first - 1
        while at < last:
            taken = min(int(accepted[row, at]), last - at)
            yield Cycle(row, at, taken, last)
            at += taken + 1


def answers(batch: Batch) -> Iterator[tuple[int, tuple[int, int]]]:
    """(row, (first, last)) of every run of answer tokens that something comes before, all in one document."""
    mask, documents = np.asarray(batch.loss_mask), np.asarray(batch.documents)
    for row in range(mask.shape[0]):
        follows = np.zeros_like(mask[row])
        follows[1:] = mask[row, 1:] & mask[row, :-1] & (documents[row, 1:] == documents[row, :-1])
        firsts = np.flatnonzero(mask[row] & ~follows)
        lasts = np.flatnonzero(mask[row] & ~np.append(follows[1:], False))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if first == 0 or documents[row, first - 1] != documents[row, first]:
                first += 1  # a document's first token is no draft's to predict
            if first <= last:
                yield row, (first, last)


def validate(batch: Batch, accepts: Accepts, drafts: int, chunk: int) -> Acceptance:
    """Walks the documents of a batch. drafts: K; chunk: anchors a row that `accepts` takes."""
    accepted = in_a_row(everywhere(batch, accepts, chunk)[..., :drafts])
    found = walk(batch, accepted)
    per_draft = np.zeros(drafts, np.int64)
    per_draft[: len(found.accepted)] = found.accepted[:drafts]
    return Acceptance(found.cycles, per_draft)


def in_a_row(right: np.ndarray) -> np.ndarray:
    """bool [..., K] -> int [...], how many of them are true before the first that is not."""
    return np.cumprod(right, axis=-1, dtype=np.int64).sum(axis=-1)


def everywhere(batch: Batch, compute: Callable[[np.ndarray], Any], chunk: int) -> Any:
    """What `compute` gives at every anchor that a walk of the batch can come to.

    Args:
        batch: documents with answers.
        compute: anchors int32 [B, A], padded with -1 -> a pytree of arrays [B, A, ...].
        chunk: A, anchors a row in one call.

    Returns:
        The pytree with arrays [B, T, ...], zeros elsewhere.
    """
    rows, length = batch.tokens.shape
    wanted: list[list[int]] = [[] for _ in range(rows)]
    for row, (first, last) in answers(batch):
        wanted[row].extend(range(first - 1, last))
    found: Any = None
    for start in range(0, max(1, *map(len, wanted)), chunk):
        anchors = np.full((rows, chunk), -1, np.int32)
        for row, places in enumerate(wanted):
            part = places[start : start + chunk]
            anchors[row, : len(part)] = part
        made = jax.tree.map(np.asarray, compute(anchors))
        if found is None:
            found = jax.tree.map(lambda x: np.zeros((rows, length, *x.shape[2:]), x.dtype), made)
        there = anchors >= 0
        for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(made), strict=True):
            whole[np.nonzero(there)[0], anchors[there]] = part[there]
    return found

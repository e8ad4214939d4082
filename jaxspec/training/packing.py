"""From samples to batches: whole documents packed into rows of fixed length, in an order that depends on the seed and the epoch alone.

Every batch is a pure function of its number, so that resuming is starting at a number. grain reads the batches ahead in a thread and keeps
the place.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import grain
import numpy as np

from jaxspec.errors import InputError
from jaxspec.training.batch import Batch
from jaxspec.training.samples import Sample

T = TypeVar("T")

Row = tuple[int, ...]  # numbers of the samples in it, in order

WINDOW = 1024  # documents packed together: enough to fill rows by 98 % and more, few enough to mix anew each epoch
READ_AHEAD = 2  # batches


@dataclass(frozen=True)
class Packed:
    """A batch, and what is in it.

    Fields:
        batch: of numpy arrays.
        indices: for each row the numbers of its samples; sample indices[b][d] is document d of row b, whole.
    """

    batch: Batch
    indices: tuple[Row, ...]


class PackedBatches(Sequence[Packed]):
    """The batches of all epochs, numbered through. Made by `batches`.

    Attributes:
        epoch_ends: for each epoch the number of the batch behind its last one.
        fill: share of the first epoch's slots that hold a token.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        rows: int,
        length: int,
        seed: int,
        epochs: int,
        shuffle: bool,
        pack: bool,
    ):
        self._samples = samples
        self._rows, self._length = rows, length
        self._seed, self._shuffle, self._pack = seed, shuffle, pack
        self._sizes = [len(sample.tokens) for sample in samples]
        self._epoch_rows = lru_cache(maxsize=2)(self._make_epoch_rows)
        self.epoch_ends = list(accumulate(-(-len(self._epoch_rows(epoch)) // rows) for epoch in range(epochs)))
        self.fill = sum(self._sizes) / (self.epoch_ends[0] * rows * length)

    def __len__(self) -> int:
        return self.epoch_ends[-1]

    def __getitem__(self, index: int) -> Packed:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch = self.epoch_of(index)
        first = (index - (self.epoch_ends[epoch - 1] if epoch else 0)) * self._rows
        indices = self._epoch_rows(epoch)[first : first + self._rows]
        indices += ((),) * (self._rows - len(indices))
        return Packed(self._batch(indices), indices)

    def __iter__(self) -> Iterator[Packed]:
        return self.iterator()

    def epoch_of(self, index: int) -> int:
        """The epoch that a batch belongs to."""
        return bisect_right(self.epoch_ends, index)

    def iterator(self, transform: Callable[[Packed], Any] | None = None) -> "grain.DatasetIterator[Any]":
        """All batches in order, read ahead in a thread.

        `transform` is applied to each batch in that thread, to join what lies on disk, say. The iterator's `get_state()` is a small dict
        that JSON can hold; `set_state` goes on there, with exactly the batches that would have come.
        """
        data = grain.MapDataset.source(self)
        if transform is not None:
            data = data.map(transform)
        return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)))

    def _make_epoch_rows(self, epoch: int) -> tuple[Row, ...]:
        order = range(len(self._samples))
        if self._shuffle:
            order = self._permutation(len(order), epoch, 0)
        if not self._pack:
            return tuple((index,) for index in order)
        rows = [
            row
            for start in range(0, len(order), WINDOW)
            for row in pack_rows([(index, self._sizes[index]) for index in order[start : start + WINDOW]], self._length)
        ]
        # A window's first rows hold its longest documents.
        return tuple(rows[at] for at in self._permutation(len(rows), epoch, 1)) if self._shuffle else tuple(rows)

    def _permutation(self, number: int, epoch: int, purpose: int) -> list[int]:
        # A bit generator's stream is the same in every release of numpy, which is not promised for Generator.permutation.
        stream = np.random.Philox(key=[self._seed, 2 * epoch + purpose]).random_raw(number)
        return np.argsort(stream, kind="stable").tolist()

    def _batch(self, indices: Sequence[Row]) -> Batch:
        shape = (self._rows, self._length)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        documents, loss_mask = np.full(shape, -1, np.int32), np.zeros(shape, bool)
        for number, row in enumerate(indices):
            start = 0
            for document, index in enumerate(row):
                sample = self._samples[index]
                place = number, slice(start, start + len(sample.tokens))
                tokens[place], loss_mask[place] = sample.tokens, sample.loss_mask
                documents[place], positions[place] = document, np.arange(len(sample.tokens))
                start += len(sample.tokens)
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "documents": documents,
            "positions": positions,
            "loss_mask": loss_mask,
        }
        return Batch(**arrays)


def batches(
    samples: Sequence[Sample],
    rows: int,
    length: int,
    *,
    seed: int = 0,
    epochs: int = 1,
    shuffle: bool = True,
    pack: bool = True,
) -> PackedBatches:
    """Batches of B = `rows` rows of T = `length` tokens.

    Each epoch holds every sample once. Its documents are shuffled and packed anew, unless told otherwise; none is cut. What does not fill
    the epoch's last batch still is a batch: the rest of its rows are empty (padding throughout).

    Args:
        samples: at least one, none longer than `length`.
        rows: B, of all processes together.
        length: T.
        seed: of the order; 0 .. 2**64 - 1.
        epochs: how often every sample comes.
        shuffle: or keep the samples' order (packing moves documents a little).
        pack: or one document a row.

    Raises:
        InputError: a sample that is too long, or a number out of range.
    """
    for name, number in (("rows", rows), ("length", length), ("epochs", epochs)):
        if number < 1:
            raise InputError(f"{name} is {number}; it must be at least 1")
    if not 0 <= seed < 2**64:
        raise InputError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
    if not samples:
        raise InputError("there are no samples to make batches of")
    for sample in samples:
        if not 0 < len(sample.tokens) <= length:
            raise InputError(f"{sample.source} has {len(sample.tokens)} tokens; a row holds 1 to {length}")
    return PackedBatches(samples, rows, length, seed, epochs, shuffle, pack)


def pack_rows(documents: Sequence[tuple[int, int]], length: int) -> list[Row]:
    """Best fit, the longest first: each document goes into the fullest row that has room.

    Args:
        documents: number and size of each.
        length: of a row; no size is larger.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, and its number; in rising order
    for index, size in sorted(documents, key=lambda document: -document[1]):
        at = bisect_left(room, (size, 0))
        if at == len(room):
            left, number = length, len(rows)
            rows.append([])
        else:
            left, number = room.pop(at)
        rows[number].append(index)
        if left > size:
            insort(room, (left - size, number))
    return [tuple(row) for row in rows]

"""Packing: samples to rows and batches, the same ones again after a stop."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import InputError
from jaxspec.training import packing
from jaxspec.training.samples import Sample


def sample_of(size: int, number: int = 0) -> Sample:
    mask = np.zeros(size, bool)
    mask[size // 2 :] = True
    return Sample(np.arange(size, dtype=np.int32) + 1000 * number, mask, f"file:{number}")


def some_samples(count: int = 40, longest: int = 30, seed: int = 0) -> list[Sample]:
    sizes = np.random.default_rng(seed).integers(2, longest + 1, count)
    return [sample_of(int(size), number) for number, size in enumerate(sizes)]


def test_an_epoch_holds_every_sample_once_and_whole():
    samples = some_samples()
    made = packing.batches(samples, 2, 32)
    seen: list[int] = []
    for packed in made:
        batch = packed.batch
        assert batch.tokens.shape == batch.documents.shape == batch.positions.shape == batch.loss_mask.shape == (2, 32)
        dtypes = [field.dtype for field in (batch.tokens, batch.documents, batch.positions, batch.loss_mask)]
        assert dtypes == [np.int32, np.int32, np.int32, bool]
        for row, indices in enumerate(packed.indices):
            size = 0
            for document, index in enumerate(indices):
                here = batch.documents[row] == document
                np.testing.assert_array_equal(batch.tokens[row][here], samples[index].tokens)
                np.testing.assert_array_equal(batch.loss_mask[row][here], samples[index].loss_mask)
                np.testing.assert_array_equal(batch.positions[row][here], np.arange(len(samples[index].tokens)))
                size += here.sum()
            assert (batch.documents[row, size:] == -1).all() and not batch.loss_mask[row, size:].any()
            assert not batch.tokens[row, size:].any() and (np.diff(batch.documents[row, :size]) >= 0).all()
            seen += indices
    assert sorted(seen) == list(range(len(samples)))


def test_rows_are_filled_well():
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 0.6, 3000), 2, 500).astype(int)
    made = packing.batches([sample_of(int(size)) for size in sizes], 4, 512)
    assert made.fill > 0.97


def test_best_fit_fills_a_row_before_it_opens_another():
    assert packing.pack_rows([(0, 3), (1, 7), (2, 2), (3, 5), (4, 3)], 10) == [(1, 0), (3, 4, 2)]
    assert packing.pack_rows([(5, 10), (6, 10)], 10) == [(5,), (6,)]


def test_each_epoch_has_an_order_of_its_own_and_the_seed_decides_it():
    samples = some_samples()

    def order(**options: Any) -> list[tuple[packing.Row, ...]]:
        return [packed.indices for packed in packing.batches(samples, 2, 32, epochs=2, **options)]

    made = packing.batches(samples, 2, 32, epochs=2)
    first, second = order()[: made.epoch_ends[0]], order()[made.epoch_ends[0] :]
    assert order() == order() and order(seed=1) != order()
    assert first != second
    assert Counter(i for rows in first for row in rows for i in row) == Counter(
        i for rows in second for row in rows for i in row
    )
    assert len(made) == made.epoch_ends[-1]
    assert [made.epoch_of(at) for at in (0, made.epoch_ends[0] - 1, made.epoch_ends[0])] == [0, 0, 1]


def test_the_order_of_a_seed_never_changes():
    # Written down so that no release of a library can change the order of a run that is resumed.
    made = packing.batches([sample_of(4, number) for number in range(8)], 2, 8, seed=7, epochs=2)
    assert [packed.indices for packed in made] == [
        ((5, 0), (6, 3)),
        ((2, 7), (4, 1)),
        ((1, 5), (3, 2)),
        ((6, 7), (4, 0)),
    ]


def test_without_shuffling_and_packing_samples_come_as_they_are():
    samples = some_samples(5)
    made = packing.batches(samples, 2, 32, shuffle=False, pack=False)
    assert [packed.indices for packed in made] == [((0,), (1,)), ((2,), (3,)), ((4,), ())]


def test_the_last_batch_of_an_epoch_is_filled_up_with_empty_rows():
    made = packing.batches([sample_of(8, number) for number in range(3)], 2, 8, epochs=2)
    assert made.epoch_ends == [2, 4]
    packed = made[1]
    assert len(packed.indices[0]) == 1 and packed.indices[1] == ()
    assert (packed.batch.documents[1] == -1).all() and not packed.batch.loss_mask[1].any()
    with pytest.raises(IndexError):
        made[4]


def same(left: packing.Packed, right: packing.Packed) -> bool:
    fields = ("tokens", "documents", "positions", "loss_mask")
    equal = all(np.array_equal(getattr(left.batch, name), getattr(right.batch, name)) for name in fields)
    return equal and left.indices == right.indices


@pytest.mark.parametrize("done", [0, 1, 5, 11])
def test_a_restored_iterator_goes_on_with_exactly_the_same_batches(done):
    samples = some_samples()
    whole = list(packing.batches(samples, 2, 32, seed=3, epochs=2))
    iterator = packing.batches(samples, 2, 32, seed=3, epochs=2).iterator()
    for _ in range(done):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    restored = packing.batches(samples, 2, 32, seed=3, epochs=2).iterator()
    restored.set_state(state)
    rest = list(restored)
    assert len(rest) == len(whole) - done > 0
    assert all(map(same, rest, whole[done:]))


def test_a_transform_runs_on_every_batch_and_its_errors_come_through():
    samples = some_samples(10)
    made = packing.batches(samples, 2, 32)
    sums = list(made.iterator(lambda packed: int(packed.batch.tokens.sum())))
    assert sums == [int(packed.batch.tokens.sum()) for packed in made]

    def broken(packed: packing.Packed) -> None:
        raise InputError(f"{samples[packed.indices[0][0]].source} is broken")

    with pytest.raises(InputError, match=r"^file:\d+ is broken"):
        next(made.iterator(broken))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 29}, r"file:\d+ has 30 tokens; a row holds 1 to 29"),
        ({"rows": 0}, "rows is 0; it must be at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"samples": []}, "there are no samples"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(options, said):
    settings = {"samples": [sample_of(30, 5), sample_of(3)], "rows": 2, "length": 32, **options}
    with pytest.raises(InputError, match=said):
        packing.batches(**settings)

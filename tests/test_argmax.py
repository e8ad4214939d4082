"""The shared argmax: NumPy's answer, on every platform and at every size."""

import jax
import numpy as np
import pytest
from jitted import QUICK_COMPILE

from jaxspec.layers import argmax as module
from jaxspec.layers.argmax import CHUNK

SIZES = [5, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 37]
FUNCTIONS = {"chosen": module.argmax, "cpu": module._chunked, "elsewhere": module._plain}
WAYS = {way: jax.jit(function, compiler_options=QUICK_COMPILE) for way, function in FUNCTIONS.items()}

pytestmark = [pytest.mark.parametrize("way", WAYS), pytest.mark.parametrize("size", SIZES)]


def on_the_diagonal(size: int, value: float, elsewhere: float | np.ndarray) -> np.ndarray:
    """float32 [size, size]."""
    x = np.broadcast_to(np.float32(elsewhere), (size, size)).copy()
    np.fill_diagonal(x, value)
    return x


def test_it_is_numpys(way, size):
    x = np.random.default_rng(size).standard_normal((size, size)).astype(np.float32)
    found = WAYS[way](x)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, x.argmax(-1))


def test_among_equals_the_lowest_id_wins(way, size):
    x = np.random.default_rng(size).integers(0, 3, (size, size)).astype(np.float32)
    np.testing.assert_array_equal(WAYS[way](x), x.argmax(-1))


def test_every_place_is_found(way, size):
    np.testing.assert_array_equal(WAYS[way](on_the_diagonal(size, -1e29, -1e30)), np.arange(size))


def test_minus_infinity_loses_against_anything_finite(way, size):
    x = on_the_diagonal(size, np.finfo(np.float32).min, -np.inf)
    np.testing.assert_array_equal(WAYS[way](x), np.arange(size))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_row_of_nothing_but_one_value_gives_the_first_id(way, size, value):
    np.testing.assert_array_equal(WAYS[way](np.full((size, size), value, np.float32)), 0)


def test_some_nan_in_a_row_never_gives_an_id_out_of_range(way, size):
    x = on_the_diagonal(size, np.nan, np.random.default_rng(size).standard_normal((size, size)))
    found = np.asarray(WAYS[way](x))
    assert (found >= 0).all() and (found < size).all()


def test_rows_may_have_any_shape(way, size):
    x = np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32)
    np.testing.assert_array_equal(WAYS[way](x), x.argmax(-1))

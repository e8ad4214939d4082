"""The matrix product gives the same whichever operand comes first, and however many rows there are."""

import jax
import numpy as np
import pytest

from jaxspec_kernels.projection import CPU_WEIGHT_FIRST_ROWS, project


@pytest.mark.parametrize("rows", [*range(1, 18), CPU_WEIGHT_FIRST_ROWS, CPU_WEIGHT_FIRST_ROWS + 1])
def test_every_number_of_rows_gives_numpys_product(rows):
    rng = np.random.default_rng(rows)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 2, 12), (3, 7, 2, 12)))
    expected = np.einsum("mij,abij->mab", x, weight, dtype=np.float64)
    np.testing.assert_allclose(jax.jit(project, static_argnums=2)(x, weight, 2), expected, rtol=1e-5, atol=1e-5)


def test_a_width_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not end with the weight's input dimensions"):
        project(np.zeros((2, 5), np.float32), np.zeros((3, 4), np.float32))

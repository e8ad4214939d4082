"""Rows worked on some at a time: the same as all at once, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.parts import in_parts, sums_in_parts

BATCH, COUNT, WIDTH = 2, 11, 5
Terms = tuple[tuple[jax.Array, ...], jax.Array]


def given(dtype: type = jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x, wanted = (jnp.array(rng.standard_normal((BATCH, COUNT, WIDTH)), dtype) for _ in range(2))
    return (
        x,
        jnp.array(rng.standard_normal((WIDTH, WIDTH)), dtype),
        wanted,
        jnp.arange(COUNT, dtype=jnp.int32)[None].repeat(BATCH, 0),
    )


def score(weight: jax.Array, x: jax.Array, index: jax.Array, wanted: jax.Array) -> Terms:
    """Two terms a row, the second of which meets `weight` too; not zero for a row of zeros."""
    made = jnp.tanh(x @ weight) + 1.0
    first = jnp.sum((made - wanted) ** 2, axis=-1).astype(jnp.float32)
    second = jnp.cos(made[..., 0]).astype(jnp.float32) * (1.0 + index.astype(jnp.float32))
    return (first, second), made[..., 0] > 1


@pytest.mark.parametrize("size", [1, 3, COUNT, 99])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_and_their_gradients_are_those_of_all_rows_at_once(size, dtype):
    x, weight, wanted, index = given(dtype)
    shares = jnp.array([0.7, -1.3], jnp.float32)

    def in_some(x: jax.Array, weight: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        def f(*part: jax.Array) -> Terms:
            return score(weight, *part)

        sums, right = sums_in_parts(f, (x, index), size, 1, constants=(wanted,))
        return jnp.sum(shares * jnp.stack(sums)), right

    def at_once(x: jax.Array, weight: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms, right = score(weight, x, index, wanted)
        return jnp.sum(shares * jnp.stack([jnp.sum(each) for each in terms])), right

    (made, right), slopes = jax.jit(jax.value_and_grad(in_some, (0, 1), has_aux=True))(x, weight, wanted)
    (value, wanted_right), wanted_slopes = jax.jit(jax.value_and_grad(at_once, (0, 1), has_aux=True))(x, weight, wanted)
    np.testing.assert_array_equal(right, wanted_right)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(made, value, rtol=tolerance)
    np.testing.assert_allclose(in_some(x, weight, wanted)[0], value, rtol=tolerance)  # where no gradient is taken
    for one, other in zip(slopes, wanted_slopes, strict=True):
        assert one.dtype == other.dtype == dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


def test_constants_get_no_gradient():
    x, weight, wanted, index = given()

    def value(wanted: jax.Array) -> jax.Array:
        sums, _ = sums_in_parts(lambda *part: score(weight, *part), (x, index), 3, 1, constants=(wanted,))
        return sums[0]

    assert not jnp.any(jax.grad(value)(wanted))


@pytest.mark.parametrize("size", [1, 3, COUNT])
def test_parts_are_put_together_in_order(size):
    x, _, _, index = given()
    np.testing.assert_array_equal(
        in_parts(lambda x, i: x * i[..., None].astype(x.dtype), (x, index), size, 1),
        x * index[..., None].astype(x.dtype),
    )

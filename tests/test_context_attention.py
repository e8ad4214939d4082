"""Attention by tiles of a training row's context, against the whole of it behind a mask."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import QUICK_COMPILE

from jaxspec.training import attention
from jaxspec.training.attention import Span, two_part_attention
from jaxspec.training.context_attention import TILE

BATCH, HEADS, KV_HEADS, WIDTH = 2, 6, 2, 8
LENGTH, DOCUMENT = 2 * TILE + 44, 70  # no whole number of tiles, and documents that end within them


@dataclass(frozen=True)
class Case:
    """A blocks of S slots in no order, each with J keys of its own (0: none)."""

    blocks: int
    slots: int
    own: int = 0
    softcap: float | None = None
    chunk: int | None = None
    dtype: type = jnp.float32


CASES = [
    Case(40, 4, own=4),
    Case(LENGTH, 1, own=2),
    Case(37, 8, softcap=5.0),
    Case(40, 4, own=4, softcap=3.0, chunk=7),
    Case(5, 200),
    Case(40, 4, own=4, dtype=jnp.bfloat16),
]


def arguments(case: Case) -> tuple:
    """Queries, keys, values, own keys and values; spans of which some are empty."""
    rng = np.random.default_rng(case.blocks)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape), case.dtype)

    context = (normal(BATCH, LENGTH, KV_HEADS, WIDTH), normal(BATCH, LENGTH, KV_HEADS, WIDTH))
    own = tuple(normal(BATCH, case.blocks, case.own, KV_HEADS, WIDTH) for _ in range(2)) if case.own else None
    at = rng.integers(0, LENGTH, (BATCH, case.blocks, 1))
    at[:, ::5] = DOCUMENT * (at[:, ::5] // DOCUMENT)  # nothing before them
    stop = np.broadcast_to(at, (BATCH, case.blocks, case.slots)).astype(np.int32)
    q = normal(BATCH, case.blocks, case.slots, HEADS, WIDTH)
    return (q, *context, own), Span(jnp.array(DOCUMENT * (stop // DOCUMENT)), jnp.array(stop))


def attended(case: Case, given: tuple, span: Span) -> jax.Array:
    q, k, v, own = given
    mask = jnp.tri(case.slots, case.own, dtype=jnp.bool_) if case.own else None
    made = two_part_attention(q, (k, v), span, own, mask, scale=0.4, softcap=case.softcap, chunk=case.chunk)
    return made.astype(jnp.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_give_what_the_whole_context_gives(case, monkeypatch):
    given, span = arguments(case)
    weights = jnp.array(np.random.default_rng(1).standard_normal(given[0].shape), jnp.float32)

    def run(skips: bool) -> tuple:
        monkeypatch.setattr(attention, "skips", lambda: skips)

        def value(given: tuple) -> tuple[jax.Array, jax.Array]:
            made = attended(case, given, span)
            return jnp.sum(weights * made), made

        return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=QUICK_COMPILE)(given)

    (_, made), slopes = run(skips=True)
    (_, wanted), wanted_slopes = run(skips=False)
    # bfloat16 rounds the weights, once before and once after they are divided by their sum.
    tolerance = 1e-5 if case.dtype == jnp.float32 else 0.02
    for one, other in zip(jax.tree.leaves((made, slopes)), jax.tree.leaves((wanted, wanted_slopes)), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


def test_tiles_out_of_sight_are_not_touched(monkeypatch):
    """Numbers that aren't any in a tile that nobody sees reach neither the output nor a gradient."""
    case = Case(16, 8)
    (q, k, v, own), _ = arguments(case)
    stop = np.broadcast_to(np.arange(1, 17)[None, :, None], (BATCH, 16, 8)).astype(np.int32)
    span = Span(jnp.zeros_like(stop), jnp.array(stop))
    k, v = (x.at[:, TILE:].set(jnp.nan) for x in (k, v))
    monkeypatch.setattr(attention, "skips", lambda: True)
    made, slopes = jax.value_and_grad(lambda given: jnp.sum(attended(case, given, span)))((q, k, v, own))
    assert jnp.isfinite(made) and all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(slopes))


def test_several_devices_take_the_whole_context(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not attention.skips()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert attention.skips()

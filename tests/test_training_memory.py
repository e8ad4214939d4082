"""What the compiled gradient of a block drafter's loss holds on the way: XLA's temporaries. Nothing runs."""

from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import tiny_drafters as tiny
from flax import nnx
from jitted import QUICK_COMPILE

from jaxspec.checkpoint.drafters.load import abstract_drafter
from jaxspec.drafters.config import BlockConfig
from jaxspec.training import attention
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Target, terms_of
from jaxspec.training.objectives.block import BlockObjective

ANCHORS, SLOTS, CONTEXT = 128, 8, 1024


@cache
def temporaries(anchors: int, slots: int, context: int, size: int | None, skips: bool = False) -> int:
    """Bytes of a DFlash drafter's loss and gradient over one row of `context` tokens; `size`: anchors at a time; `skips`: as on a CPU."""
    with mock.patch.object(attention, "skips", lambda: skips):
        return _temporaries(anchors, slots, context, size)


def _temporaries(anchors: int, slots: int, context: int, size: int | None) -> int:
    layer = tiny.layers(1)[0]
    config = tiny.block("dflash", layers=(layer,), block=BlockConfig(slots, False), draft_vocab_size=tiny.VD)
    objective = BlockObjective(slots, False, anchors, {"kl": 1.0}, "fixed", chunk=size, scored=size)
    graphdef, state = nnx.split(abstract_drafter(config, jnp.float32))

    def shape(*dims: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def loss(state: nnx.State, batch: Batch, features: Features, norm: jax.Array, head: jax.Array) -> jax.Array:
        choices = jnp.broadcast_to(jnp.arange(anchors, dtype=jnp.int32), (1, anchors))
        target = Target(norm, head, None, 1e-6)
        sums, _ = objective.sums(nnx.merge(graphdef, state), target, batch, features, choices)
        return jnp.sum(terms_of(sums, objective.weights(batch, choices)))

    ids = shape(1, context, dtype=jnp.int32)
    batch = Batch(ids, ids, ids, shape(1, context, dtype=jnp.bool_))
    features = Features(shape(1, context, config.feature_width), shape(1, context, config.width))
    program = jax.jit(jax.value_and_grad(loss, allow_int=True), compiler_options=QUICK_COMPILE)
    arguments = (state, batch, features, shape(config.width), shape(config.draft_vocab_size, config.width))
    analysis = program.lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("twice", ["anchors", "slots", "context"])
def test_memory_grows_with_anchors_times_slots_times_context_and_block(twice: str) -> None:
    """A * S * (T + S): twice as much for twice of any of them. Were the keys of all blocks in one row behind a mask, as the originals
    have it, it would be A * S * (T + A * S): 3.0 times for twice the anchors here, and in the end 4."""
    sizes = {"anchors": ANCHORS, "slots": SLOTS, "context": CONTEXT}
    once = temporaries(**sizes, size=2 * ANCHORS)
    grown = temporaries(**{**sizes, twice: 2 * sizes[twice]}, size=2 * ANCHORS)
    assert 1.8 < grown / once < 2.1


def test_parts_hold_a_fraction_of_it() -> None:
    """By default so many anchors are worked on at a time that their scores and logits don't add up."""
    assert temporaries(2 * ANCHORS, SLOTS, CONTEXT, None) < 0.3 * temporaries(2 * ANCHORS, SLOTS, CONTEXT, 2 * ANCHORS)


def test_tiles_of_the_context_hold_less_and_do_not_grow_with_it() -> None:
    """A CPU holds the scores of one tile of the context."""
    all_of_it = temporaries(ANCHORS, SLOTS, CONTEXT, 2 * ANCHORS)
    tiles = temporaries(ANCHORS, SLOTS, CONTEXT, 2 * ANCHORS, skips=True)
    assert tiles < 0.3 * all_of_it
    assert temporaries(ANCHORS, SLOTS, 2 * CONTEXT, 2 * ANCHORS, skips=True) < 1.2 * tiles

"""Prefill of a ragged batch, and many cycles a dispatch on the device.

Prefill commits every prompt token but the last, which becomes the first anchor. So a token is drawn in one place only, and the state
before the first cycle looks like the state before any other.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.decoding.cycle import Plan, cycle
from jaxspec.decoding.state import NO_TOKEN, DecodeState, Dispatch, DraftState, Finish, Requests
from jaxspec.drafters.base import Context, Drafter, take_rows
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder

MAX_CYCLES = 32  # C: most cycles in one dispatch


def prefill(
    decoder: Decoder,
    drafter: Drafter | None,
    cache: KVCache,
    draft: DraftState | None,
    tokens: jax.Array,
    count: jax.Array,
) -> tuple[KVCache, DraftState | None]:
    """Commit the first `count` tokens of each row to the verifier; all but the very last of them to the drafter.

    A row's last features wait in the draft state's context, for the first cycle to commit them with the token that follows.

    Args:
        decoder: the verifier.
        drafter: or None.
        cache: B rows; the tokens follow what it holds.
        draft: likewise; a context of earlier calls that still waits is committed first.
        tokens: int32 [B, T + 1], padded on the right: T tokens, and what follows the last of them. Causality keeps the padding from the
            real tokens; its slots are overwritten later.
        count: int32 [B], 0 .. T.

    Returns:
        The cache, `count` tokens longer, and the draft state.
    """
    taps = () if drafter is None else drafter.config.taps
    _, features, cache = decoder(tokens[:, :-1], cache, taps)
    cache = cache.advance(count)
    if drafter is None or draft is None or features is None:
        return cache, draft
    waiting = draft.context
    first = jax.tree.map(lambda rows: rows[:, :1], (waiting.features, waiting.tokens))
    # The row that waited, if one did, stands in front of the new ones; a row without any shifts them to its place.
    features = jnp.concatenate([first[0], features], axis=1)
    following = jnp.concatenate([first[1], tokens[:, 1:]], axis=1)
    shift = 1 - waiting.count
    rows = features.shape[1]
    features = take_rows(jnp.pad(features, ((0, 0), (0, 1), (0, 0))), shift, rows)
    following = take_rows(jnp.pad(following, ((0, 0), (0, 1))), shift, rows)
    total = waiting.count + count
    last = jnp.maximum(total - 1, 0)
    draft_cache = drafter.prefill(Context(features, following, last), draft.cache)
    # Without any row everything keeps its place: drafts must not depend on the padding.
    some = total[:, None] > 0
    feature = jnp.where(some[..., None], take_rows(features, last, 1), first[0])
    token = jnp.where(some, take_rows(following, last, 1), first[1])
    kept = Context(waiting.features.at[:, :1].set(feature), waiting.tokens.at[:, :1].set(token), jnp.minimum(total, 1))
    return cache, DraftState(draft_cache, kept)


def decode(
    decoder: Decoder,
    drafter: Drafter | None,
    state: DecodeState,
    requests: Requests,
    cycles: jax.Array,
    plan: Plan,
) -> tuple[DecodeState, Dispatch]:
    """Run up to `cycles` cycles; ends early when no row is running.

    Args:
        decoder: the verifier.
        drafter: or None.
        state: B rows.
        requests: their parameters.
        cycles: int32 scalar, 1 .. MAX_CYCLES.
        plan: what a cycle does.

    Returns:
        The state behind the last cycle, and what happened in each.
    """
    shapes = jax.eval_shape(lambda state: cycle(decoder, drafter, state, requests, plan)[1], state)
    records = jax.tree.map(lambda leaf: jnp.full((MAX_CYCLES, *leaf.shape), NO_TOKEN, leaf.dtype), shapes)

    def unfinished(carry: tuple[jax.Array, DecodeState, Dispatch]) -> jax.Array:
        number, state, _ = carry
        return jnp.logical_and(number < cycles, jnp.any(state.finish == Finish.RUNNING))

    def body(carry: tuple[jax.Array, DecodeState, Dispatch]) -> tuple[jax.Array, DecodeState, Dispatch]:
        number, state, dispatch = carry
        state, record = cycle(decoder, drafter, state, requests, plan)
        records = jax.tree.map(lambda all_, one: all_.at[number].set(one), dispatch.records, record)
        return number + 1, state, Dispatch(records, jnp.asarray(state.finish))

    carry = (jnp.int32(0), state, Dispatch(records, jnp.asarray(state.finish)))
    _, state, dispatch = jax.lax.while_loop(unfinished, body, carry)
    return state, dispatch


def empty_context(anchor: jax.Array, drafts: int, width: int, dtype: DTypeLike) -> Context:
    """Room for `drafts` + 1 rows of features of `width`, none counted, and the anchor int32 [B] where it then has to stand."""
    batch = anchor.shape[0]
    tokens = jnp.broadcast_to(anchor[:, None], (batch, drafts + 1))
    return Context(jnp.zeros((batch, drafts + 1, width), dtype), tokens, jnp.zeros_like(anchor))

"""Plain decoding, without a drafter: prefill a ragged batch, then many tokens a dispatch on the device.

Prefill commits every prompt token but the last, which becomes the first anchor. So a token is drawn in one place only, and the state
before the first token looks like the state before any other: a drafter's first cycle needs no case of its own.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.decoding.sampling import penalize, sample
from jaxspec.decoding.state import NO_TOKEN, DecodeState, Dispatch, Finish, Requests
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder

MAX_STEPS = 32  # N: most tokens a row in one dispatch


def prefill(decoder: Decoder, cache: KVCache, tokens: jax.Array, count: jax.Array) -> KVCache:
    """Commit the first `count` tokens of each row.

    Args:
        decoder: the verifier.
        cache: B rows; the tokens follow what it holds.
        tokens: int32 [B, T], padded on the right. Causality keeps the padding from the real tokens; its slots are overwritten later.
        count: int32 [B], 0 .. T.

    Returns:
        The cache, `count` tokens longer.
    """
    _, _, cache = decoder(tokens, cache)
    return cache.advance(count)


def decode(decoder: Decoder, state: DecodeState, requests: Requests, steps: jax.Array) -> tuple[DecodeState, Dispatch]:
    """Generate up to `steps` tokens a row; ends early when no row is running.

    Args:
        decoder: the verifier.
        state: B rows.
        requests: their parameters.
        steps: int32 scalar, 1 .. MAX_STEPS.

    Returns:
        The state behind the last token, and the tokens.
    """

    def unfinished(carry: tuple[jax.Array, jax.Array, DecodeState]) -> jax.Array:
        step, _, state = carry
        return jnp.logical_and(step < steps, jnp.any(state.finish == Finish.RUNNING))

    def body(carry: tuple[jax.Array, jax.Array, DecodeState]) -> tuple[jax.Array, jax.Array, DecodeState]:
        step, tokens, before = carry
        after = decode_token(decoder, before, requests)
        new = jnp.where(before.finish == Finish.RUNNING, after.anchor, NO_TOKEN)
        return step + 1, jax.lax.dynamic_update_index_in_dim(tokens, new, step, axis=1), after

    tokens = jnp.full((state.anchor.shape[0], MAX_STEPS), NO_TOKEN, jnp.int32)
    _, tokens, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), tokens, state))
    return state, Dispatch(tokens, state.finish)


def decode_token(decoder: Decoder, state: DecodeState, requests: Requests) -> DecodeState:
    """Generate one token a running row: it becomes the anchor, and the anchor before it enters the cache."""
    running = state.finish == Finish.RUNNING
    position = state.cache.length
    with jax.named_scope("verify"):
        hidden, _, cache = decoder(state.anchor[:, None], state.cache)
        logits = decoder.logits(hidden)[:, 0]  # [B, V]
    with jax.named_scope("sample"):
        if state.counts is not None:
            logits = penalize(logits, state.counts, requests.sampling)
        drawn = sample(logits, requests.sampling, position, jnp.zeros_like(position))
    with jax.named_scope("commit"):
        anchor = jnp.where(running, drawn, state.anchor)
        generated = state.generated + running.astype(jnp.int32)
        # The stop is tested before the cap: a stop token as the last allowed one is a stop.
        stopped = jnp.any(anchor[:, None] == requests.stop_ids, axis=-1)
        full = generated >= requests.limit
        code = jnp.where(stopped, Finish.STOP, jnp.where(full, Finish.LENGTH, Finish.RUNNING))
        return replace(
            state,
            cache=cache.advance(running.astype(jnp.int32)),
            anchor=anchor,
            generated=generated,
            finish=jnp.where(running, code, state.finish).astype(jnp.int32),
            counts=None if state.counts is None else state.counts.add(anchor, running),
        )

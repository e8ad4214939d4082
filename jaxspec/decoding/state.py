"""What decoding carries from cycle to cycle, and what it hands to the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.sampling import SamplingRows, TokenCounts
from jaxspec.drafters.base import Context
from jaxspec.layers.cache import KVCache

NO_TOKEN = -1  # fills token and stop-id arrays where there is none


class Finish(IntEnum):
    """Why a row has ended, or that it has not."""

    RUNNING = 0
    STOP = 1  # an end-of-sequence or stop token
    LENGTH = 2  # max_new_tokens, or the model's longest sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """What stays fixed while a batch of B rows is decoded; never donated.

    Fields:
        sampling: parameters a row.
        limit: int32 [B], most tokens to generate.
        stop_ids: int32 [B, E], ids that end the row, padded with -1.
        bias: float32 [B, V], added to the logits; None where no row has one (another compiled program).
    """

    sampling: SamplingRows
    limit: jax.Array
    stop_ids: jax.Array
    bias: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """A drafter's side of the state.

    Fields:
        cache: what the drafter has committed.
        context: what the verifier committed since, [B, K + 1] rows of it.
    """

    cache: KVCache
    context: Context


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of B rows between two cycles; donated to every dispatch.

    Fields:
        cache: keys and values of every committed token but the anchor; `cache.length` is the anchor's absolute position.
        anchor: int32 [B], the last committed token, at first the prompt's last one.
        generated: int32 [B], tokens committed after the prompt.
        finish: int32 [B], a `Finish` code. A row that has one no longer changes.
        counts: what the penalties look at, or None where no row has a penalty (another compiled program).
        draft: the drafter's side, None without one.
    """

    cache: KVCache
    anchor: jax.Array | np.ndarray
    generated: jax.Array | np.ndarray
    finish: jax.Array | np.ndarray
    counts: TokenCounts | None
    draft: DraftState | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """The verifier's own log-probabilities at the slots of a block, before bias, penalties and temperature.

    Fields:
        token: float32 [B, K + 1], of the committed token; anything where there is none.
        top_ids: int32 [B, K + 1, n], the n most likely tokens.
        top: float32 [B, K + 1, n], theirs.
    """

    token: jax.Array
    top_ids: jax.Array
    top: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """What happened in a cycle; in a `Dispatch` with a cycle axis in front.

    Fields:
        position: int32 [B], absolute position of the anchor.
        anchor: int32 [B].
        draft: int32 [B, K].
        confidence: float32 [B, K], None without a confidence head.
        verified: int32 [B], drafts that the verifier saw.
        accepted: int32 [B], drafts committed.
        tokens: int32 [B, K + 1], what was committed, NO_TOKEN behind it; all NO_TOKEN for a row that had ended.
        logprobs: of those tokens; None where nobody asked (another compiled program).
    """

    position: jax.Array
    anchor: jax.Array
    draft: jax.Array
    confidence: jax.Array | None
    verified: jax.Array
    accepted: jax.Array
    tokens: jax.Array
    logprobs: Logprobs | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """What the host reads after a dispatch of at most C cycles.

    Fields:
        records: one a cycle, [C, ...]; cycles that did not run hold NO_TOKEN throughout.
        finish: int32 [B], as in the state.
    """

    records: Record
    finish: jax.Array


def pad_stop_ids(stop_ids: Sequence[Sequence[int]], width: int) -> jax.Array:
    """Sets of ids, one a row -> int32 [B, width], padded with -1."""
    padded = np.full((len(stop_ids), width), NO_TOKEN, np.int32)
    for row, ids in enumerate(stop_ids):
        padded[row, : len(ids)] = ids
    return jnp.array(padded)

"""Where a cycle's time goes: drafting, verifying, and everything else.

Three programs repeat one real cycle as far as its draft, as far as its verification, and to its end; the differences are the parts. All
start from the same state, half-way through the answers of one batch, and go back to it after every repetition, so that shapes, lengths
and confidences are those of the run. Each repetition depends on the last one's result in a way that the compiler cannot see through: it
can neither skip nor hoist anything.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspec import distributed
from jaxspec.decoding.cycle import Plan, cycle, draft, keep, verify
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import Step
from jaxspec.decoding.result import Result
from jaxspec.decoding.state import DecodeState, Requests
from jaxspec.drafters.base import Context, Drafter
from jaxspec.verifiers.decoder import Decoder

ROUNDS = 7
ROUND_S = 0.1  # seconds that a round of one part shall take
MOST_REPEATS = 500


@dataclass(frozen=True)
class Split:
    """Milliseconds of one cycle of a whole batch.

    Fields:
        length: mean number of tokens in the rows where it was measured.
        draft_ms: the drafter, with the cut by confidence; 0 without one.
        verify_ms: the verifier over the drafts that were kept.
        other_ms: acceptance and commit. As a difference of two times it can come out slightly negative.
    """

    length: int
    draft_ms: float
    verify_ms: float
    other_ms: float

    @property
    def cycle_ms(self) -> float:
        """All three."""
        return self.draft_ms + self.verify_ms + self.other_ms


def measure_split(engine: Engine, results: Sequence[Result], params: SamplingParams) -> Split:
    """Measure it half-way through the answers of one batch of results."""
    state, requests = half_way(engine, results, params)
    parts: dict[str, Step] = {"draft": _draft, "draft and verify": _verify, "cycle": whole_cycle}
    if engine.programs.drafter_config is None:
        del parts["draft"]
    repeats, seconds = {}, {name: [] for name in parts}
    for name, step in parts.items():
        state = _timed(engine, name, step, state, requests, 1)[0]  # compiles
        state, once = _timed(engine, name, step, state, requests, 2)
        repeats[name] = int(distributed.same(min(max(round(2 * ROUND_S / once), 1), MOST_REPEATS)))
    for _ in range(ROUNDS):
        for name, step in parts.items():
            state, spent = _timed(engine, name, step, state, requests, repeats[name])
            seconds[name].append(spent / repeats[name])
    ms = {name: 1000 * min(spent) for name, spent in seconds.items()}  # whatever else runs on the machine only adds
    length = round(statistics.mean(map(len, _first_halves(results))))
    draft_ms = ms.get("draft", 0.0)
    return Split(length, draft_ms, ms["draft and verify"] - draft_ms, ms["cycle"] - ms["draft and verify"])


def half_way(engine: Engine, results: Sequence[Result], params: SamplingParams) -> tuple[DecodeState, Requests]:
    """The state half-way through the answers of one batch of results."""
    # The answers' room is kept, so that the caches have the size they had.
    left = max(1, params.max_new_tokens - min(len(result.token_ids) // 2 for result in results))
    return engine.start(_first_halves(results), replace(params, max_new_tokens=left))


def _first_halves(results: Sequence[Result]) -> list[list[int]]:
    return [[*result.prompt_ids, *result.token_ids[: len(result.token_ids) // 2]] for result in results]


def _timed(
    engine: Engine, name: str, step: Step, state: DecodeState, requests: Requests, times: int
) -> tuple[DecodeState, float]:
    start = time.perf_counter()
    state = jax.block_until_ready(engine.programs.repeat(name, step, state, requests, times))
    return state, time.perf_counter() - start


def _draft(
    decoder: Decoder, drafter: Drafter | None, state: DecodeState, requests: Requests, plan: Plan
) -> DecodeState:
    del decoder
    proposal, after = draft(drafter, state, requests, plan)
    kept = keep(proposal, state, plan)
    return _back(state, after, jnp.minimum(jnp.min(proposal.tokens, axis=1), kept) < -1, None)


def _verify(
    decoder: Decoder, drafter: Drafter | None, state: DecodeState, requests: Requests, plan: Plan
) -> DecodeState:
    proposal, after = draft(drafter, state, requests, plan)
    kept = keep(proposal, state, plan)
    logits, features, after = verify(decoder, drafter, after, proposal.tokens, kept, plan)
    # Behind the barrier all logits are computed, as verification does, though only one a row is read.
    first = jax.lax.optimization_barrier(logits)[:, 0, 0]
    return _back(state, after, first == jnp.inf, features)


def whole_cycle(
    decoder: Decoder, drafter: Drafter | None, state: DecodeState, requests: Requests, plan: Plan
) -> DecodeState:
    """One cycle, and back to where it began."""
    after, record = cycle(decoder, drafter, state, requests, plan)
    features = None if after.draft is None else after.draft.context.features
    return _back(state, after, jnp.min(record.tokens, axis=1) < -1, features)


def _back(before: DecodeState, after: DecodeState, never: jax.Array, features: jax.Array | None) -> DecodeState:
    """The state before, with what was written to the caches. `never` bool [B] is false, which the compiler doesn't know: the anchor, and
    `features` if given (else the old ones), seem to depend on the repetition."""
    step = never.astype(jnp.int32)
    state = replace(before, cache=after.cache.rewind(before.cache.length), anchor=before.anchor + step)
    if before.draft is None or after.draft is None:
        return state
    context = before.draft.context
    old = context.features
    seeming = jnp.where(never[:, None, None], jnp.zeros_like(old) if features is None else features, old)
    context = Context(seeming, context.tokens + step[:, None], context.count)
    cache = after.draft.cache.rewind(before.draft.cache.length)
    return replace(state, draft=replace(before.draft, cache=cache, context=context))

"""One cycle: draft, verify, accept, commit. Plain decoding is a cycle without a drafter.

Everything here is pure and runs inside one jitted program; many cycles run in one dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxspec.decoding.accept import Drafts, Rule, Verdict, accept
from jaxspec.decoding.randomness import Purpose, slot_uniforms
from jaxspec.decoding.sampling import (
    SamplingRows,
    TokenCounts,
    any_drawn,
    draw,
    filter_logits,
    penalize,
    vocabulary_first,
)
from jaxspec.decoding.schedule import keep_confident, keep_scheduled
from jaxspec.decoding.state import NO_TOKEN, DecodeState, DraftState, Finish, Logprobs, Record, Requests
from jaxspec.drafters.base import Choose, Context, Drafter, Proposal, greedy, take_rows
from jaxspec.layers.argmax import argmax
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder


@dataclass(frozen=True)
class Plan:
    """What a compiled cycle does; static.

    Fields:
        drafts: K, 0 without a drafter.
        sample_drafts: draw drafts at the row's temperature, top-k and top-p instead of taking the most likely one.
        rule: how drafts are accepted.
        synthetic_rates: for Rule.SYNTHETIC, K conditional rates.
        confidence_threshold: drafts stop before the first one below it; 0 for never.
        steps_per_s: cost curve of the prefix scheduler, entry n - 1 for n tokens a verify pass; empty: no scheduler.
        widths: the numbers of drafts that verify is compiled for, increasing, the last one K.
        logprobs: report this many most likely tokens beside each committed one; None reports nothing.
    """

    drafts: int = 0
    sample_drafts: bool = False
    rule: Rule = Rule.STANDARD
    synthetic_rates: tuple[float, ...] = ()
    confidence_threshold: float = 0.0
    steps_per_s: tuple[float, ...] = ()
    widths: tuple[int, ...] = (0,)
    logprobs: int | None = None


def cycle(
    decoder: Decoder, drafter: Drafter | None, state: DecodeState, requests: Requests, plan: Plan
) -> tuple[DecodeState, Record]:
    """One cycle of every running row; rows that have ended stay as they are."""
    with jax.named_scope("draft"):
        proposal, state = draft(drafter, state, requests, plan)
        kept = keep(proposal, state, plan)
    with jax.named_scope("verify"):
        raw, features, state = verify(decoder, drafter, state, proposal.tokens, kept, plan)
    with jax.named_scope("accept"):
        drafts = Drafts(proposal.tokens, proposal.ids, proposal.log_q, target_ids(drafter), kept)
        logits = raw if requests.bias is None else raw + requests.bias[:, None]
        if state.counts is not None:
            logits = penalize_block(logits, state.counts, requests.sampling, proposal.tokens)
        rates = jnp.array(plan.synthetic_rates, jnp.float32) if plan.rule is Rule.SYNTHETIC else None
        verdict = accept(logits, drafts, requests.sampling, state.cache.length, plan.rule, rates)
    with jax.named_scope("commit"):
        state, record = commit(state, requests, proposal, kept, verdict, features)
        if plan.logprobs is not None:
            record = replace(record, logprobs=logprobs_of(raw, record.tokens, plan.logprobs))
        return state, record


def draft(drafter: Drafter | None, state: DecodeState, requests: Requests, plan: Plan) -> tuple[Proposal, DecodeState]:
    """Commit the last cycle's features to the drafter and propose K tokens."""
    if drafter is None or state.draft is None:
        none = jnp.zeros((state.anchor.shape[0], 0), jnp.int32)
        return Proposal(none, none, None, None), state
    choose = sampled(requests.sampling, state.cache.length) if plan.sample_drafts else greedy
    proposal, cache = drafter.draft(state.draft.context, state.draft.cache, plan.drafts, choose)
    return proposal, replace(state, draft=replace(state.draft, cache=cache))


def sampled(rows: SamplingRows, position: jax.Array) -> Choose:
    """Draw each draft at its row's temperature, top-k and top-p, which act on the verifier in the same order. min-p acts on the verifier
    alone; position int32 [B] is the anchors'."""
    return Partial(_draw_drafts, replace(rows, min_p=jnp.zeros_like(rows.min_p)), position)


def _draw_drafts(
    rows: SamplingRows, position: jax.Array, logits: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shape = logits.shape
    slots = first + jnp.arange(shape[1], dtype=jnp.int32)

    def drawn(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_q = filter_logits(logits.T.reshape(shape), rows)
        u = slot_uniforms(rows.seeds, position, slots, Purpose.DRAFT)
        return draw(jnp.exp(log_q).reshape(-1, shape[-1]), u.reshape(-1)).reshape(shape[:2]), log_q

    def likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Of greedy rows nobody asks for log q.
        return argmax(logits.T).reshape(shape[:2]), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(any_drawn(rows), drawn, likeliest, vocabulary_first(logits))


def keep(proposal: Proposal, state: DecodeState, plan: Plan) -> jax.Array:
    """How many drafts of each row the verifier shall see, int32 [B]; decided by the confidences in front of each draft only."""
    every = jnp.full(state.anchor.shape, plan.drafts, jnp.int32)
    if proposal.confidence is None:
        return every
    if plan.steps_per_s:
        every = keep_scheduled(
            proposal.confidence, state.finish == Finish.RUNNING, jnp.array(plan.steps_per_s, jnp.float32)
        )
    if plan.confidence_threshold > 0:
        every = jnp.minimum(every, keep_confident(proposal.confidence, plan.confidence_threshold))
    return every


def verify(
    decoder: Decoder,
    drafter: Drafter | None,
    state: DecodeState,
    tokens: jax.Array,
    kept: jax.Array,
    plan: Plan,
) -> tuple[jax.Array, jax.Array | None, DecodeState]:
    """The verifier over [anchor, drafts]: logits float32 [B, K + 1, V], the drafter's features [B, K + 1, ...], and the cache written.

    Only the first `width` drafts run, the smallest compiled width that holds every running row's kept ones; the rest is zeros.
    """
    block = jnp.concatenate([state.anchor[:, None], tokens], axis=1)  # [B, K + 1]
    taps = () if drafter is None else drafter.config.taps

    def run(width: int, cache: KVCache) -> tuple[jax.Array, jax.Array | None, KVCache]:
        hidden, features, cache = decoder(block[:, : width + 1], cache, taps)
        missing = ((0, 0), (0, plan.drafts - width), (0, 0))
        logits = jnp.pad(decoder.logits(hidden), missing)
        return logits, None if features is None else jnp.pad(features, missing), cache

    if len(plan.widths) == 1:
        logits, features, cache = run(plan.drafts, state.cache)
    else:
        needed = jnp.max(jnp.where(state.finish == Finish.RUNNING, kept, 0))
        index = jnp.searchsorted(jnp.array(plan.widths, jnp.int32), needed).astype(jnp.int32)
        branches = [lambda cache, width=width: run(width, cache) for width in plan.widths]
        logits, features, cache = jax.lax.switch(index, branches, state.cache)
    return logits, features, replace(state, cache=cache)


def penalize_block(logits: jax.Array, counts: TokenCounts, rows: SamplingRows, tokens: jax.Array) -> jax.Array:
    """Penalties on logits float32 [B, K + 1, V], slot by slot: slot j's count the first j drafts int32 [B, K] as part of the answer."""
    slots = []
    for slot in range(logits.shape[1]):
        if slot:
            counts = counts.add(tokens[:, slot - 1], jnp.ones(tokens.shape[0], jnp.bool_))
        slots.append(penalize(logits[:, slot], counts, rows))
    return jnp.stack(slots, axis=1)


def commit(
    state: DecodeState,
    requests: Requests,
    proposal: Proposal,
    kept: jax.Array,
    verdict: Verdict,
    features: jax.Array | None,
) -> tuple[DecodeState, Record]:
    """Take over the accepted drafts and the token behind them, up to a stop token or the row's limit."""
    slots = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = verdict.accepted[:, None]
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(slots < accepted, padded, jnp.where(slots == accepted, verdict.token[:, None], NO_TOKEN))

    running = state.finish == Finish.RUNNING
    stops = jnp.any(tokens[:, :, None] == requests.stop_ids[:, None], axis=-1) & (slots <= accepted)  # [B, K + 1]
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, slots.shape[1] + 1)
    room = requests.limit - state.generated
    count = jnp.minimum(jnp.minimum(verdict.accepted + 1, until_stop), room)
    count = jnp.where(running, count, 0)
    # A stop token as the last allowed one is a stop: the stop is tested before the cap.
    code = jnp.where(count == until_stop, Finish.STOP, jnp.where(count == room, Finish.LENGTH, Finish.RUNNING))
    finish = jnp.where(running, code, state.finish).astype(jnp.int32)

    tokens = jnp.where(slots < count[:, None], tokens, NO_TOKEN)
    last = take_rows(tokens, jnp.maximum(count - 1, 0), 1)[:, 0]
    anchor = jnp.where(running, last, state.anchor)
    record = Record(
        position=state.cache.length,
        anchor=jnp.asarray(state.anchor),
        draft=proposal.tokens,
        confidence=proposal.confidence,
        verified=kept,
        accepted=jnp.minimum(verdict.accepted, count),
        tokens=tokens,
        logprobs=None,
    )
    return (
        replace(
            state,
            cache=state.cache.advance(count),
            anchor=anchor,
            generated=state.generated + count,
            finish=finish,
            counts=None if state.counts is None else count_tokens(state.counts, tokens),
            draft=next_context(state, features, tokens, anchor, count),
        ),
        record,
    )


def logprobs_of(logits: jax.Array, tokens: jax.Array, number: int) -> Logprobs:
    """Of the committed tokens int32 [B, K + 1] and of the `number` likeliest, from the verifier's logits float32 [B, K + 1, V]."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    token = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    top, top_ids = jax.lax.top_k(logprobs, number)
    return Logprobs(token, top_ids, top)


def next_context(
    state: DecodeState, features: jax.Array | None, tokens: jax.Array, anchor: jax.Array, count: jax.Array
) -> DraftState | None:
    """What the drafter commits in the next cycle: the features of the committed rows, each with the token that follows it."""
    if state.draft is None or features is None:
        return state.draft
    following = jnp.where(tokens == NO_TOKEN, anchor[:, None], tokens)
    return replace(state.draft, context=Context(features, following, count))


def count_tokens(counts: TokenCounts, tokens: jax.Array) -> TokenCounts:
    """Add the committed tokens int32 [B, K + 1], NO_TOKEN where there is none, to the counts."""
    for slot in range(tokens.shape[1]):
        counts = counts.add(jnp.maximum(tokens[:, slot], 0), tokens[:, slot] != NO_TOKEN)
    return counts


def target_ids(drafter: Drafter | None) -> jax.Array | None:
    """Verifier ids of the draft ids; None where they are the same."""
    return None if drafter is None or drafter.vocabulary.target_ids is None else drafter.vocabulary.target_ids[...]


def verify_widths(drafts: int, cuts: bool) -> Sequence[int]:
    """The widths to compile verify for: K alone, or with drafts cut also 0 and the powers of two below K."""
    if not cuts:
        return (drafts,)
    return (*sorted({0, *(1 << i for i in range(drafts.bit_length()) if 1 << i < drafts)}), drafts)

"""One batch of requests from prompt to answer: bucketing, prefill, dispatches, stopping on the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import MAX_PREFILL, MIN_PREFILL, MIN_STOP_IDS, Programs, RunTimer, power_of_two
from jaxspec.decoding.result import Cycle, FinishReason, Result, Speculative, Timing, TokenLogprob, Usage
from jaxspec.decoding.sampling import SamplingRows, TokenCounts
from jaxspec.decoding.state import NO_TOKEN, DecodeState, DraftState, Finish, Record, Requests, pad_stop_ids
from jaxspec.decoding.stopping import Answer
from jaxspec.layers.cache import KVCache

REASONS: dict[int, FinishReason | None] = {Finish.RUNNING: None, Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True)
class Request:
    """One validated prompt with its parameters.

    Fields:
        index: place in the caller's list.
        prompt: at least one token.
        params: as given.
        seed: params.seed, or one drawn for this request.
        limit: most tokens to generate, the model's longest sequence taken into account.
        stop_ids: every id that ends the answer.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: tuple[int, ...]


class Batch:
    """Runs up to `rows` requests together; missing rows are filled with ones that have ended before they begin."""

    def __init__(
        self,
        programs: Programs,
        requests: Sequence[Request],
        rows: int,
        decode_text: Callable[[Sequence[int]], str],
    ):
        """`rows` B >= len(requests) is the bucket the batch runs in."""
        self._programs = programs
        self._requests = tuple(requests)
        self._rows = rows
        self._answers = [Answer(decode_text, request.params.stop) for request in requests]
        self._finish = np.full(rows, Finish.STOP, np.int32)
        self._finish[: len(requests)] = Finish.RUNNING
        self._records: list[Record] = []
        self._logprobs = _top_number([request.params.logprobs for request in requests], programs.config.vocab_size)
        self._compiled_before = programs.compile_s
        self._prefill_time = RunTimer(programs)
        self._decode_time = RunTimer(programs)

    def run(self, cycles: int) -> Iterator[list[list[int]]]:
        """Decode to the end, `cycles` cycles a dispatch; yields each dispatch's new tokens, one list a request."""
        state, fixed = self.start()
        while (self._finish == Finish.RUNNING).any():
            with self._decode_time:
                state, dispatch = self._programs.decode(state, fixed, cycles, self._logprobs)
                records = jax.tree.map(np.asarray, dispatch.records)
                finish = np.array(dispatch.finish)
                self._records.append(records)
                new = []
                for row, answer in enumerate(self._answers):
                    before = len(answer.token_ids)
                    if not answer.stopped:
                        tokens = records.tokens[:, row]
                        answer.extend(tokens[tokens != NO_TOKEN].tolist())
                    if answer.stopped:
                        finish[row] = Finish.STOP
                    new.append(answer.token_ids[before:])
                if (finish != np.asarray(dispatch.finish)).any():
                    state = replace(state, finish=self._programs.place(jnp.array(finish)))
                self._finish = finish
            yield new

    def new_text(self, row: int) -> str:
        """Text of one request that is final and was not returned before."""
        return self._answers[row].new_text(last=not self.running(row))

    def running(self, row: int) -> bool:
        """Whether the request's answer goes on."""
        return bool(self._finish[row] == Finish.RUNNING)

    def results(self, load_s: float, number: int) -> list[Result]:
        """The answers as they stand; `number` is the batch's place in the call."""
        compile_s = self._programs.compile_s - self._compiled_before
        prefill_s, decode_s = self._prefill_time.seconds, self._decode_time.seconds
        results = []
        for row, (request, answer) in enumerate(zip(self._requests, self._answers, strict=True)):
            tokens = len(answer.token_ids)
            rate = tokens / decode_s if decode_s else 0.0
            cycles = tuple(self._cycles(row))
            results.append(
                Result(
                    prompt_ids=request.prompt,
                    token_ids=tuple(answer.token_ids),
                    text=answer.text(),
                    finish_reason=REASONS[int(self._finish[row])],
                    usage=Usage(prompt_tokens=len(request.prompt), completion_tokens=tokens),
                    timing=Timing(load_s, compile_s, prefill_s, decode_s, rate),
                    speculative=self._speculative(cycles),
                    cycles=cycles,
                    logprobs=self._token_logprobs(row),
                    batch=number,
                )
            )
        return results

    def _cycles(self, row: int) -> Iterator[Cycle]:
        """What happened in each cycle of one request, in order, up to the one that a stop string ended; nothing without a drafter."""
        number, left = 0, len(self._answers[row].token_ids)
        for records in self._records if self._programs.drafter_config is not None else ():
            for at in np.flatnonzero((records.tokens[:, row] != NO_TOKEN).any(axis=1)):
                if left <= 0:  # a stop string is found behind a dispatch, whose later cycles don't count
                    return
                cycle = Cycle.of(number, jax.tree.map(lambda leaf, at=at: leaf[at, row], records))
                yield cycle
                number, left = number + 1, left - len(cycle.tokens)

    def _token_logprobs(self, row: int) -> tuple[TokenLogprob, ...] | None:
        """One for each token of the answer, where its request asked."""
        number = self._requests[row].params.logprobs
        if number is None:
            return None
        found = []
        for records in self._records:
            lp = records.logprobs
            assert lp is not None
            for cycle, slot in zip(*np.nonzero(records.tokens[:, row] != NO_TOKEN), strict=True):
                place = (cycle, row, slot)
                top = zip(lp.top_ids[place].tolist(), lp.top[place].tolist(), strict=True)
                found.append(TokenLogprob(int(records.tokens[place]), float(lp.token[place]), tuple(top)[:number]))
        return tuple(found[: len(self._answers[row].token_ids)])

    def _speculative(self, cycles: Sequence[Cycle]) -> Speculative | None:
        config = self._programs.drafter_config
        return None if config is None else Speculative.of(config.method, self._programs.plan.drafts, cycles)

    def shapes(self) -> tuple[int, int, frozenset[int]]:
        """Rows, capacity and prefill widths. With equal parameters, batches of equal shapes run the same programs."""
        most = max(len(request.prompt) - 1 for request in self._requests)
        widths = {power_of_two(min(most - start, MAX_PREFILL), MIN_PREFILL) for start in range(0, most, MAX_PREFILL)}
        longest = max(len(request.prompt) + request.limit for request in self._requests)
        return self._rows, self._programs.capacity(longest), frozenset(widths)

    def start(self, capacity: int | None = None) -> tuple[DecodeState, Requests]:
        """Prefill everything but each prompt's last token, and make the state in front of the first one.

        `capacity`: the caches', large enough for every request; None takes the smallest that is.
        """
        missing = self._rows - len(self._requests)
        prompts = [request.prompt for request in self._requests] + [(0,)] * missing
        params = [request.params for request in self._requests] + [SamplingParams()] * missing
        seeds = [request.seed for request in self._requests] + [0] * missing
        limits = [request.limit for request in self._requests] + [1] * missing
        stop_ids = [request.stop_ids for request in self._requests] + [()] * missing
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        with self._prefill_time:
            cache, draft = self._prefill(prompts, capacity or self._programs.capacity(longest))
            vocab_size = self._programs.config.vocab_size
            penalized = any(request.params.penalized for request in self._requests)
            fixed = Requests(
                sampling=SamplingRows.of(params, seeds),
                limit=jnp.array(limits, jnp.int32),
                stop_ids=pad_stop_ids(stop_ids, power_of_two(max(map(len, stop_ids)), MIN_STOP_IDS)),
                bias=_bias([one.logit_bias for one in params], vocab_size),
            )
            anchor = jnp.array([prompt[-1] for prompt in prompts], jnp.int32)
            generated = jnp.array([0] * self._rows, jnp.int32)
            counts = TokenCounts.of_prompts(prompts, vocab_size) if penalized else None
            here = (fixed, anchor, generated, jnp.array(self._finish), counts)
            fixed, anchor, generated, finish, counts = self._programs.place(here)
            state = DecodeState(cache, anchor, generated, finish, counts, draft)
            jax.block_until_ready(state)
        return state, fixed

    def _prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[KVCache, DraftState | None]:
        anchor = np.array([prompt[-1] for prompt in prompts], np.int32)
        cache, draft = self._programs.empty(anchor, capacity)
        counts = np.array([len(prompt) - 1 for prompt in prompts])
        for start in range(0, int(counts.max()), MAX_PREFILL):
            here = np.clip(counts - start, 0, MAX_PREFILL).astype(np.int32)
            tokens = np.zeros((self._rows, power_of_two(int(here.max()), MIN_PREFILL) + 1), np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt[start : start + here[row] + 1]  # and the token that follows
                tokens[row, : len(part)] = part
            cache, draft = self._programs.prefill(cache, draft, tokens, here)
        return cache, draft


def _bias(biases: Sequence[Mapping[int, float]], vocab_size: int) -> jax.Array | None:
    """float32 [B, V]; None where there is none."""
    if not any(biases):
        return None
    dense = np.zeros((len(biases), vocab_size), np.float32)
    for row, bias in enumerate(biases):
        dense[row, list(bias)] = list(bias.values())
    return jnp.array(dense)


def _top_number(wanted: Sequence[int | None], vocab_size: int) -> int | None:
    """How many likeliest tokens the program reports: 0, or a power of two, so that few programs serve all; None where nobody asks."""
    asked = [number for number in wanted if number is not None]
    if not asked:
        return None
    return min(power_of_two(max(asked)), vocab_size) if max(asked) else 0

"""Many requests through one running batch: a row whose answer has ended takes the next request, instead of waiting for the others."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import jax
import numpy as np

from jaxspec.decoding.batch import REASONS, Batch, Request
from jaxspec.decoding.programs import Programs, power_of_two
from jaxspec.decoding.result import FinishReason
from jaxspec.decoding.state import NO_TOKEN, DecodeState, Requests

CYCLES = 8  # cycles a dispatch: on average half of them pass before an ended row is noticed
FRESH_SHARE = 8  # one row in so many is prefilled together


@dataclass(frozen=True)
class Finished:
    """One request's answer.

    Fields:
        index: the request's.
        prompt_ids, token_ids, finish_reason: as in `Result`.
    """

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def run_refilled(programs: Programs, requests: Sequence[Request], rows: int) -> Iterator[Finished]:
    """The answers as they end. Requests that need caches of like size run together, the smallest first, each group in its order.

    Args:
        programs: the model's.
        requests: with equal parameters but for the seed, and without stop strings.
        rows: most rows that run together.
    """

    def capacity(request: Request) -> int:
        return programs.capacity(len(request.prompt) + request.limit)

    for size, members in groupby(sorted(requests, key=capacity), key=capacity):
        waiting = deque(members)
        yield from _run(programs, waiting, programs.rows(min(rows, power_of_two(len(waiting)))), size)


def _run(programs: Programs, waiting: deque[Request], rows: int, capacity: int) -> Iterator[Finished]:
    def start(number: int) -> tuple[list[Request], DecodeState, Requests]:
        taken = [waiting.popleft() for _ in range(min(number, len(waiting)))]
        return taken, *Batch(programs, taken, number, _no_text).start(capacity)

    fresh = programs.rows(max(rows // FRESH_SHARE, 1))
    taken, state, fixed = start(rows)
    running: dict[int, Request] = dict(enumerate(taken))
    answers: dict[int, list[int]] = {row: [] for row in running}
    while running:
        state, dispatch = programs.decode(state, fixed, CYCLES)
        tokens, finish = np.asarray(dispatch.records.tokens), np.asarray(dispatch.finish)
        for row in list(running):
            new = tokens[:, row]
            answers[row] += new[new != NO_TOKEN].tolist()
            reason = REASONS[int(finish[row])]
            if reason is not None:
                request = running.pop(row)
                yield Finished(request.index, request.prompt, tuple(answers.pop(row)), reason)
        free = [row for row in range(rows) if row not in running]
        while waiting and (len(free) >= fresh or not running):
            taken, new_state, new_fixed = start(fresh)
            slots, free = free[: len(taken)], free[len(taken) :]
            running |= zip(slots, taken, strict=True)
            answers |= {row: [] for row in slots}
            # Rows that only fill up the fresh batch go to a slot that there isn't.
            places = np.array(slots + [rows] * (fresh - len(slots)), np.int32)
            state, fixed = programs.settled(insert_rows(state, fixed, new_state, new_fixed, places))


@partial(jax.jit, donate_argnums=0)
def insert_rows(
    state: DecodeState, fixed: Requests, new_state: DecodeState, new_fixed: Requests, slots: jax.Array | np.ndarray
) -> tuple[DecodeState, Requests]:
    """Put R fresh rows in the place of rows of a batch of equal capacity and variants.

    Args:
        state, fixed: of B rows; the state is donated.
        new_state, new_fixed: of R rows.
        slots: int32 [R], the rows to replace, distinct; B or more for a fresh row that goes nowhere.
    """

    def put(rows: jax.Array, new: jax.Array) -> jax.Array:
        return rows.at[slots].set(new, mode="drop")

    return jax.tree.map(put, state, new_state), jax.tree.map(put, fixed, new_fixed)


def _no_text(tokens: Sequence[int]) -> str:
    raise AssertionError("answers without stop strings need no text")

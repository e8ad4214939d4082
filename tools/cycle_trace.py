"""What a cycle spends on neither model, by a trace of one compiled program.

`jaxspec.evaluation.split` subtracts the times of two programs, which differ by a few percent whatever they do: too coarse for a part that
takes as much. Here every operation of many repeated cycles is seen with its start and end; its phase is the named scope it was written in.
"""

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.result import Result
from jaxspec.evaluation.split import half_way, whole_cycle

CYCLES = 10  # a trace
ROUNDS = 5  # traces; the one in which the rest took the least time counts: whatever else runs on the machine only adds
SCOPE = re.compile(r"/(draft|verify|accept|commit)(/|$)")
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%(\S+) = .*?op_name="([^"]*)"', re.MULTILINE)


class Operation(NamedTuple):
    """One that ran: microseconds, and its phase; None where the compiler made it up."""

    start: float
    end: float
    phase: str | None


@dataclass(frozen=True)
class Phases:
    """Milliseconds of one cycle of a whole batch: the drafter's, the verifier's, and those of neither."""

    draft_ms: float
    verify_ms: float
    rest_ms: float

    @property
    def rest_share(self) -> float:
        """Of the cycle."""
        return self.rest_ms / (self.draft_ms + self.verify_ms + self.rest_ms)


def trace_cycle(engine: Engine, results: Sequence[Result], params: SamplingParams) -> Phases:
    """Half-way through the answers of one batch of results."""
    state, requests = half_way(engine, results, params)
    state = jax.block_until_ready(engine.programs.repeat("cycle", whole_cycle, state, requests, 2))  # compiles
    *_, program = engine.programs.compiled.values()
    text = program.as_text() or ""
    phase_of = {name: scope[1] for name, path in INSTRUCTION.findall(text) if (scope := SCOPE.search(path))}
    found = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                state = jax.block_until_ready(engine.programs.repeat("cycle", whole_cycle, state, requests, CYCLES))
            (path,) = Path(folder).rglob("*.trace.json.gz")
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        operations = [
            Operation(event["ts"], event["ts"] + event["dur"], phase_of.get(event["args"]["hlo_op"]))
            for event in events
            if event.get("ph") == "X" and "hlo_op" in event.get("args", {})
        ]
        found.append(phases_of(operations, CYCLES))
    return min(found, key=lambda phases: phases.rest_ms)


def phases_of(operations: Iterable[Operation], cycles: int) -> Phases:
    """Operations in any order, some at the same time: an instant belongs to the one of them that began first, and one between two
    operations of a phase to that phase. An operation without a phase belongs to the last one that began before it."""
    spent: dict[str, float] = defaultdict(float)
    ordered = sorted(operations)
    until, phase = ordered[0].start, "draft"
    for operation in ordered:
        before, phase = phase, operation.phase or phase
        if operation.start > until and phase != before:
            spent["between"] += operation.start - until
            until = operation.start
        if operation.end > until:
            spent[phase] += operation.end - until
            until = operation.end
    ms = {name: microseconds / 1000 / cycles for name, microseconds in spent.items()}
    draft, verify = ms["draft"], ms["verify"]
    return Phases(draft, verify, sum(ms.values()) - draft - verify)

"""Plain decoding and drafters on the same prompts, taking turns: acceptance, tokens/s, and where a cycle's time goes."""

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.result import Cycle, Result, Speculative
from jaxspec.evaluation.models import Run
from jaxspec.evaluation.split import Split, measure_split


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts.

    Fields:
        totals: summed over all rows; acceptance_per_position is unconditional, its denominator is the number of cycles.
        histogram: cycles that accepted 0, 1, ... K drafts; the bonus token is not counted.
    """

    totals: Speculative
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, method: str, drafts: int, cycles: Sequence[Cycle]) -> "Acceptance":
        """Of any number of cycles of K = `drafts` drafts."""
        counts = [0] * (drafts + 1)
        for cycle in cycles:
            counts[cycle.accepted] += 1
        return cls(Speculative.of(method, drafts, cycles), tuple(counts))


@dataclass(frozen=True)
class Measurement:
    """What one run did.

    Fields:
        run: which.
        results: one a prompt, in input order.
        prefill_s, decode_s: seconds running, all batches together, compilation and warm-up left out.
        compile_s: seconds compiling.
        acceptance: None for plain decoding.
        split: where a cycle's time goes.
    """

    run: Run
    results: tuple[Result, ...]
    prefill_s: float
    decode_s: float
    compile_s: float
    acceptance: Acceptance | None
    split: Split

    @property
    def tokens(self) -> int:
        """Of all answers together."""
        return sum(result.usage.completion_tokens for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over `decode_s`."""
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class PeakMemory:
    """High-water marks of the whole process, all runs together.

    Fields:
        host_bytes: resident memory.
        device_bytes: the largest of the devices; None where the platform doesn't say (CPUs).
    """

    host_bytes: int
    device_bytes: int | None


def measure(
    runs: Sequence[Run],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch_size: int,
    show: Callable[[str | None], None],
) -> list[Measurement]:
    """Run everything.

    All programs are compiled, and run once, before the first measurement. Then the runs take turns batch by
    batch, another one beginning each time, so that a machine that slows down slows all of them.

    Args:
        runs: plain decoding first.
        prompts: token ids.
        params: for all prompts.
        batch_size: the engines' max_batch_size.
        show: progress.

    Raises:
        InputError: a prompt that cannot be served.
    """
    for run in runs:
        show(f"{run.name}: warming up")
        run.engine.warm_up(prompts, params)
    chunks = list(in_batches(prompts, batch_size))
    results: list[dict[int, Result]] = [{} for _ in runs]
    seconds = [(0.0, 0.0)] * len(runs)
    for number, chunk in enumerate(chunks):
        for turn in range(len(runs)):
            at = (number + turn) % len(runs)
            show(f"{runs[at].name}: batch {number + 1} of {len(chunks)}")
            answers = runs[at].engine.generate([prompts[index] for index in chunk], params)
            results[at].update(zip(chunk, answers, strict=True))
            timing = answers[0].timing
            seconds[at] = (seconds[at][0] + timing.prefill_s, seconds[at][1] + timing.decode_s)
    compile_s = [run.engine.programs.compile_s for run in runs]  # the split compiles programs of its own
    measured = []
    for at, (run, answers) in enumerate(zip(runs, results, strict=True)):
        show(f"{run.name}: where a cycle's time goes")
        middle = [answers[index] for index in chunks[len(chunks) // 2]]
        split = measure_split(run.engine, middle, params)
        in_order = tuple(answers[index] for index in range(len(prompts)))
        measured.append(
            Measurement(
                run=run,
                results=in_order,
                prefill_s=seconds[at][0],
                decode_s=seconds[at][1],
                compile_s=compile_s[at],
                acceptance=acceptance_of(run, in_order),
                split=split,
            )
        )
    show(None)
    return measured


def profile(
    runs: Sequence[Run], prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int, folder: Path
) -> None:
    """Trace the middle batch of every run, once more after what `measure` has measured and so without compilation, into the folder. On
    the trace's host threads each run stands under its name."""
    chunks = list(in_batches(prompts, batch_size))
    middle = [prompts[index] for index in chunks[len(chunks) // 2]]
    with jax.profiler.trace(folder):
        for run in runs:
            with jax.profiler.TraceAnnotation(run.name):
                run.engine.generate(middle, params)


def acceptance_of(run: Run, results: Sequence[Result]) -> Acceptance | None:
    """Over all cycles of the results; None for plain decoding."""
    drafter = run.engine.programs.drafter_config
    if drafter is None:
        return None
    cycles = [cycle for result in results for cycle in result.cycles]
    return Acceptance.of(drafter.method, run.engine.programs.plan.drafts, cycles)


def in_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of the prompts that share a batch: those of like length, as `Engine.generate` does it."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def peak_memory() -> PeakMemory:
    """So far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]
    # Linux counts in KiB, macOS in bytes.
    return PeakMemory(peak if sys.platform == "darwin" else peak * 1024, max(peaks, default=None))

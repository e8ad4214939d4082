"""A training step measured against speculators 0.9 on CPU torch: trained positions a second, and peak memory.

    python tools/bench_train.py [--methods dflash dspark peagle eagle3] [--threads 2] [--rounds 5] [--parts speed memory] [--json FILE]

A step is the whole of it, on the same drafter, verifier head, row of 2,048 tokens, loss and random choices, all in float32: forward,
backward, clipping, AdamW. Features are given. Both sides load the drafter from one directory, and every step's loss and gradient norm
must agree, else the bench fails. Speed: medians of steps that took turns in this one process; torch's attention is "sdpa" or "eager",
whichever was faster. Memory: the process's peak resident memory, each side alone in a process of its own, imports, loading and
compiling included, against the smaller of torch's two.

speculators and torch are in the `reference` environment only (`make bench-train` runs it there).
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from jaxspec.drafters.config import Method

PARTS = ["speed", "memory"]
METHODS: list[Method] = ["dflash", "dspark", "peagle", "eagle3"]
ATTENTIONS = ("sdpa", "eager")
JAXSPEC = "jaxspec"
LOSS_TOLERANCE = 1e-4  # relative, of the first step; AdamW's first moves amplify rounding in later ones
LATER_TOLERANCE = 1e-3
ALONE_STEPS = 3
SPEED_WANTED, MEMORY_WANTED = 1.5, 0.8


@dataclass(frozen=True)
class Footprint:
    """Resident memory of a process that trained alone, in MB: with everything imported, with the weights and the batch, at the peak
    until the step was compiled, at the peak of the steps; and the temporaries of XLA's step, 0 with torch."""

    imported: float
    loaded: float
    compiled_peak: float
    steps_peak: float
    temporaries: float = 0.0

    @property
    def peak(self) -> float:
        """Of the whole process."""
        return max(self.compiled_peak, self.steps_peak)

    @property
    def over_imports(self) -> float:
        """What of it is not the libraries."""
        return self.peak - self.imported


def footprint(method: Method, side: str, folder: Path, anchors: int, threads: int) -> Footprint:
    """Of this process, which must have done nothing before. side: JAXSPEC, or torch's attention."""
    temporaries = 0.0
    if side == JAXSPEC:
        from training_bench import by_jaxspec, case

        imported = resident("VmRSS")
        training = by_jaxspec.Training(folder, method, case.objective(anchors), case.packed_row())
        loaded = resident("VmRSS")
        temporaries = training.compile() / 1e6
    else:
        from training_bench import by_speculators, case

        imported = resident("VmRSS")
        training = by_speculators.Training(folder, method, case.objective(anchors), case.packed_row(), side, threads)
        loaded = resident("VmRSS")
    compiled_peak = resident("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    for _ in range(ALONE_STEPS):
        training.step()
    return Footprint(imported, loaded, compiled_peak, resident("VmHWM"), temporaries)


def resident(name: str) -> float:
    """VmRSS, this process's resident memory, or VmHWM, its peak, in MB."""
    status = Path("/proc/self/status").read_text()
    return float(next(line for line in status.splitlines() if line.startswith(f"{name}:")).split()[1]) / 1e3


def footprints(method: Method, sides: list[str], folder: Path, anchors: int, threads: int) -> dict[str, Footprint]:
    """Each side in a process of its own."""
    found = {}
    for side in sides:
        command = [sys.executable, __file__, "--alone", method, side, str(folder)]
        command += ["--anchors", str(anchors), "--threads", str(threads)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[side] = Footprint(**json.loads(output.splitlines()[-1]))
    return found


@dataclass(frozen=True)
class Speed:
    """Seconds of each step by side, by the clock and of the CPUs; how many positions a step trains; the largest relative differences
    between the sides of the first loss, of any loss, and of any gradient norm."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    positions: int
    first_loss_error: float
    loss_error: float
    norm_error: float

    @property
    def ratio(self) -> float:
        """Of the rates, against torch's faster attention."""
        medians = {side: statistics.median(seconds) for side, seconds in self.seconds.items()}
        return min(median for side, median in medians.items() if side != JAXSPEC) / medians[JAXSPEC]


def speed(method: Method, folder: Path, anchors: int, threads: int, rounds: int, attentions: tuple[str, ...]) -> Speed:
    """Steps that take turns, one each to warm up. Raises RuntimeError where the sides' losses differ."""
    from training_bench import by_jaxspec, case

    objective = case.objective(anchors)
    ours = by_jaxspec.Training(folder, method, objective, case.packed_row())
    ours.compile()
    sides: dict[str, Callable[[dict], tuple[float, float]]] = {JAXSPEC: lambda _: ours.step()}
    for attention in attentions:
        from training_bench import by_speculators

        peer = by_speculators.Training(folder, method, objective, case.packed_row(), attention, threads)
        if peer.trained != ours.trained:
            raise RuntimeError(f"{method}: {ours.trained} parameters are trained here, {peer.trained} by speculators")
        sides[attention] = peer.step
    positions = ours.positions
    clocks = {name: ([], []) for name in sides}
    losses, norms = [], []
    for number in range(rounds + 1):
        choices = ours.choices()
        seen = []
        for name, step in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            seen.append(step(choices))
            if number:
                clocks[name][0].append(time.perf_counter() - wall)
                clocks[name][1].append(time.process_time() - cpu)
        losses.append(spread([loss for loss, _ in seen]))
        norms.append(spread([norm for _, norm in seen]))
    made = Speed(
        {name: wall for name, (wall, _) in clocks.items()},
        {name: cpu for name, (_, cpu) in clocks.items()},
        positions,
        losses[0],
        max(losses),
        max(norms),
    )
    if made.first_loss_error > LOSS_TOLERANCE or max(made.loss_error, made.norm_error) > LATER_TOLERANCE:
        raise RuntimeError(f"{method}: the two sides do not train alike: {made}")
    return made


def spread(values: list[float]) -> float:
    """Largest difference, relative to the first."""
    return max(abs(value - values[0]) for value in values) / abs(values[0])


def memory_ratio(found: dict[str, Footprint], of: str) -> float:
    """Of the peaks or what of them is `over_imports`, against the smaller of torch's."""
    ours, *theirs = (getattr(found[side], of) for side in sorted(found, key=lambda side: side != JAXSPEC))
    return ours / min(theirs)


def show_speed(method: Method, found: Speed) -> None:
    """A line for each side, and what was wanted."""
    for side, every in found.seconds.items():
        seconds, cpu = statistics.median(every), statistics.median(found.cpu_seconds[side])
        print(
            f"{method:6}: {shown(side)} {found.positions / seconds:5.0f} positions/s, {seconds:.2f} s a step ({cpu:.2f} s of CPU time)",
            flush=True,
        )
    if len(found.seconds) > 1:
        print(
            f"  {found.ratio:.2f} x (wanted: {SPEED_WANTED}); losses within {found.loss_error:.1e} of one another, gradient norms within "
            f"{found.norm_error:.1e}",
            flush=True,
        )


def show_memory(method: Method, found: dict[str, Footprint]) -> None:
    """A line for each side, and what was wanted."""
    for side, memory in found.items():
        temporaries = f"; XLA's temporaries {memory.temporaries:.0f} MB" if memory.temporaries else ""
        print(
            f"{method:6}: {shown(side)} peak {memory.peak:5.0f} MB, {memory.over_imports:5.0f} over its imports{temporaries}",
            flush=True,
        )
    if len(found) > 1:
        print(
            f"  {memory_ratio(found, 'peak'):.2f} x (wanted: at most {MEMORY_WANTED}), whole processes; "
            f"{memory_ratio(found, 'over_imports'):.2f} x without the imports",
            flush=True,
        )


def shown(side: str) -> str:
    """Its name in a table."""
    return f"{JAXSPEC if side == JAXSPEC else f'torch {side}':11}"


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: both")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all four")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of the row, or P-EAGLE's chains")
    parser.add_argument("--threads", type=int, default=2, help="cores for either side")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--alone", nargs=3, metavar=("METHOD", "SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # JAX starts a thread a core
    if args.alone is not None:
        method, side, folder = args.alone
        print(json.dumps(asdict(footprint(cast(Method, method), side, Path(folder), args.anchors, args.threads))))
        return 0
    from training_bench.checkpoints import write_case

    attentions = ATTENTIONS if importlib.util.find_spec("speculators") is not None else ()
    if not attentions:
        print("speculators is not installed here: `make bench-train` compares with it")
    figures: dict[str, dict[str, object]] = {"speed": {}, "memory": {}}
    with tempfile.TemporaryDirectory() as scratch:
        write_case(Path(scratch), args.methods)
        for method in args.methods:
            if "speed" in args.parts:
                found = speed(method, Path(scratch), args.anchors, args.threads, args.rounds, attentions)
                figures["speed"][method] = asdict(found)
                show_speed(method, found)
            if "memory" in args.parts:
                sizes = footprints(method, [JAXSPEC, *attentions], Path(scratch), args.anchors, args.threads)
                figures["memory"][method] = {side: asdict(memory) for side, memory in sizes.items()}
                show_memory(method, sizes)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

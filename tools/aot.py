"""Compile the kernels and the published pairs' whole programs for GPUs that are not here, and print what each asks of the device.

    make aot
    python tools/aot.py --target a100-80gb --tensor 2 --only kernels

Needs the wheels jax-cuda12-plugin and jax-cuda12-pjrt, without their dependencies; no GPU and no NVIDIA library. It proves that programs
compile and fit, not that their numbers are right, nor their speed. Exit status: 0 everything compiled; 1 something did not; 2 bad flags
or no wheels.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the plugin compiles, the CPU is the device

import jax
from aot_gate import programs, resources

from jaxspec.forecast.compiled import Exchanged, Memory, collectives, memory
from jaxspec.forecast.devices import GPUS
from jaxspec.forecast.target import NAMES, Target, missing

GB = 1e9
SIZES = {"40 GB": GPUS["a100-40gb"], "80 GB": GPUS["a100-80gb"]}


@dataclass(frozen=True)
class Report:
    """What became of one program.

    Fields:
        name: of the program.
        seconds: that compiling took.
        failure: why it does not compile, None if it does.
        kernels: the Triton kernels in it.
        memory: bytes on each device.
        collectives: of each kind in the program text.
        fits: which sizes of device memory hold it.
    """

    name: str
    seconds: float
    failure: str | None
    kernels: list[resources.Kernel]
    memory: Memory | None
    collectives: dict[str, Exchanged]
    fits: list[str]

    def line(self) -> str:
        if self.memory is None:
            return f"FAILED    {self.name}: {self.failure}"
        asked = [f"{self.memory.arguments / GB:.2f} GB arguments, {self.memory.temporary / GB:.3f} GB temporary"]
        for kernel in self.kernels:
            shared = "" if kernel.shared_memory is None else f", {kernel.shared_memory} B shared"
            spilled = f", {kernel.stack} B stack" if kernel.stack else ""
            asked.append(f"{kernel.name} {kernel.registers} registers{shared}{spilled}")
        asked += [f"{one.count} {kind} of {one.nbytes / 1e6:.1f} MB" for kind, one in self.collectives.items()]
        asked.append(f"fits {' and '.join(self.fits) or 'none'}")
        return f"compiled  {self.name} ({self.seconds:.0f} s): {'; '.join(asked)}"


def compile_case(case: programs.Case, details: bool) -> Report:
    """`details`: registers and shared memory too, which takes time for large programs."""
    name, lower = case
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder} if details else {}
        try:
            compiled = lower().compile(options)
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return Report(name, time.perf_counter() - start, reason, [], None, {}, [])
        seconds = time.perf_counter() - start
        found = resources.kernels(compiled, Path(folder)) if details else []
    needed = memory(compiled)
    ours = [kernel for kernel in found if kernel.name.startswith(("block_attention", "kv_injection"))]
    fits = [size for size, device in SIZES.items() if needed.total <= device.usable]
    return Report(name, seconds, None, ours, needed, collectives(compiled), fits)


def reports(target: Target, only: str | None, matching: str, batch: int) -> Iterator[Report]:
    if only != "pairs":
        for case in programs.kernel_cases(target):
            if matching in case[0]:
                yield compile_case(case, details=True)
    if only != "kernels":
        for pair in programs.PAIRS:
            if matching in pair.name:
                for case in programs.pair_cases(target, pair, batch):
                    yield compile_case(case, details=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile for GPUs that are not here.", allow_abbrev=False)
    add = parser.add_argument
    add("--target", action="append", choices=NAMES, help="repeatable (default: a100-80gb)")
    add("--tensor", action="append", type=int, metavar="N", help="devices; repeatable (default: 1 and 2)")
    add("--only", choices=["kernels", "pairs"], help="the kernels alone, or the whole programs (default: both)")
    add("--matching", default="", metavar="TEXT", help="only programs with this in their name")
    add("--batch", type=int, default=1, metavar="B", help="rows of the whole programs (default: %(default)s)")
    add("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"aot: error: {reason}", file=sys.stderr)
        return 2
    if any(tensor < 1 for tensor in args.tensor or ()):
        print(f"aot: error: --tensor is {min(args.tensor)}; it must be at least 1", file=sys.stderr)
        return 2
    failed, written = 0, []
    for name, tensor in product(args.target or ["a100-80gb"], args.tensor or [1, 2]):
        target = Target.load(name, {"tensor": tensor})
        print(f"{name}, tensor {tensor}: {target.kind}, JAX {jax.__version__}", flush=True)
        for report in reports(target, args.only, args.matching, args.batch):
            print(report.line(), flush=True)
            failed += report.failure is not None
            written.append({"target": name, "tensor": tensor, **asdict(report)})
    if args.json:
        Path(args.json).write_text(json.dumps(written, indent=1) + "\n")
    print(f"{len(written) - failed} of {len(written)} programs compiled", flush=True)
    return 1 if failed or not written else 0


if __name__ == "__main__":
    sys.exit(main())

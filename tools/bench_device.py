"""One device measured in one run: the kernels checked and timed, whole cycles at Qwen3-8B's shape, and dflash's loop in torch beside them.

    make bench-device
    python tools/bench_device.py [--budget-s 480] [--json FILE] [--only checks kernels cycles dflash] [--toy]

Inputs are drawn afresh each time (`--seed` repeats a run). Parts that would not end within the budget are left out and named. `--toy` runs
everything at a tiny size, for a CPU: its times mean nothing. Exit status: 0; 1 where a kernel is wrong; 2 for bad flags.
"""

import argparse
import importlib.util
import json
import math
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory of the device too

import jax
from device_bench import cycles, kernels
from device_bench.timing import Budget, copy_bandwidth

from jaxspec_kernels.implementation import Implementation, has_gpu

PARTS = ["checks", "kernels", "cycles", "dflash"]
# Seconds that one item of each part takes at first sight; then the slowest one so far tells.
EXPECTED = {"checks": 15.0, "kernels": 20.0, "drafts": 30.0, "cycles": 90.0, "dflash": 90.0}
Figures = dict[str, Any]


def run_checks(found: Figures, budget: Budget, chosen: list[kernels.Case], implementation: Implementation) -> None:
    """The kernels against the float32 reference."""
    expected = EXPECTED["checks"]
    for case, key in zip(chosen, jax.random.split(jax.random.key(found["seed"]), len(chosen)), strict=True):
        if case.rows > 1 or not budget.allows(f"check of {case.name}", expected):
            continue  # a check has ragged rows of its own
        start = time.monotonic()
        error = kernels.check(case, key, implementation)
        verdict = "ok" if error <= kernels.TOLERANCE else "WRONG"
        shown = error if math.isfinite(error) else None  # JSON has no infinity
        found["checks"].append({"name": case.name, "error": shown, "ok": verdict == "ok"})
        print(f"{verdict:5} {case.name}: relative error {error:.2e} (at most {kernels.TOLERANCE:g})", flush=True)
        expected = max(time.monotonic() - start, expected / 2)


def run_kernels(
    found: Figures, budget: Budget, chosen: list[kernels.Case], implementation: Implementation, toy: bool
) -> None:
    """Their times."""
    expected = EXPECTED["kernels"]
    for case, key in zip(chosen, jax.random.split(jax.random.key(found["seed"] + 1), len(chosen)), strict=True):
        if not budget.allows(f"time of {case.name}", expected):
            continue
        start = time.monotonic()
        row = kernels.measure(case, key, implementation, found["copy_bandwidth"], toy)
        found["kernels"].append(row)
        print(kernels.line(row), flush=True)
        expected = max(time.monotonic() - start, expected / 2)


def run_cycles(found: Figures, budget: Budget, toy: bool) -> None:
    """Drafting alone, which compiles fast, then whole cycles; K = 7 of every drafter first."""
    if not budget.allows("drafts and cycles", EXPECTED["drafts"]):
        return
    bench = cycles.Bench(cycles.toy_shape() if toy else cycles.full_shape(), found["copy_bandwidth"])
    for part, measure, line in (
        ("drafts", bench.draft, cycles.draft_line),
        ("cycles", bench.cycle, cycles.cycle_line),
    ):
        expected = EXPECTED[part]
        for drafts in cycles.TOY_DRAFTS if toy else cycles.DRAFTS:
            for method in cycles.METHODS:
                if not budget.allows(f"{part} of {method} at K = {drafts}", expected):
                    continue
                start = time.monotonic()
                row = measure(method, drafts)
                found[part].append(row)
                print(line(row), flush=True)
                expected = max(time.monotonic() - start, expected / 2)
    found["draft_growth"] = cycles.growth(found["drafts"])
    for row in found["draft_growth"]:
        print(
            f"{row['method']:6} drafts K = {row['to']} in {row['ratio']:.2f} times K = {row['from']} (aim: {row['aim']})",
            flush=True,
        )


def run_dflash(found: Figures, budget: Budget, toy: bool) -> None:
    """dflash's loop, in a process of its own with the rest of the budget."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "dflash")):
        print("torch and dflash are not both installed here: no comparison with dflash's loop", flush=True)
        return
    if not budget.allows("dflash's loop in torch", EXPECTED["dflash"]):
        return
    command = [sys.executable, "-m", "device_bench.by_dflash", *(["--toy"] if toy else [])]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=max(budget.left, 1)
        )
    except subprocess.TimeoutExpired:
        budget.leave_out("dflash's loop in torch", "it has not ended within the budget")
        return
    if done.returncode:
        print(f"dflash's loop failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return
    found["dflash"] = figures = json.loads(done.stdout.splitlines()[-1])
    ours = {f"K = {row['K']}": row["cycle_ms"] for row in found["cycles"] if row["method"] == "dflash"}
    for name, ms in figures["ms_per_cycle"].items():
        beside = f", here {ours[name]:.2f} ms: {ms / ours[name]:.2f} x" if name in ours else ""
        print(f"dflash 0.1 in torch {figures['torch']}, {name}: {ms:.2f} ms a cycle{beside}", flush=True)


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--budget-s", type=float, default=480.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, after every part")
    parser.add_argument("--seed", type=int, help="of the inputs (default: drawn afresh)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: does it run at all?")
    args = parser.parse_args()
    budget, start, device = Budget(args.budget_s), time.monotonic(), jax.devices()[0]
    if not has_gpu() and not args.toy:
        parser.error(f"the device here is a {device.platform}; the full sizes are for a GPU: give --toy")
    implementation: Implementation = "triton" if has_gpu() else "interpret"
    bandwidth = copy_bandwidth(1 << 22 if args.toy else 1 << 30, 2 if args.toy else 10, 3)
    found: Figures = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "kernels_by": implementation,
        "toy": args.toy,
        "seed": secrets.randbits(31) if args.seed is None else args.seed,
        "copy_bandwidth": bandwidth,
        "checks": [],
        "kernels": [],
        "drafts": [],
        "cycles": [],
    }
    note = ", TOY SIZES: the times mean nothing" if args.toy else ""
    print(f"{device.device_kind}, JAX {jax.__version__}, seed {found['seed']}{note}", flush=True)
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, read and written", flush=True)
    chosen = kernels.cases(args.toy)
    for part in args.only:
        if part == "checks":
            run_checks(found, budget, chosen, implementation)
        elif part == "kernels":
            run_kernels(found, budget, chosen, implementation, args.toy)
        elif part == "cycles":
            run_cycles(found, budget, args.toy)
        else:
            run_dflash(found, budget, args.toy)
        found.update(skipped=budget.skipped, seconds=time.monotonic() - start)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row["name"] for row in found["checks"] if not row["ok"]]
    left_out = f", {len(budget.skipped)} parts left out" if budget.skipped else ""
    right = "every checked kernel is right" if found["checks"] else "no kernel was checked"
    print(f"{found['seconds']:.0f} s{left_out}; {f'WRONG: {wrong}' if wrong else right}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""What was measured, as a table, as JSON, and as warnings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.evaluation.measure import Measurement, PeakMemory

MIB = 1 << 20


def measurement_json(measured: Sequence[Measurement], memory: PeakMemory) -> dict[str, Any]:
    """The runs, plain decoding first, and the peak memory."""
    plain = measured[0]
    return {
        "runs": [_run_json(one, plain) for one in measured],
        "peak_memory": {"host_bytes": memory.host_bytes, "device_bytes": memory.device_bytes},
    }


def measurement_lines(measured: Sequence[Measurement], memory: PeakMemory) -> list[str]:
    """Tables for people."""
    plain = measured[0]
    rows = [["run", "tokens/s", "ratio", "accept len", "cycles", "ms/cycle", "draft", "verify", "other", "compile"]]
    for one in measured:
        split, acceptance = one.split, one.acceptance
        parts = [f"{part / split.cycle_ms:.1%}" for part in (split.draft_ms, split.verify_ms, split.other_ms)]
        rows.append(
            [
                one.run.name,
                f"{one.tokens_per_s:.1f}",
                f"{ratio(one, plain):.2f}",
                "-" if acceptance is None else f"{acceptance.totals.acceptance_length:.2f}",
                "-" if acceptance is None else str(acceptance.totals.cycles),
                f"{split.cycle_ms:.2f}",
                *parts,
                f"{one.compile_s:.1f} s",
            ]
        )
    lines = aligned(rows)
    drafting = [one for one in measured if one.acceptance is not None]
    if drafting:
        most = max(one.run.engine.programs.plan.drafts for one in drafting)
        lines += ["", "acceptance per position (share of all cycles)"]
        lines += aligned([["run", *map(str, range(1, most + 1))], *map(_per_position, drafting)])
        lines += ["", "cycles by number of drafts accepted"]
        lines += aligned([["run", *map(str, range(most + 1))], *map(_histogram, drafting)])
    lines += ["", memory_line(memory)]
    return lines


def losses(measured: Sequence[Measurement]) -> list[str]:
    """A line for each run that is slower than plain decoding."""
    plain = measured[0]
    return [
        f"{one.run.name} is slower than plain decoding: {one.tokens_per_s:.1f} tokens/s against "
        f"{plain.tokens_per_s:.1f}, {ratio(one, plain):.2f} times"
        for one in measured[1:]
        if ratio(one, plain) < 1
    ]


def ratio(one: Measurement, plain: Measurement) -> float:
    """Its tokens/s over plain decoding's."""
    return one.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0


def memory_line(memory: PeakMemory) -> str:
    """The high-water marks."""
    device = "" if memory.device_bytes is None else f", device {memory.device_bytes / MIB:.0f} MiB"
    return f"peak memory of the process: host {memory.host_bytes / MIB:.0f} MiB{device}"


def write_trace(path: Path, measured: Sequence[Measurement]) -> None:
    """One line a cycle and row, as `jaxspec.generate --trace` writes it, with the run's name."""
    with path.open("w", encoding="utf-8") as file:
        for one in measured:
            for row, result in enumerate(one.results):
                for cycle in result.cycles:
                    file.write(json.dumps({"run": one.run.name, "row": row, **cycle.as_json()}) + "\n")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left and the others to the right; short rows are filled up."""
    columns = max(map(len, rows))
    full = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(columns)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in full
    ]


def _per_position(one: Measurement) -> list[str]:
    assert one.acceptance is not None
    return [one.run.name, *(f"{rate:.3f}" for rate in one.acceptance.totals.acceptance_per_position)]


def _histogram(one: Measurement) -> list[str]:
    assert one.acceptance is not None
    return [one.run.name, *map(str, one.acceptance.histogram)]


def _run_json(one: Measurement, plain: Measurement) -> dict[str, Any]:
    split = one.split
    made = {
        "name": one.run.name,
        "drafter": one.run.drafter,
        "tokens": one.tokens,
        "tokens_per_s": one.tokens_per_s,
        "ratio": ratio(one, plain),
        "prefill_s": one.prefill_s,
        "decode_s": one.decode_s,
        "compile_s": one.compile_s,
        "split": {
            "length": split.length,
            "cycle_ms": split.cycle_ms,
            "draft_ms": split.draft_ms,
            "verify_ms": split.verify_ms,
            "other_ms": split.other_ms,
        },
        "speculative": None,
    }
    if one.acceptance is not None:
        totals = one.acceptance.totals
        made["speculative"] = {
            "method": totals.method,
            "num_speculative_tokens": len(totals.acceptance_per_position),
            "cycles": totals.cycles,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
            "acceptance_length": totals.acceptance_length,
            "acceptance_per_position": list(totals.acceptance_per_position),
            "histogram": list(one.acceptance.histogram),
        }
    return made

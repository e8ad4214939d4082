"""What a run tells: a progress line, metrics as JSON lines and TensorBoard events, a picture at the end."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxspec import distributed
from jaxspec.errors import InputError
from jaxspec.training.events import EventFile
from jaxspec.training.files import EVENTS, METRICS, PICTURE

QUIET_SECONDS = 60.0


class RunLog:
    """The run's `metrics.jsonl` and its TensorBoard events, from `step` on: what an interrupted run wrote past it is cut off. Of several
    processes the first one writes it."""

    def __init__(self, output: Path, step: int):
        self._writes = distributed.first()
        if not self._writes:
            return
        self._file = output / METRICS
        try:
            kept = [line for line in read_metrics(output) if line["step"] <= step]
            work = self._file.with_suffix(".part")
            work.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            os.replace(work, self._file)
            self._stream = self._file.open("a", encoding="utf-8")
            self._events = EventFile(output / EVENTS, step)
        except OSError as error:
            raise InputError(f"run.output {output}: cannot be written: {error.strerror or error}") from error

    def write(self, kind: str, step: int, values: Mapping[str, float | Sequence[float] | None]) -> None:
        """One entry: kind "train" or "validation", and its figures; None and what is not finite are left out."""
        if not self._writes:
            return
        values = {
            name: value
            for name, value in values.items()
            if value is not None and (isinstance(value, Sequence) or math.isfinite(value))
        }
        self._stream.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._stream.flush()
        for name, value in values.items():
            if not isinstance(value, Sequence):
                self._events.scalar(f"{kind}/{name}", value, step)
            else:
                for position, part in enumerate(value, 1):
                    self._events.scalar(f"{kind}/{name}/{position}", part, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        if self._writes:
            self._stream.close()
            self._events.close()


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The entries of a run's `metrics.jsonl`; a last line that was cut off is left out."""
    file = output / METRICS
    if not file.is_file():
        return []
    entries = []
    for line in file.read_text("utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


class Progress:
    """The progress line on stderr: one that is written over on a terminal, else one a call. Of several processes the first one shows it."""

    def __init__(self, steps: int, first: int, stream: TextIO | None = None):
        """steps: of the whole run; first: where this process begins."""
        self._steps, self._first = steps, first
        self._stream = sys.stderr if stream is None else stream
        self._over = self._stream.isatty()
        self._begun = time.monotonic()
        self._begun_at = first
        self._shown = False
        self._next = 0.0

    def show(self, step: int, loss: float, acceptance: float, rate: float | None) -> None:
        """After `step` steps: the loss, the acceptance length at training anchors, tokens a second if known yet."""
        seconds = time.monotonic() - self._begun
        left = seconds / max(step - self._begun_at, 1) * (self._steps - step)
        speed = "" if rate is None else f"  {rate:,.0f} tokens/s  ETA {_clock(left)}"
        self.line(f"step {step}/{self._steps}  loss {loss:.4f}  acceptance {acceptance:.3f}{speed}", over=self._over)

    @classmethod
    def counting(cls, stream: TextIO | None = None) -> "Progress":
        """For `count`: how much there is comes with each call."""
        return cls(0, 0, stream)

    def count(self, done: int, total: int, what: str = "tokens") -> None:
        """So many of so many; on a terminal each time, else about once a minute."""
        seconds = time.monotonic() - self._begun
        if self._over or done == total or seconds > self._next:
            self._next = seconds + QUIET_SECONDS
            rate = done / max(seconds, 1e-9)
            left = _clock((total - done) / max(rate, 1e-9))
            self.line(f"{done:,} of {total:,} {what}  {rate:,.1f} {what}/s  ETA {left}", over=self._over)

    def restart_clock(self, step: int) -> None:
        """The estimate leaves out what went before, such as compiling."""
        self._begun, self._begun_at = time.monotonic(), step

    def line(self, text: str, over: bool = False) -> None:
        """A line of its own, or with `over` one that the next overwrites."""
        if not distributed.first():
            return
        before = "\r\x1b[K" if self._shown else ""
        print(f"{before}{text}", end="" if over else "\n", file=self._stream, flush=True)
        self._shown = over

    def close(self) -> None:
        """Ends a line that would be written over."""
        if self._shown:
            print(file=self._stream, flush=True)
            self._shown = False


def draw(output: Path) -> Path | None:
    """The picture of loss and acceptance over steps, from the run's metrics; None without any."""
    entries = read_metrics(output)
    train = [entry for entry in entries if entry["kind"] == "train"]
    if not train:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    loss, acceptance = figure.subplots(2, 1, sharex=True)
    steps = [entry["step"] for entry in train]
    loss.plot(steps, [entry["loss"] for entry in train], linewidth=1)
    loss.set_ylabel("loss")
    acceptance.plot(
        steps, [entry.get("acceptance_length", math.nan) for entry in train], linewidth=1, label="at training anchors"
    )
    held_out = [entry for entry in entries if entry["kind"] == "validation"]
    if held_out:
        acceptance.plot(
            [entry["step"] for entry in held_out],
            [entry.get("acceptance_length", math.nan) for entry in held_out],
            marker="o",
            label="held-out documents, walked",
        )
    acceptance.set_ylabel("acceptance length")
    acceptance.set_xlabel("step")
    acceptance.legend()
    for axes in (loss, acceptance):
        axes.grid(alpha=0.3)
    path = output / PICTURE
    figure.savefig(path, dpi=120)
    return path


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"

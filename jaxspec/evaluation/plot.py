"""A picture of a measurement: acceptance per position, and tokens/s by K."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.evaluation.measure import Measurement

FORMATS = (".png", ".svg", ".pdf")


def plot(path: Path, measured: "Sequence[Measurement]") -> None:
    """Write it in the format of the file's ending. matplotlib is imported here: it takes half a second that no other run should pay."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    speeds: dict[str, list[tuple[int, float]]] = {}
    for one in measured[1:]:
        assert one.acceptance is not None and one.run.drafter is not None
        rates = one.acceptance.totals.acceptance_per_position
        left.plot(range(1, len(rates) + 1), rates, marker="o", label=one.run.name)
        name = one.run.name.rpartition(" K=")[0] or one.run.name
        speeds.setdefault(name, []).append((len(rates), one.tokens_per_s))
    left.set(xlabel="position in the block", ylabel="share of cycles that accept it", ylim=(0, 1.02))
    right.axhline(measured[0].tokens_per_s, color="black", linestyle="--", label="plain")
    for name, points in speeds.items():
        drafts, speed = zip(*sorted(points), strict=True)
        right.plot(drafts, speed, marker="o", label=name)
    right.set(xlabel="K, drafts a cycle", ylabel="tokens/s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=150)

"""`tools/bench_device.py` at toy size: every part runs, says what it found, and keeps within its budget."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxspec_kernels.implementation import has_gpu

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.fixture
def quick(monkeypatch):
    """One shape of each kernel, one drafter, one K; compiled fast."""
    from device_bench import cycles
    from jitted import quick_programs

    monkeypatch.setattr(cycles, "METHODS", ("dflash",))
    monkeypatch.setattr(cycles, "TOY_DRAFTS", (3,))
    with quick_programs():
        yield


def run(monkeypatch, *argv: str) -> int:
    import bench_device

    monkeypatch.setattr(sys, "argv", ["bench_device.py", *argv])
    return bench_device.main()


@pytest.mark.usefixtures("quick")
def test_every_part_runs_on_a_cpu_at_toy_size(monkeypatch, tmp_path, capsys):
    report = tmp_path / "figures.json"
    assert run(monkeypatch, "--toy", "--seed", "3", "--only", "checks", "kernels", "cycles", "--json", str(report)) == 0
    out, found = capsys.readouterr().out, json.loads(report.read_text())
    assert found["seed"] == 3 and found["toy"] and found["kernels_by"] == "interpret" and not found["skipped"]
    assert [row["ok"] for row in found["checks"]] == [True, True]
    assert {row["name"].split()[0] for row in found["kernels"]} == {"attention", "injection"}
    for row in found["kernels"]:
        assert row["kernel_us"] > 0 and row["xla_us"] > 0 and row["aim"] in out
    [cycle] = found["cycles"]
    [draft] = found["drafts"]
    assert (cycle["method"], cycle["K"]) == (draft["method"], draft["K"]) == ("dflash", 3)
    assert 2 < cycle["tokens_per_cycle"] < 4 and cycle["cycle_ms"] > 0 and draft["draft_ms"] > 0
    assert cycle["times_floor"] == pytest.approx(cycle["cycle_ms"] / cycle["floor_ms"])
    assert "TOY SIZES" in out and "every checked kernel is right" in out


def test_parts_past_the_budget_are_left_out_and_named(monkeypatch, tmp_path, capsys):
    report = tmp_path / "figures.json"
    assert run(monkeypatch, "--toy", "--budget-s", "1", "--only", "checks", "cycles", "--json", str(report)) == 0
    found = json.loads(report.read_text())
    assert found["checks"] == found["cycles"] == []
    out = capsys.readouterr().out
    assert len(found["skipped"]) == 2 + 1 and all(f"left out: {part}" in out for part in found["skipped"])
    assert "drafts and cycles" in found["skipped"]


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_is_found(monkeypatch, capsys):
    from device_bench import kernels

    case = next(case for case in kernels.cases(toy=True) if case.kernel == "attention")

    def call(arguments, implementation):
        out = case.call(arguments, "xla")
        return out if implementation == "xla" else out.at[-1].multiply(1.1)

    monkeypatch.setattr(kernels, "cases", lambda toy: [replace(case, call=call)])
    assert run(monkeypatch, "--toy", "--only", "checks") == 1
    assert "WRONG attention" in capsys.readouterr().out


def test_nan_and_slots_that_nothing_should_write_are_errors():
    from device_bench.kernels import relative_error

    want = np.array([[1.0, 2.0], [np.nan, 4.0]])
    assert relative_error(want, want) == 0
    assert relative_error(1.1 * want, want) == pytest.approx(0.1)
    for place in ((0, 0), (1, 0)):
        got = want.copy()
        got[place] = np.nan if place == (0, 0) else 0.0
        assert relative_error(got, want) == np.inf


@pytest.mark.skipif(has_gpu(), reason="says what happens without a GPU")
def test_the_full_size_without_a_gpu_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch)
    assert "the full sizes are for a GPU: give --toy" in capsys.readouterr().err

"""Phases of a cycle from a trace: what belongs to whom."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "tools")


def test_every_instant_belongs_to_one_phase():
    from cycle_trace import Operation, phases_of

    operations = [
        Operation(0, 4000, "draft"),
        Operation(1000, 3000, "draft"),  # beside the other
        Operation(5000, 6000, "draft"),  # the gap is the drafter's
        Operation(7000, 12000, "verify"),  # the gap before it nobody's
        Operation(11000, 12500, None),  # of the compiler: follows what began before
        Operation(12400, 13000, "accept"),
        Operation(14000, 14500, None),
        Operation(14500, 15000, "commit"),
    ]
    phases = phases_of(reversed(operations), cycles=2)
    assert (phases.draft_ms, phases.verify_ms, phases.rest_ms) == (3.0, 2.75, 1.75)
    assert phases.rest_share == pytest.approx(1.75 / 7.5)


def test_the_scopes_of_a_compiled_program_are_read():
    from cycle_trace import INSTRUCTION, SCOPE

    text = """
  %add.1 = f32[2]{0} add(%a, %b), metadata={op_name="jit(run)/while/body/verify/add" stack_frame_id=2}
  ROOT %copy.2 = f32[2]{0} copy(%add.1)
  ROOT %fusion.3 = f32[2]{0} fusion(%add.1), calls=%f, metadata={op_name="jit(run)/while/body/accept"}
"""
    assert [(name, SCOPE.search(path)[1]) for name, path in INSTRUCTION.findall(text)] == [
        ("add.1", "verify"),
        ("fusion.3", "accept"),
    ]

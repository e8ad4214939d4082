"""What the checks and the doctor found, as lines and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

from jaxspec.evaluation.distribution import LEAST_P, DrawCheck
from jaxspec.evaluation.doctor import Diagnosis, Trial
from jaxspec.evaluation.lossless import Difference, GreedyCheck
from jaxspec.evaluation.report import aligned


def lossless_lines(greedy: Sequence[GreedyCheck], drawn: Sequence[DrawCheck], exact: bool) -> list[str]:
    """A table of the checks, with the differences that rounding explains. `exact`: none is allowed (float32)."""
    rows = [["run", "prompts", "tokens", "accept len", "result"]]
    for one in greedy:
        if one.failure is not None:
            result = "FAILED"
        elif one.differences:
            result = f"{len(one.differences)} prompts differ within rounding"
        else:
            result = "identical"
        rows.append([one.name, str(one.prompts), str(one.tokens), f"{one.acceptance_length:.2f}", result])
    title = "greedy output against plain decoding, " + (
        "float32: every token must be the same" if exact else "bfloat16: near-ties may differ"
    )
    lines = [title, *aligned(rows)]
    lines += [f"{one.name}: {difference}" for one in greedy for difference in one.differences]
    if drawn:
        rows = [["run", "draws", "second tokens behind", "cells", "p"]]
        rows += [[one.name, str(one.draws), str(one.seconds), str(one.cells), f"{one.p:.3g}"] for one in drawn]
        lines += ["", f"sampled output against the verifier's distribution (chi-square; p must exceed {LEAST_P})"]
        lines += aligned(rows)
    else:
        lines += ["", "sampled output was not checked; --draws N does"]
    return lines


def lossless_failure(greedy: Sequence[GreedyCheck], drawn: Sequence[DrawCheck]) -> str | None:
    """The first check that failed, in one line; None where all passed."""
    for one in greedy:
        if one.failure is not None:
            return f"{one.name} is not lossless: {one.failure}"
    for one in drawn:
        if not one.passed:
            return (
                f"{one.name}: sampled output has not the verifier's distribution: p = {one.p:.3g} of {one.draws} draws"
            )
    return None


def lossless_summary(greedy: Sequence[GreedyCheck], drawn: Sequence[DrawCheck]) -> str:
    """One line for what passed."""
    tokens = sum(one.tokens for one in greedy)
    sampled = f", {len(drawn)} sampled distributions match" if drawn else ""
    rounding = " up to rounding" if any(one.differences for one in greedy) else ""
    return f"lossless: {len(greedy)} runs, {tokens} tokens equal plain decoding's{rounding}{sampled}"


def lossless_json(greedy: Sequence[GreedyCheck], drawn: Sequence[DrawCheck]) -> dict[str, Any]:
    """Both kinds of checks."""
    return {
        "passed": lossless_failure(greedy, drawn) is None,
        "greedy": [
            {
                "name": one.name,
                "prompts": one.prompts,
                "tokens": one.tokens,
                "acceptance_length": one.acceptance_length,
                "passed": one.failure is None,
                "differences": [_difference_json(difference) for difference in one.differences],
            }
            for one in greedy
        ],
        "sampled": [
            {
                "name": one.name,
                "draws": one.draws,
                "second_tokens_behind": one.seconds,
                "cells": one.cells,
                "p": one.p,
                "passed": one.passed,
            }
            for one in drawn
        ],
    }


def diagnosis_lines(name: str, diagnosis: Diagnosis) -> list[str]:
    """A table for one drafter, and the verdict."""
    head = ["accept len", "+-", "position 1", "cycles"]
    lines = [name, *aligned([["tried", *head], *map(_trial_row, diagnosis.trials)])]
    rows = aligned([["anchor's position", *head], *map(_trial_row, diagnosis.positions)])
    lines += ["", f"by position, as given (the drafter's config gives {diagnosis.max_positions})", *rows]
    lines += ["", f"draft vocabulary: holds {diagnosis.vocabulary:.1%} of the verifier's tokens", ""]
    return [*lines, f"verdict: {diagnosis.verdict}"]


def diagnosis_json(name: str, diagnosis: Diagnosis) -> dict[str, Any]:
    """One drafter's."""
    return {
        "name": name,
        "trials": [_trial_json(trial) for trial in diagnosis.trials],
        "positions": [_trial_json(trial) for trial in diagnosis.positions],
        "max_positions": diagnosis.max_positions,
        "vocabulary": diagnosis.vocabulary,
        "verdict": diagnosis.verdict,
    }


def _trial_row(trial: Trial) -> list[str]:
    if not trial.cycles:
        return [f"{trial.name} (not tried: {trial.note})"]
    return [
        trial.name,
        f"{trial.accepted + 1:.2f}",
        f"{trial.error:.2f}",
        f"{trial.first:.3f}",
        str(trial.cycles),
    ]


def _trial_json(trial: Trial) -> dict[str, Any]:
    tried = trial.cycles > 0
    return {
        "name": trial.name,
        "acceptance_length": trial.accepted + 1 if tried else None,
        "standard_error": trial.error if tried and math.isfinite(trial.error) else None,
        "first_position": trial.first if tried else None,
        "cycles": trial.cycles,
        "note": trial.note,
    }


def _difference_json(one: Difference) -> dict[str, Any]:
    return {
        "prompt": one.prompt,
        "position": one.position,
        "plain": one.plain,
        "token": one.token,
        "gap": None if math.isnan(one.gap) else one.gap,
        "epsilon": one.epsilon,
        "excused": one.excused,
    }

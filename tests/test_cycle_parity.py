"""The cycle against the originals' own greedy loops, cycle by cycle: the loop.json beside the drafters in tests/goldens/drafters, made by
tools/make_drafter_goldens.py with z-lab's dflash and with DeepSpec's evaluator.

The originals take the answer's first token from the prefill. Here it comes out of the first cycle, so the engine gets it as the prompt's
last token: from there on every cycle has the same anchor.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jitted import quick_programs

from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import LoadedVerifier, load_verifier
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.planning import make_plan
from jaxspec.decoding.result import Result
from jaxspec.decoding.speculative import SpeculativeConfig

GOLDENS = Path(__file__).parent / "goldens" / "drafters"
LOOPS = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDENS.glob("*/loop.json"))}
FITTED = [name for name in LOOPS if "fitted" in name]
CASES = [
    (name, threshold)
    for name, loop in LOOPS.items()
    for threshold in sorted({run["confidence_threshold"] for run in loop["runs"]})
]


@cache
def verifier(name: str) -> LoadedVerifier:
    return load_verifier(GOLDENS / name, dtype=jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs():
        yield


def generate(name: str, threshold: float) -> tuple[Engine, list[dict[str, Any]], list[Result]]:
    """What the original did on each prompt, and what the engine does, all prompts in one ragged batch."""
    loop = LOOPS[name]
    target = verifier(loop["verifier"])
    loaded = load_drafter(GOLDENS / name, verifier=target, dtype=jnp.float32)
    asked = SpeculativeConfig(confidence_threshold=threshold, num_speculative_tokens=loaded.config.max_drafts)
    plan = make_plan(asked, loaded.config)
    if name not in FITTED or threshold > 0.5:
        plan = replace(plan, widths=plan.widths[-1:])  # to compile faster; one case verifies with every width
    engine = Engine(target.config, target.module, loaded.module, plan)
    runs = [run for run in loop["runs"] if run["confidence_threshold"] == threshold]
    params = [
        SamplingParams(max_new_tokens=sum(run["acceptance_lengths"]), stop_token_ids=run["stop_token_ids"])
        for run in runs
    ]
    return engine, runs, engine.generate([run["prompt_ids"] + run["token_ids"][:1] for run in runs], params)


@pytest.mark.parametrize(("name", "threshold"), CASES)
def test_every_cycle_is_the_originals(name, threshold):
    engine, runs, results = generate(name, threshold)
    drafts = engine.programs.plan.drafts
    for run, result in zip(runs, results, strict=True):
        made = [run["token_ids"][0], *result.token_ids]
        assert made[: len(run["token_ids"])] == run["token_ids"]
        lengths = [len(cycle.tokens) for cycle in result.cycles]
        if run["proposal_lengths"] is not None:
            assert [cycle.verified for cycle in result.cycles] == run["proposal_lengths"]
            assert lengths == run["acceptance_lengths"]
            continue
        # dflash shortens its block near the limit, and a shorter block denoises to other drafts.
        room = run["max_new_tokens"] - 1
        whole = 0
        while whole < len(lengths) and room - sum(lengths[:whole]) > drafts:
            whole += 1
        assert lengths[:whole] == run["acceptance_lengths"][:whole]
        assert whole >= min(9, len(run["acceptance_lengths"]))


def test_the_cases_accept_from_nothing_to_the_whole_block():
    for name in FITTED:
        loop = LOOPS[name]
        drafts = load_drafter(GOLDENS / name, verifier=verifier(loop["verifier"])).config.max_drafts
        lengths = {length for run in loop["runs"] for length in run["acceptance_lengths"]}
        assert lengths >= {1, 2, 3, drafts + 1}

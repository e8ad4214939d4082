"""Why is acceptance low? Tries what commonly goes wrong, one thing at a time, and reports the acceptance of each try."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.decoding.cycle import Plan, target_ids
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.result import Cycle, Result
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.evaluation.models import Models, OnCompile
from jaxspec.evaluation.prompt_sets import encode
from jaxspec.prompts import PromptItem, apply_chat

STANDARD_ERRORS = 3.0  # a difference counts beyond this many of them ...
LEAST_CHANGE = 0.1  # ... and beyond this share of the smaller value
POOR_VOCABULARY = 0.9
FIRST_BUCKET = 256
FALL = 0.5  # acceptance that falls below this share of what it was at shorter lengths is a finding


@dataclass(frozen=True)
class Trial:
    """One way of running the drafter.

    Fields:
        name: what was changed.
        advice: what to do if it helps.
        cycles: how many.
        accepted: mean number of drafts accepted a cycle; nan without cycles.
        error: its standard error.
        first: share of cycles that accepted their first draft.
        note: why it was not tried; "" where it was.
    """

    name: str
    advice: str = ""
    cycles: int = 0
    accepted: float = math.nan
    error: float = 0.0
    first: float = math.nan
    note: str = ""

    @classmethod
    def of(cls, name: str, advice: str, cycles: Sequence[Cycle]) -> "Trial":
        """From the cycles of a run."""
        counts = [cycle.accepted for cycle in cycles]
        if not counts:
            return cls(name, advice, note="no cycles")
        error = statistics.stdev(counts) / math.sqrt(len(counts)) if len(counts) > 1 else math.inf
        first = sum(count > 0 for count in counts) / len(counts)
        return cls(name, advice, len(counts), statistics.mean(counts), error, first)

    def beats(self, other: "Trial") -> bool:
        """Whether it accepts more than the other, by more than chance."""
        if not self.cycles or not other.cycles:
            return False
        difference = self.accepted - other.accepted
        chance = STANDARD_ERRORS * math.hypot(self.error, other.error)
        return difference > max(chance, LEAST_CHANGE * other.accepted)


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Fields:
        trials: as given, then each alternative, the last one with shuffled weights.
        positions: acceptance as given by the position of the anchor, "a-b" a name.
        max_positions: the longest sequence that the drafter was made for.
        vocabulary: share of the verifier's tokens that the draft vocabulary can express.
        verdict: one line.
    """

    trials: tuple[Trial, ...]
    positions: tuple[Trial, ...]
    max_positions: int
    vocabulary: float
    verdict: str


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Fields:
        models: with the verifier.
        drafter, plan: the drafter and how it is used.
        items, chat, system: the prompts before the chat template, and whether they go through it.
        params: sampling.
        batch_size: most rows of a batch.
        reload: models and drafter again, in the other dtype: its name, and how to get them.
    """

    models: Models
    drafter: Drafter
    plan: Plan
    items: Sequence[PromptItem]
    chat: bool
    system: str | None
    params: SamplingParams
    batch_size: int
    reload: tuple[str, Callable[[], tuple[Models, Drafter]]] | None

    def prompts(self, chat: bool, thinking: bool | None = None) -> list[list[int]]:
        """Token ids."""
        system = self.system if chat == self.chat else None
        return encode(self.models.tokenizer, apply_chat(self.items, chat, system), thinking)

    def engine(self, drafter: Drafter, models: Models | None = None) -> Engine:
        """With a drafter in the place of this one."""
        return (models or self.models).engine(drafter, self.plan, max_batch_size=self.batch_size)


def diagnose(subject: Subject, show: OnCompile) -> Diagnosis:
    """Try everything; `show` is told what is being tried."""
    drafter, prompts, params = subject.drafter, subject.prompts(subject.chat), subject.params
    engine = subject.engine(drafter)
    trials: list[Trial] = []

    def attempt(name: str, advice: str, results: Callable[[], list[Result]]) -> list[Result]:
        show(f"trying: {name}")
        found = results()
        trials.append(Trial.of(name, advice, cycles_of(found)))
        return found

    base = attempt("as given", "", lambda: engine.generate(prompts, params))
    for shift in (-1, 1):
        name = f"tap ids {shift:+d}"
        taps = tuple(tap + shift for tap in drafter.config.taps)
        if taps[0] < 0 or taps[-1] > subject.models.config.num_layers:
            trials.append(
                Trial(name, note=f"{list(taps)} is outside the verifier's 0 to {subject.models.config.num_layers}")
            )
            continue
        advice = f"the checkpoint's tap ids are off by one: {list(taps)} fits, not {list(drafter.config.taps)}"
        attempt(name, advice, lambda taps=taps: subject.engine(with_taps(drafter, taps)).generate(prompts, params))
    for name, other in other_prompts(subject):
        if other == prompts:
            trials.append(Trial(name, note="the same prompts"))
            continue
        advice = f"the drafter was trained on prompts of this form: {name}"
        attempt(name, advice, lambda other=other: engine.generate(other, params))
    if subject.reload is not None:
        dtype, reload = subject.reload

        def in_other_dtype() -> list[Result]:
            models, module = reload()
            return subject.engine(module, models).generate(prompts, params)

        try:
            attempt(f"dtype {dtype}", f"use --dtype {dtype}", in_other_dtype)
        except (InputError, MemoryError, jax.errors.JaxRuntimeError) as error:  # the models a second time may not fit
            trials.append(Trial(f"dtype {dtype}", note=f"could not be tried: {str(error).splitlines()[0][:100]}"))
    engine.programs.set_drafter(with_shuffled_weights(drafter))
    attempt("weights shuffled", "", lambda: engine.generate(prompts, params))
    show(None)
    positions = by_position(cycles_of(base))
    vocabulary = expressible(drafter, base)
    verdict = judge(trials, positions, drafter.config, vocabulary)
    return Diagnosis(tuple(trials), positions, drafter.config.max_positions, vocabulary, verdict)


def judge(trials: Sequence[Trial], positions: Sequence[Trial], config: DrafterConfig, vocabulary: float) -> str:
    """The verdict. `trials`: as given first, shuffled weights last."""
    base, *alternatives, shuffled = trials
    better = [trial for trial in alternatives if trial.beats(base)]
    if better:
        best = max(better, key=lambda trial: trial.accepted)
        return f"{best.advice} (acceptance length {base.accepted + 1:.2f} -> {best.accepted + 1:.2f})"
    if not base.beats(shuffled):
        return (
            f"the drafts are no better than with shuffled weights (acceptance length {base.accepted + 1:.2f}, shuffled "
            f"{shuffled.accepted + 1:.2f}): the drafter is untrained, or it belongs to another verifier"
        )
    if vocabulary < POOR_VOCABULARY:
        return (
            f"the draft vocabulary holds only {vocabulary:.0%} of the verifier's tokens on these prompts: train it on more "
            "such text, or with a larger draft vocabulary"
        )
    for near, far in pairwise(positions):
        if near.beats(far) and far.accepted < FALL * near.accepted:
            length = config.max_positions
            return (
                f"acceptance falls with position, from {near.accepted + 1:.2f} at {near.name} to {far.accepted + 1:.2f} at "
                f"{far.name}; the drafter's config gives {length} positions, but check what lengths it was trained on"
            )
    return "nothing tried does better than the drafter as given"


def by_position(cycles: Sequence[Cycle]) -> tuple[Trial, ...]:
    """Acceptance by the anchor's position, in buckets that double; empty ones are left out."""
    buckets: dict[tuple[int, int], list[Cycle]] = {}
    for cycle in cycles:
        start, end = 0, FIRST_BUCKET
        while cycle.position >= end:
            start, end = end, 2 * end
        buckets.setdefault((start, end), []).append(cycle)
    return tuple(Trial.of(f"{start}-{end - 1}", "", buckets[start, end]) for start, end in sorted(buckets))


def expressible(drafter: Drafter, results: Sequence[Result]) -> float:
    """Share of the answers' tokens that the draft vocabulary holds. The answers are the verifier's own, whatever was drafted."""
    ids = target_ids(drafter)
    if ids is None:
        return 1.0
    tokens = np.array([token for result in results for token in result.token_ids])
    return float(np.isin(tokens, np.asarray(ids)).mean())


def cycles_of(results: Sequence[Result]) -> list[Cycle]:
    """Of all rows."""
    return [cycle for result in results for cycle in result.cycles]


def with_taps(drafter: Drafter, taps: tuple[int, ...]) -> Drafter:
    """The drafter, with the same weights, fed from other layers."""
    copy = nnx.merge(*nnx.split(drafter))
    copy.config = replace(copy.config, taps=taps)
    return copy


def with_shuffled_weights(drafter: Drafter) -> Drafter:
    """The drafter with the values of each of its arrays in random order; embedding, head and vocabulary map stay."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(drafter)
    flat = dict(nnx.to_flat_state(state))
    for path, leaf in flat.items():
        if path[0] == "vocabulary" or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        values = np.asarray(leaf[...])
        shuffled = rng.permutation(values.reshape(-1)).reshape(values.shape)
        flat[path] = leaf.replace(jax.device_put(shuffled, leaf[...].sharding))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def other_prompts(subject: Subject) -> list[tuple[str, list[list[int]]]]:
    """The prompts in every other form that the tokenizer has."""
    tokenizer = subject.models.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return []
    forms = [("chat template off" if subject.chat else "chat template on", subject.prompts(not subject.chat))]
    if tokenizer.has_thinking_mode:
        forms += [
            (f"thinking mode {'on' if thinking else 'off'}", subject.prompts(True, thinking))
            for thinking in (True, False)
        ]
    return forms

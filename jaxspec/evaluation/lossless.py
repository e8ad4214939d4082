"""Is greedy output with a drafter that of plain decoding, token by token?

In float32 it must be identical. In bfloat16 a block of K + 1 tokens and a single token go through matrix products of different shapes,
which round differently, so two tokens of nearly equal logits may change places. What is allowed is stated here: at the first difference,
and for every token behind it, the token's logit lies below the verifier's largest by less than

    epsilon = 2^-8 * sqrt(2 L) * max |logit|

bfloat16 keeps 8 bits: each of the 2 L sums along the residual stream (two a layer) rounds by up to 2^-8 of it, and roundings that don't
know of one another add up like a random walk. The judge computes the logits over the whole sequence at once, without the cycle, the
sampling and the buckets under test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import power_of_two
from jaxspec.decoding.result import Result
from jaxspec.evaluation.measure import in_batches
from jaxspec.evaluation.models import Models, OnCompile, Run
from jaxspec.evaluation.scripted import Scripted, constant_table, junk_table, oracle_table
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder
from jaxspec_kernels.implementation import use

SCRIPTED_DRAFTS = 5  # K of scripted drafts where no drafter says one
_SHORTEST = 64  # tokens that the judge runs at least


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves plain decoding's.

    Fields:
        prompt: its number, from 1.
        position: in the answer, from 0.
        plain, token: plain decoding's token there and the run's; None where an answer has ended before.
        gap: by how much the lesser of the two lies below the verifier's largest logit; nan where one has ended.
        epsilon: what is allowed there; 0 in float32.
        worst: the largest gap / epsilon from here to the end of the run's answer; inf where nothing is allowed.
    """

    prompt: int
    position: int
    plain: int | None
    token: int | None
    gap: float
    epsilon: float
    worst: float

    @property
    def excused(self) -> bool:
        """Whether rounding explains it."""
        return self.worst < 1

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, token {self.position + 1} of the answer: plain decoding gives {self.plain}, this run "
            f"{self.token}; logit gap {self.gap:.3g}, allowed {self.epsilon:.3g}"
        )


@dataclass(frozen=True)
class GreedyCheck:
    """One run against plain decoding.

    Fields:
        name: of the run.
        prompts, tokens: compared, in all.
        acceptance_length: of the run, to see that drafts were accepted at all, or were not.
        differences: the first of each prompt that has one.
    """

    name: str
    prompts: int
    tokens: int
    acceptance_length: float
    differences: tuple[Difference, ...]

    @property
    def failure(self) -> Difference | None:
        """The first difference that rounding does not explain."""
        return next((one for one in self.differences if not one.excused), None)


class Judge:
    """The verifier's logits over whole sequences."""

    def __init__(self, decoder: Decoder):
        graphdef, state = nnx.split(decoder)
        self._leaves, treedef = jax.tree.flatten(state)
        self._dtype = decoder.embed.weight[...].dtype
        layers = [layer.attention for layer in decoder.config.layers]
        # Split over devices, plain operations: the compiler splits those by itself.
        kernels = "xla" if len(decoder.embed.weight[...].sharding.device_set) > 1 else None
        bits = 0.0 if self._dtype == jnp.float32 else 2.0**-8
        self._relative = bits * math.sqrt(2 * len(layers))

        def run(leaves: list[jax.Array], tokens: jax.Array, asked: jax.Array) -> tuple[jax.Array, ...]:
            decoder = nnx.merge(graphdef, treedef.unflatten(leaves))
            with use(kernels):
                hidden, _, _ = decoder(tokens, KVCache.empty(layers, 1, tokens.shape[1], self._dtype))

            def one(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
                logits = decoder.logits(at[0][None, None])[0, 0]  # [V]; one position at a time: V is large
                return jnp.max(logits), jnp.max(jnp.abs(logits)), logits[at[1]]

            return jax.lax.map(one, (hidden[0], asked), batch_size=_SHORTEST)

        self._run = jax.jit(run)

        def last(leaves: list[jax.Array], tokens: jax.Array, length: jax.Array) -> jax.Array:
            decoder = nnx.merge(graphdef, treedef.unflatten(leaves))
            with use(kernels):
                hidden, _, _ = decoder(tokens, KVCache.empty(layers, 1, tokens.shape[1], self._dtype))
            return decoder.logits(jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1))[0, 0]

        self._last = jax.jit(last)

    def gaps(self, sequence: Sequence[int], asked: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """By how much each of `asked[t]` (equally many for every t) lies below the largest logit behind the first t + 1 tokens: float32
        [T, n]; and what is allowed there, float32 [T]."""
        padded = self._padded(sequence)
        ids = np.zeros((padded.shape[1], len(asked[0])), np.int32)
        ids[: len(asked)] = asked
        best, size, chosen = (np.asarray(x)[: len(asked)] for x in self._run(self._leaves, padded, ids))
        return best[:, None] - chosen, self._relative * size

    def logits(self, sequence: Sequence[int]) -> jax.Array:
        """float32 [V], what follows the sequence."""
        return self._last(self._leaves, self._padded(sequence), np.int32(len(sequence)))

    def _padded(self, sequence: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, power_of_two(len(sequence), _SHORTEST)), np.int32)
        padded[0, : len(sequence)] = sequence
        return padded


def compare(name: str, plain: Sequence[Result], results: Sequence[Result], judge: Judge) -> GreedyCheck:
    """A run's answers with plain decoding's, both in the order of the prompts."""
    differences = []
    for number, (want, got) in enumerate(zip(plain, results, strict=True), 1):
        if want.token_ids != got.token_ids:
            differences.append(_difference(number, want, got, judge))
    drafting = [result.speculative for result in results if result.speculative is not None]
    cycles = sum(one.cycles for one in drafting)
    return GreedyCheck(
        name=name,
        prompts=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        acceptance_length=1 + sum(one.accepted for one in drafting) / max(cycles, 1),
        differences=tuple(differences),
    )


def check_greedy(
    models: Models,
    runs: Sequence[Run],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch_size: int,
    show: OnCompile,
) -> list[GreedyCheck]:
    """Every drafter, and scripted drafts in its place: oracle (what plain decoding says), junk, and constant (the token that ends an
    answer, where there is one).

    Args:
        models: with the verifier.
        runs: plain decoding first, then the drafters'.
        prompts: token ids.
        params: greedy.
        batch_size: most rows of a batch.
        show: progress.
    """
    judge = Judge(models.verifier.module)
    show("plain")
    plain = runs[0].engine.generate(prompts, params)
    checks = []
    for run in runs[1:]:
        show(run.name)
        checks.append(compare(run.name, plain, run.engine.generate(prompts, params), judge))
    drafts = max((run.engine.programs.plan.drafts for run in runs[1:]), default=SCRIPTED_DRAFTS)
    for kind, results in run_scripted(models, plain, params, batch_size, drafts, show).items():
        checks.append(compare(f"{kind} drafts K={drafts}", plain, results, judge))
    show(None)
    return checks


def run_scripted(
    models: Models, plain: Sequence[Result], params: SamplingParams, batch_size: int, drafts: int, show: OnCompile
) -> dict[str, list[Result]]:
    """The answers with each kind of scripted drafts, in the order of plain decoding's."""
    prompts = [result.prompt_ids for result in plain]
    longest = max(len(result.prompt_ids) + len(result.token_ids) for result in plain)
    shape = (power_of_two(batch_size), longest, drafts)
    constant = models.verifier.eos_ids[0] if models.verifier.eos_ids else 0
    tables: dict[str, Callable[[list[int], int], np.ndarray]] = {
        "oracle": lambda chunk, _: oracle_table([_sequence(plain[index]) for index in chunk], shape),
        "junk": lambda _, number: junk_table(models.config.vocab_size, shape, seed=number),
        "constant": lambda *_: constant_table(constant, shape),
    }
    plan = Plan(drafts=drafts, widths=(drafts,))
    engine = models.engine(Scripted(models.config, np.zeros(shape, np.int32)), plan, max_batch_size=batch_size)
    answers = {}
    for kind, table in tables.items():
        show(f"{kind} drafts")
        found: dict[int, Result] = {}
        for number, chunk in enumerate(in_batches(prompts, batch_size)):
            engine.programs.set_drafter(Scripted(models.config, table(chunk, number)))
            found.update(zip(chunk, engine.generate([prompts[index] for index in chunk], params), strict=True))
        answers[kind] = [found[index] for index in range(len(plain))]
    return answers


def _sequence(result: Result) -> list[int]:
    return [*result.prompt_ids, *result.token_ids]


def _difference(number: int, want: Result, got: Result, judge: Judge) -> Difference:
    pairs = list(zip(want.token_ids, got.token_ids, strict=False))
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if at == len(pairs):  # one is the beginning of the other
        ended = [ids[at] if len(ids) > at else None for ids in (want.token_ids, got.token_ids)]
        return Difference(number, at, ended[0], ended[1], math.nan, 0.0, math.inf)
    plain, token = pairs[at]
    # Behind the difference the answers have nothing to do with one another: the run's own tokens are judged there.
    later = [(other, other) for other in got.token_ids[at + 1 :]]
    before = [(other, other) for other in (*got.prompt_ids[1:], *got.token_ids[:at])]
    gaps, allowed = judge.gaps(_sequence(got)[:-1], [*before, (plain, token), *later])
    gaps, allowed = gaps[len(before) :], allowed[len(before) :]
    gap = gaps.max(axis=1)
    worst = float(np.max(gap / allowed)) if allowed.all() else math.inf
    return Difference(number, at, plain, token, float(gap[0]), float(allowed[0]), worst)

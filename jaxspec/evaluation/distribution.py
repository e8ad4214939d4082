"""Are sampled tokens distributed as the verifier says? A chi-square test of the first two tokens behind one prompt over many seeds.

The first token is tested against the verifier's distribution behind the prompt. The second is tested, for each of the most frequent first
tokens, against the distribution behind the prompt and that token. Statistics and degrees of freedom add up, so there is one p-value.
Tokens that are too rare for the approximation are put together.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import power_of_two
from jaxspec.decoding.sampling import SamplingRows, filter_logits
from jaxspec.drafters.base import Drafter
from jaxspec.errors import InputError
from jaxspec.evaluation.lossless import SCRIPTED_DRAFTS, Judge
from jaxspec.evaluation.models import Models, OnCompile, Run
from jaxspec.evaluation.scripted import Scripted, oracle_table

LEAST_P = 1e-4  # a correct sampler falls below it once in 10,000 checks
LEAST_EXPECTED = 5.0
MOST_FIRST = 8  # first tokens whose successors are tested
LEAST_SECOND = 50  # draws that such a token needs
MOST_ROWS = 256  # of a batch
MOST_LOGITS = 1 << 26  # numbers in a batch's logits: a quarter of a GiB


@dataclass(frozen=True)
class DrawCheck:
    """One run.

    Fields:
        name: of the run.
        draws: answers drawn.
        p: of the test; 0 where a token came out that the verifier excludes.
        cells: degrees of freedom.
        seconds: first tokens behind which the second one was tested.
    """

    name: str
    draws: int
    p: float
    cells: int
    seconds: int

    @property
    def passed(self) -> bool:
        return self.p > LEAST_P


def check_drafters(
    models: Models, runs: Sequence[Run], prompt: Sequence[int], params: SamplingParams, draws: int, show: OnCompile
) -> list[DrawCheck]:
    """Every drafter with greedy and with drawn drafts, and an oracle that drafts plain decoding's likeliest tokens.

    Args:
        models: with the verifier.
        runs: plain decoding first, then the drafters'.
        prompt: token ids.
        params: sampling, not greedy.
        draws: answers for each.
        show: progress.

    Raises:
        InputError: a prompt without room for two tokens, or too few draws to test anything by.
    """
    if len(prompt) + 2 > models.config.max_positions:
        raise InputError(
            f"--draws: the shortest prompt has {len(prompt)} tokens, and two more do not fit {models.config.max_positions}"
        )
    drafts = max((run.engine.programs.plan.drafts for run in runs[1:]), default=SCRIPTED_DRAFTS)
    rows = min(power_of_two(draws), MOST_ROWS)
    while rows > 1 and rows * (drafts + 1) * models.config.vocab_size > MOST_LOGITS:
        rows //= 2
    judge = Judge(models.verifier.module)
    sequence = list(prompt)
    for _ in range(drafts + 1):
        sequence.append(int(judge.logits(sequence).argmax()))
    oracle = Scripted(models.config, oracle_table([sequence] * rows, (rows, len(sequence), drafts)))
    ways: list[tuple[str, Drafter, Plan]] = []
    for run in runs[1:]:
        if run.module is not None:
            plan = run.engine.programs.plan
            ways += [
                (f"{run.name}, {how} drafts", run.module, replace(plan, sample_drafts=how == "drawn"))
                for how in ("greedy", "drawn")
            ]
    ways.append((f"oracle drafts K={drafts}", oracle, Plan(drafts=drafts, widths=(drafts,))))
    checks = []
    for name, module, plan in ways:
        show(f"{name}: {draws} draws")
        engine = models.engine(module, plan, max_batch_size=rows)
        checks.append(check_draws(name, engine, judge, prompt, params, draws))
    show(None)
    return checks


def check_draws(
    name: str, engine: Engine, judge: Judge, prompt: Sequence[int], params: SamplingParams, draws: int
) -> DrawCheck:
    """Draw `draws` answers of two tokens with seeds 0, 1, ... and test them.

    Args:
        name: for the result.
        engine: to test.
        judge: on the same verifier.
        prompt: token ids.
        params: sampling, not greedy.
        draws: how many.

    Raises:
        InputError: too few of them to tell the first token's distribution from any other.
    """
    wanted = _distribution(judge, prompt, params)
    if np.count_nonzero(wanted) > 1 and not _cells(wanted * draws)[1:]:
        raise InputError(
            f"--draws {draws} is too few to test anything: no two tokens are expected {LEAST_EXPECTED:g} times each"
        )
    each = [replace(params, seed=seed, max_new_tokens=2, ignore_eos=True) for seed in range(draws)]
    answers = [result.token_ids for result in engine.generate([prompt] * draws, each)]
    first = Counter(answer[0] for answer in answers)
    tests = [(wanted, first)]
    for token, number in first.most_common(MOST_FIRST):
        if number >= LEAST_SECOND:
            behind = _distribution(judge, [*prompt, token], params)
            tests.append((behind, Counter(answer[1] for answer in answers if answer[0] == token)))
    statistic, cells, possible = 0.0, 0, True
    for distribution, counts in tests:
        value, freedom, fits = chi_square(counts, distribution)
        statistic, cells, possible = statistic + value, cells + freedom, possible and fits
    p = float(jax.scipy.stats.chi2.sf(np.float32(statistic), np.float32(cells))) if cells else 1.0
    return DrawCheck(name, draws, p if possible else 0.0, cells, len(tests) - 1)


def chi_square(counts: Counter[int], p: np.ndarray) -> tuple[float, int, bool]:
    """Statistic, degrees of freedom, and whether only possible tokens came out; p float64 [V]."""
    observed = np.zeros(len(p))
    observed[list(counts)] = list(counts.values())
    expected = p * sum(counts.values())
    cells = _cells(expected)
    found, wanted = (np.array([values[ids].sum() for ids in cells]) for values in (observed, expected))
    statistic = float(np.sum((found - wanted) ** 2 / np.maximum(wanted, 1e-300)))
    return statistic, len(cells) - 1, not observed[p == 0].any()


def _cells(expected: np.ndarray) -> list[np.ndarray]:
    """Token ids in groups that are expected often enough: one each, the rest together, with the rarest of the others if need be."""
    common = sorted(np.flatnonzero(expected >= LEAST_EXPECTED), key=lambda token: -expected[token])
    rest = np.flatnonzero(expected < LEAST_EXPECTED)
    cells = [np.array([token]) for token in common]
    if expected[rest].sum() >= LEAST_EXPECTED or not cells:
        return [*cells, rest]
    return [*cells[:-1], np.append(rest, cells[-1])]


def _distribution(judge: Judge, sequence: Sequence[int], params: SamplingParams) -> np.ndarray:
    rows = SamplingRows.of([params], [0])
    p = jax.nn.softmax(filter_logits(judge.logits(sequence)[None], rows), axis=-1)[0]
    p = np.asarray(p, np.float64)
    return p / p.sum()

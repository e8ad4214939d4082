"""The cycle under drafts that a table says: accepted as far as they are right, and never seen in the output."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from jitted import quick_programs
from scripted_engine import DECODER, PROMPTS, ROWS, SHAPE, VERIFIER, ScriptedEngine, V, oracle, plain_engine, tokens_of
from scripted_engine import K as DRAFTS
from test_cycle import real_drafter

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.evaluation.scripted import constant_table, junk_table

BLOCK = DRAFTS + 1
GREEDY = SamplingParams(max_new_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def plain() -> Engine:
    return plain_engine()


@pytest.fixture(scope="module")
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def answers(plain) -> list[list[int]]:
    """Plain decoding's to PROMPTS, 64 tokens each."""
    return tokens_of(plain.generate(PROMPTS, GREEDY))


def check_unchanged(plain: Engine, scripted: ScriptedEngine, number: int) -> None:
    params = replace(GREEDY, max_new_tokens=number)
    want = tokens_of(plain.generate(PROMPTS, params))
    assert [len(answer) for answer in want] == [number] * ROWS
    tables = {"oracle": oracle(want), "junk": junk_table(V, SHAPE), "constant": constant_table(7, SHAPE)}
    for kind, table in tables.items():
        results = scripted.generate(table, params)
        assert tokens_of(results) == want, kind
        lengths = [result.speculative.acceptance_length for result in results]
        assert min(lengths) > DRAFTS if kind == "oracle" else max(lengths) < 2, kind


def test_oracle_junk_and_constant_drafts_leave_greedy_output_unchanged(plain, scripted):
    check_unchanged(plain, scripted, 64)


@pytest.mark.slow
def test_oracle_junk_and_constant_drafts_leave_256_tokens_unchanged(plain, scripted):
    check_unchanged(plain, scripted, 256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sequences of up to")  # past what the drafters were made for
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "dspark", "dspark not from anchor"])
def test_random_drafters_leave_256_tokens_unchanged(plain, name):
    """`test_cycle.py` has 64 tokens of each."""
    params = replace(GREEDY, max_new_tokens=256)
    engine = Engine(VERIFIER, DECODER, real_drafter(name), Plan(drafts=DRAFTS, widths=(DRAFTS,)), max_batch_size=ROWS)
    assert tokens_of(engine.generate(PROMPTS, params)) == tokens_of(plain.generate(PROMPTS, params))


def test_every_row_accepts_its_own_number(scripted, answers):
    table = oracle(answers)
    for row in range(ROWS):
        wrong = row % BLOCK
        table[row, :, wrong:] = (table[row, :, wrong:] + 1) % V
    results = scripted.generate(table, GREEDY)
    assert tokens_of(results) == answers
    for row, result in enumerate(results):
        accepted = [cycle.accepted for cycle in result.cycles]
        assert accepted[:-1] == [row % BLOCK] * (len(accepted) - 1)
        assert len(accepted) == -(-64 // (row % BLOCK + 1))


def stops(answers: list[list[int]]) -> dict[int, int]:
    """For some rows the index of a token that is in the answer for the first time, at every place of a block between them."""
    found: dict[int, int] = {}
    for row, slot in enumerate((0, 1, 2, 3, DRAFTS - 1, DRAFTS, 0, 2)):
        firsts = [at for at, token in enumerate(answers[row]) if answers[row].index(token) == at and at >= 2 * BLOCK]
        fitting = [at for at in firsts if at % BLOCK == slot]
        if fitting:
            found[row] = fitting[0]
    return found


def test_eos_inside_an_accepted_block_stops_there(plain, scripted, answers):
    """At the first, a middle and the last place of the drafts, and as the bonus token (FAULTS 17)."""
    ends = stops(answers)
    assert {end % BLOCK for end in ends.values()} >= {0, 2, DRAFTS - 1, DRAFTS}
    params = [replace(GREEDY, stop_token_ids=(answers[row][ends[row]],) if row in ends else ()) for row in range(ROWS)]
    results = scripted.generate(oracle(answers), params)
    assert tokens_of(results) == tokens_of(plain.generate(PROMPTS, params))
    for row, end in ends.items():
        assert list(results[row].token_ids) == answers[row][: end + 1]
        assert results[row].finish_reason == "stop"
        last = results[row].cycles[-1]
        assert len(last.tokens) == end % BLOCK + 1
        assert (last.bonus is None) == (end % BLOCK < DRAFTS)


def test_stop_is_tested_before_the_cap(scripted, answers):
    """A stop token as the last allowed one is a stop; one behind the cap is never seen (FAULTS 18)."""
    ends = stops(answers)
    for room, reason in ((1, "stop"), (0, "length")):
        params = [
            replace(GREEDY, stop_token_ids=(answers[row][ends[row]],), max_new_tokens=ends[row] + room)
            if row in ends
            else GREEDY
            for row in range(ROWS)
        ]
        results = scripted.generate(oracle(answers), params)
        for row, end in ends.items():
            assert list(results[row].token_ids) == answers[row][: end + room]
            assert results[row].finish_reason == reason


def test_rows_end_at_their_own_limits_inside_a_block(scripted, answers):
    """Whatever the others still do (FAULTS 56)."""
    limits = (3, 9, 17, 40, 1, 6, 7, 12)
    params = [replace(GREEDY, max_new_tokens=limit) for limit in limits]
    for table in (oracle(answers), junk_table(V, SHAPE)):
        results = scripted.generate(table, params)
        assert tokens_of(results) == [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]
        assert {result.finish_reason for result in results} == {"length"}


def test_drafting_eos_doesnt_end_the_answer(plain, scripted, answers):
    """FAULTS 22."""
    seen = {token for answer in answers for token in answer}
    for eos in (next(token for token in range(V) if token not in seen), answers[0][20]):
        params = replace(GREEDY, stop_token_ids=(eos,))
        want = plain.generate(PROMPTS, params)
        results = scripted.generate(constant_table(eos, SHAPE), params)
        assert tokens_of(results) == tokens_of(want)
        assert [result.finish_reason for result in results] == [result.finish_reason for result in want]


def test_stop_strings_in_a_block_and_across_two(scripted, plain, answers):
    """FAULTS 19. Cycles behind it don't count."""
    decode = plain.tokenizer.decode
    starts = {row: end for row, end in stops(answers).items() if end % BLOCK in (0, 2, DRAFTS)}
    assert {end % BLOCK for end in starts.values()} == {0, 2, DRAFTS}
    for width in (1, 2):  # from the last place of a block, two characters reach into the next
        params = [
            replace(GREEDY, stop=(decode(answers[row][starts[row] :][:width]),)) if row in starts else GREEDY
            for row in range(ROWS)
        ]
        results = scripted.generate(oracle(answers), params)
        assert tokens_of(results) == tokens_of(plain.generate(PROMPTS, params))
        for row, start in starts.items():
            assert list(results[row].token_ids) == answers[row][: start + width]
            assert results[row].text == decode(answers[row][:start])
            assert results[row].finish_reason == "stop"
            assert len(results[row].cycles) == -(-(start + width) // BLOCK)


def test_penalties_act_inside_a_block(plain, scripted):
    """Position by position, as in plain decoding (FAULTS 13)."""
    params = [
        replace(
            GREEDY,
            repetition_penalty=1.3 if row % 3 else 1.0,
            presence_penalty=0.7 * (row % 2),
            frequency_penalty=0.4 * (row % 4),
        )
        for row in range(ROWS)
    ]
    want = tokens_of(plain.generate(PROMPTS, params))
    results = scripted.generate(oracle(want), params)
    assert tokens_of(results) == want
    assert min(result.speculative.acceptance_length for result in results) > DRAFTS
    assert tokens_of(scripted.generate(junk_table(V, SHAPE), params)) == want


def test_top_k_of_one_is_greedy(scripted, answers):
    """Whatever the temperature and the drafts (FAULTS 8)."""
    params = replace(GREEDY, temperature=1.0, top_k=1, seed=3)
    for table in (oracle(answers), junk_table(V, SHAPE)):
        assert tokens_of(scripted.generate(table, params)) == answers


def test_a_sampled_row_doesnt_depend_on_its_neighbours(scripted, answers):
    params = [replace(GREEDY, temperature=0.9, top_p=0.95, seed=row, max_new_tokens=30) for row in range(ROWS)]
    table = oracle(answers)
    want = tokens_of(scripted.generate(table, params))
    other = np.where(np.arange(ROWS)[:, None, None] % 2, junk_table(V, SHAPE), table)
    changed = [replace(each, seed=each.seed + 100 * (row % 2)) for row, each in enumerate(params)]
    got = tokens_of(scripted.generate(other, changed))
    assert got[::2] == want[::2]
    assert got[1::2] != want[1::2]

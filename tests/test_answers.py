"""Rows refilled as answers end, and the verifier's answers to questions as training data."""

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cycle import engine_with, real_drafter
from tiny import END, byte_tokenizer, tiny_config, tiny_decoder

from jaxspec.decoding import refill
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.answers import AnswerCounts, Question, read_questions, write_answers
from jaxspec.training.samples import load_samples

CONFIG = tiny_config()
DECODER = tiny_decoder(CONFIG)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (3, 17, 1, 40, 8, 2, 25, 5, 11)]
# Drawn tokens hit one of these soon, but not at once: answers of 1 to 30 tokens.
ENDS = tuple(range(12))
SAMPLED = {"max_new_tokens": 30, "temperature": 1.0, "seed": 9, "rows": 2}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(CONFIG, DECODER, tokenizer=Tokenizer(byte_tokenizer()), eos_ids=ENDS)


def questions_of(prompts: Sequence[Sequence[int]]) -> list[Question]:
    return [Question(index, {"prompt_ids": list(prompt)}, f"q:{index}") for index, prompt in enumerate(prompts)]


QUESTIONS = questions_of(PROMPTS)


def lines_of(path: Path) -> dict[int, dict[str, Any]]:
    """The answers by index, each of which must be there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory) -> dict[int, dict[str, Any]]:
    """All answers, written by one run."""
    output = tmp_path_factory.mktemp("answers") / "whole.jsonl"
    write_answers(engine, QUESTIONS, output, **SAMPLED)
    return lines_of(output)


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 8), (1.0, 8), (1.0, 1)])
def test_answers_of_refilled_rows_equal_those_of_generate(engine, temperature, share, monkeypatch):
    monkeypatch.setattr(refill, "FRESH_SHARE", share)  # 1: both rows of a batch are refilled together
    params = SamplingParams(max_new_tokens=24, temperature=temperature, top_p=0.95)
    seeds = list(range(len(PROMPTS)))
    wanted = [
        engine.generate([prompt], SamplingParams(max_new_tokens=24, temperature=temperature, top_p=0.95, seed=seed))[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    got = sorted(engine.generate_refilled(PROMPTS, params, seeds, rows=2), key=lambda answer: answer.index)
    assert [answer.index for answer in got] == seeds
    for one, other in zip(got, wanted, strict=True):
        assert (one.prompt_ids, one.token_ids) == (other.prompt_ids, other.token_ids)
        assert one.finish_reason == other.finish_reason


def test_rows_that_end_are_refilled_while_others_go_on(engine, monkeypatch):
    starts: list[int] = []
    real = refill.insert_rows

    def insert(state, fixed, *new):
        starts.append(int((np.asarray(state.finish) == 0).sum()))
        return real(state, fixed, *new)

    monkeypatch.setattr(refill, "insert_rows", insert)
    params = SamplingParams(max_new_tokens=30, temperature=1.0)
    list(engine.generate_refilled(PROMPTS, params, range(len(PROMPTS)), rows=2))
    assert len(starts) == len(PROMPTS) - 2 and max(starts) == 1


def test_prompts_of_unlike_length_get_caches_of_their_own_size(engine):
    prompts = [PROMPTS[0], RNG.integers(0, 256, 300).tolist(), PROMPTS[1]]
    params = SamplingParams(max_new_tokens=4)
    got = list(engine.generate_refilled(prompts, params, [0, 0, 0], rows=2))
    assert [answer.index for answer in got][-1] == 1
    for answer in got:
        (alone,) = engine.generate([prompts[answer.index]], params)
        assert answer.token_ids == alone.token_ids


def test_a_drafter_leaves_the_answers_of_refilled_rows_as_they_are(engine):
    drafting = engine_with(real_drafter("dflash"))
    drafting._eos_ids = ENDS
    params = SamplingParams(max_new_tokens=20)
    seeds = [0] * len(PROMPTS)
    answers = [
        {answer.index: answer.token_ids for answer in made.generate_refilled(PROMPTS, params, seeds, rows=2)}
        for made in (engine, drafting)
    ]
    assert answers[0] == answers[1]


def test_what_refilled_rows_cannot_do_is_refused(engine):
    for params in (SamplingParams(stop=["x"]), SamplingParams(logprobs=1)):
        with pytest.raises(InputError, match="not supported where rows are refilled"):
            engine.generate_refilled(PROMPTS, params, range(len(PROMPTS)))
    assert list(engine.generate_refilled([], SamplingParams(), [])) == []


def test_an_answer_does_not_depend_on_those_made_beside_it(engine, whole, tmp_path):
    write_answers(engine, QUESTIONS[3:6], tmp_path / "a", **{**SAMPLED, "rows": 1})
    assert lines_of(tmp_path / "a") == {index: whole[index] for index in (3, 4, 5)}


def test_the_seed_and_the_index_decide_an_answer(engine, whole, tmp_path):
    write_answers(engine, QUESTIONS[:2], tmp_path / "a", **{**SAMPLED, "seed": 10})
    assert all(lines_of(tmp_path / "a")[index]["token_ids"] != whole[index]["token_ids"] for index in (0, 1))
    same = [Question(index, QUESTIONS[0].item, "") for index in (20, 21)]
    write_answers(engine, same, tmp_path / "b", **SAMPLED)
    first, second = lines_of(tmp_path / "b").values()
    assert first["token_ids"] != second["token_ids"]


def test_a_stopped_run_goes_on_where_it_was(engine, whole, tmp_path):
    output = tmp_path / "answers.jsonl"

    def stop(counts: AnswerCounts) -> None:
        if counts.answered == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(engine, QUESTIONS, output, progress=stop, **SAMPLED)
    before = output.read_bytes()
    assert before.count(b"\n") == 4
    seen: list[tuple[int, int]] = []
    counts = write_answers(
        engine, QUESTIONS, output, progress=lambda counts: seen.append((counts.before, counts.answered)), **SAMPLED
    )
    assert output.read_bytes().startswith(before)
    assert lines_of(output) == whole
    assert (counts.questions, counts.before, counts.answered) == (9, 4, 5)
    assert seen == [(4, number) for number in range(1, 6)]
    assert counts.tokens == sum(len(json.loads(line)["token_ids"]) for line in output.read_bytes().splitlines()[4:])
    again = write_answers(engine, QUESTIONS, output, **SAMPLED)
    assert (again.before, again.answered) == (9, 0) and lines_of(output) == whole


@pytest.mark.parametrize("torn", [1, 10, -1])
def test_a_line_torn_off_by_a_kill_is_dropped_and_made_again(engine, whole, tmp_path, torn):
    output = tmp_path / "answers.jsonl"
    write_answers(engine, QUESTIONS, output, **SAMPLED)
    content = output.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    output.write_bytes(content[: last + torn] if torn > 0 else content[:torn])
    counts = write_answers(engine, QUESTIONS, output, **SAMPLED)
    assert (counts.before, counts.answered) == (8, 1)
    assert output.read_bytes() == content and lines_of(output) == whole


def test_answers_say_how_they_ended(engine, whole, tmp_path):
    assert {line["finish_reason"] for line in whole.values()} == {"stop", "length"}
    for line in whole.values():
        assert (line["token_ids"][-1] in ENDS) == (line["finish_reason"] == "stop")
        assert (len(line["token_ids"]) == 30) >= (line["finish_reason"] == "length")
    counts = write_answers(engine, QUESTIONS, tmp_path / "a", **SAMPLED)
    assert counts.cut == sum(line["finish_reason"] == "length" for line in whole.values())
    assert str(counts) == f"9 of 9 questions answered; {counts.tokens} tokens; {counts.cut} cut at the limit"


def test_answers_are_training_samples(engine, whole, tmp_path):
    output = tmp_path / "answers.jsonl"
    write_answers(engine, QUESTIONS, output, **SAMPLED)
    samples, _ = load_samples([str(output)], None, vocab_size=259, eos_ids=ENDS, max_tokens=100)
    order = [json.loads(line)["index"] for line in output.read_text().splitlines()]
    for sample, index in zip(samples, order, strict=True):
        answer = whole[index]
        assert sample.tokens.tolist() == PROMPTS[index] + answer["token_ids"]
        assert sample.tokens[sample.loss_mask].tolist() == answer["token_ids"]


def test_a_file_with_answers_to_other_questions_is_refused(engine, tmp_path):
    output = tmp_path / "answers.jsonl"
    write_answers(engine, QUESTIONS[:1], output, **SAMPLED)
    with pytest.raises(InputError, match=r"answers\.jsonl:1 answers another question 0; give a new file"):
        write_answers(engine, questions_of([[1, 2]]), output, **SAMPLED)
    output.write_text('{"text": "no answer"}\n')
    with pytest.raises(InputError, match=r"answers\.jsonl:1 is no answer"):
        write_answers(engine, QUESTIONS, output, **SAMPLED)
    for content in ('{"keep": "me"}', "notes", '{"index": [0], "prompt_ids": [1]}\n'):
        output.write_text(content)
        with pytest.raises(InputError, match=r"answers\.jsonl:1 is no answer"):
            write_answers(engine, QUESTIONS, output, **SAMPLED)
        assert output.read_text() == content


def test_a_file_made_in_another_way_is_refused(engine, tmp_path):
    """Another temperature, top-p, top-k, seed, limit or verifier would mix two kinds of answers in one file."""
    output = tmp_path / "answers.jsonl"
    made = {**SAMPLED, "verifier": "one"}
    write_answers(engine, QUESTIONS[:1], output, **made)
    before = output.read_bytes()
    for name, value in {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 8,
        "max_new_tokens": 31,
        "verifier": "b",
    }.items():
        with pytest.raises(InputError, match=rf"answers\.jsonl:1 was made with {name} .*, and {value} is asked for"):
            write_answers(engine, QUESTIONS[:2], output, **{**made, name: value})
    assert output.read_bytes() == before
    old = {name: value for name, value in json.loads(before).items() if name != "made_with"}
    output.write_text(json.dumps(old) + "\n")  # as earlier versions wrote them
    assert write_answers(engine, QUESTIONS[:1], output, **{**made, "seed": 8}).before == 1


def test_two_runs_do_not_write_to_one_file(engine, tmp_path):
    output = tmp_path / "answers.jsonl"
    with output.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing to it"):
            write_answers(engine, QUESTIONS, output, **SAMPLED)
    with pytest.raises(InputError, match="No such file or directory"):
        write_answers(engine, QUESTIONS, tmp_path / "gone" / "answers.jsonl", **SAMPLED)


def test_questions_without_room_for_an_answer_are_counted(engine, tmp_path):
    counts = write_answers(engine, QUESTIONS, tmp_path / "a", **SAMPLED, max_tokens=35)
    assert counts.skipped == {"longer than 5 tokens": 5}
    assert set(lines_of(tmp_path / "a")) == {index for index, prompt in enumerate(PROMPTS) if len(prompt) <= 5}
    with pytest.raises(InputError, match=r"there is no question to answer; .*9 \(longer than 0 tokens\)"):
        write_answers(engine, QUESTIONS, tmp_path / "b", **SAMPLED, max_tokens=30)


def test_questions_come_from_every_form_of_line(tmp_path):
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1."}]
    source = written(
        tmp_path / "q.jsonl",
        {"messages": [*turns, {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2."}]},
        {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1."}]},
        {"messages": turns[1:]},
        {"question": "One?", "answer": "1."},
        {"task_id": 1, "prompt": "def one():", "canonical_solution": "return 1"},
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"prompt_ids": [1, 2], "token_ids": [3]},
        {"prompt": " "},
    )
    questions, counts = read_questions([source])
    asked = [{"role": "user", "content": text} for text in ("One?", "def one():")]
    assert [question.item for question in questions] == [
        {"messages": [*turns, {"role": "user", "content": "Two?"}]},
        {"messages": turns[:1]},
        {"messages": asked[:1]},
        {"messages": asked[1:]},
        {"messages": asked[:1]},
        {"prompt_ids": [1, 2]},
    ]
    assert [question.index for question in questions] == [0, 1, 3, 4, 5, 6]
    assert questions[2].source == f"{source}:4"
    assert counts.skipped == {"a conversation without a question": 1, "an empty prompt": 1}
    plain, _ = read_questions([source], chat=False, limit=4)
    assert [question.item for question in plain][2:] == [{"prompt": "One?"}]
    (first, *_), _ = read_questions([source], system="Be brief.", limit=1)
    assert first.item["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "Once."}, r"q\.jsonl:1 holds no question; it must have messages"),
        ({"turns": []}, r"q\.jsonl:1: turns is \[\]; it must be a list of texts"),
        ({"prompt_ids": "1"}, r"q\.jsonl:1: prompt_ids is '1'"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, said):
    with pytest.raises(InputError, match=said):
        read_questions([written(tmp_path / "q.jsonl", line)])


def test_questions_go_through_the_chat_template(engine, tmp_path):
    questions, counts = read_questions([written(tmp_path / "q.jsonl", {"question": "One?"})])
    write_answers(engine, questions, tmp_path / "a", max_new_tokens=1, rows=1, counts=counts)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    (line,) = lines_of(tmp_path / "a").values()
    assert tokenizer.decode_exactly(line["prompt_ids"]) == f"<|user|>One?{END}<|assistant|>"
    bare = Engine(CONFIG, DECODER, tokenizer=Tokenizer(byte_tokenizer(chat=False)))
    with pytest.raises(InputError, match=r"q\.jsonl:1: messages need a chat template"):
        write_answers(bare, questions, tmp_path / "b", max_new_tokens=1)

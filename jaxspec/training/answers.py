"""The verifier's own answers to questions, to train its drafters on: what a drafter has to guess is what the verifier says."""

import fcntl
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.errors import InputError
from jaxspec.evaluation.prompt_sets import encode
from jaxspec.prompts import PromptItem, apply_chat
from jaxspec.training.sources import (
    PROMPT_FIELDS,
    Record,
    Unusable,
    conversation,
    read_records,
    text_field,
    token_field,
)

ROWS = 32
_BEGINNING = b'{"index": '  # of a line of answers


@dataclass(frozen=True)
class Question:
    """A prompt to answer.

    Fields:
        index: number of its line, over all sources, from 0.
        item: one of the forms of a prompt.
        source: where it stands, such as "questions.jsonl:12".
    """

    index: int
    item: PromptItem
    source: str


@dataclass
class AnswerCounts:
    """How far the answers are.

    Fields:
        questions: to be answered in all.
        before: answered by earlier runs.
        answered: by this run.
        tokens: in this run's answers.
        cut: answers of this run that ended at the limit; they are kept, with the finish reason "length".
        skipped: questions that are left out, by reason.
    """

    questions: int = 0
    before: int = 0
    answered: int = 0
    tokens: int = 0
    cut: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count one that is left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"{self.before + self.answered:,} of {self.questions:,} questions answered"]
        if self.before:
            parts.append(f"{self.before:,} of them before")
        parts.append(f"{self.tokens:,} tokens")
        if self.cut:
            parts.append(f"{self.cut:,} cut at the limit")
        if self.skipped:
            reasons = ", ".join(f"{number:,} ({reason})" for reason, number in sorted(self.skipped.items()))
            parts.append(f"left out: {reasons}")
        return "; ".join(parts)


def read_questions(
    sources: Sequence[str], *, chat: bool = True, system: str | None = None, limit: int | None = None
) -> tuple[list[Question], AnswerCounts]:
    """The questions of files of JSON lines or hub datasets.

    A line is one of the forms of `samples.load_samples`, whose answer is left out: a conversation ends behind its last user message. It may
    also be `prompt_ids` alone, a prompt or question without an answer, or `turns`, of which the first is taken.

    Args:
        sources: as for `load_samples`.
        chat: put single prompts through the chat template as a user's message.
        system: message that begins every conversation that does not begin with one.
        limit: most lines to read.

    Returns:
        The questions, and counts of the lines that hold none.

    Raises:
        InputError: a line that is not as it should be, named by file and number.
    """
    questions, counts = [], AnswerCounts()
    lines = ((where, record) for source in sources for where, record in read_records(source))
    for index, (where, record) in enumerate(lines):
        if index == limit:
            break
        try:
            (item,) = apply_chat([_item(record, where)], chat, system)
            questions.append(Question(index, item, where))
        except Unusable as reason:
            counts.skip(str(reason))
    return questions, counts


def write_answers(
    engine: Engine,
    questions: Sequence[Question],
    output: Path,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    rows: int = ROWS,
    max_tokens: int | None = None,
    thinking: bool | None = None,
    verifier: str | None = None,
    counts: AnswerCounts | None = None,
    progress: Callable[[AnswerCounts], None] | None = None,
) -> AnswerCounts:
    """Answer the questions that `output` does not answer yet.

    Each answer is a line `{"index", "prompt_ids", "token_ids", "finish_reason", "made_with"}`, written as soon as it has ended: a run that
    is stopped, by kill -9 even, goes on where it was, but for the answers that were under way. Lines that are there must have been made
    with the same verifier, seed, limit and sampling; what a line doesn't say, as older ones don't, is not compared. An answer depends on
    its question, index and seed, not on when and beside which others it is made. Questions that need caches of like size come in random
    order.

    Args:
        engine: with the verifier; a drafter only makes it faster.
        questions: as `read_questions` gives them.
        output: a file of JSON lines, begun or continued.
        max_new_tokens, temperature, top_p, top_k: as in `SamplingParams`.
        seed: of all answers, 0 .. 2**32 - 1.
        rows: answers made together.
        max_tokens: longest prompt and answer together; questions that leave no room for max_new_tokens are left out. None takes the
            model's longest sequence.
        thinking: the chat template's thinking mode; None leaves it to the template.
        verifier: what tells the verifier from others; None is not compared.
        counts: of `read_questions`, to go on with.
        progress: called after every answer.

    Raises:
        InputError: no question can be answered; the output cannot be written, is being written by another run, or holds answers to other
            questions or made in another way.
    """
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}; it must be from 0 to 2**32 - 1")
    if rows < 1:
        raise InputError(f"rows is {rows}; it must be at least 1")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    made_with = {
        "verifier": verifier,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    counts = counts or AnswerCounts()
    room = min(max_tokens or engine.config.max_positions, engine.config.max_positions) - max_new_tokens
    prompts = _prompts(engine, questions, thinking, room, counts)
    counts.questions = len(prompts)
    if not prompts:
        raise InputError(f"there is no question to answer; {counts}")
    try:
        with output.open("ab+") as file:
            done = _done(file, output, prompts, made_with)
            counts.before = len(done)
            # A run that is stopped early leaves a random part of the answers.
            order = sorted(prompts.keys() - done, key=lambda index: zlib.crc32(f"{seed} {index}".encode()))
            answers = engine.generate_refilled(
                [prompts[index] for index in order], params, [(seed << 32) + index for index in order], rows
            )
            for answer in answers:
                line = {
                    "index": order[answer.index],
                    "prompt_ids": answer.prompt_ids,
                    "token_ids": answer.token_ids,
                    "finish_reason": answer.finish_reason,
                    "made_with": made_with,
                }
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                counts.answered += 1
                counts.tokens += len(answer.token_ids)
                counts.cut += answer.finish_reason == "length"
                if progress is not None:
                    progress(counts)
    except OSError as error:
        raise InputError(f"{output}: {error.strerror or error}") from error
    return counts


def _item(record: Record, where: str) -> PromptItem:
    if "prompt_ids" in record:
        ids = token_field(record, "prompt_ids", None, where)
        if not ids:
            raise Unusable("an empty prompt")
        return {"prompt_ids": ids}
    messages = conversation(record, where)
    if messages is not None:
        end = max((at for at, message in enumerate(messages, 1) if message["role"] == "user"), default=0)
        if not end:
            raise Unusable("a conversation without a question")
        return {"messages": messages[:end]}
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise InputError(f"{where}: turns is {turns!r}; it must be a list of texts")
        prompt = turns[0]
    else:
        prompt = text_field(record, PROMPT_FIELDS, where)
    if prompt is None:
        raise InputError(f"{where} holds no question; it must have messages, conversations, prompt, question or turns")
    if not prompt.strip():
        raise Unusable("an empty prompt")
    return {"prompt": prompt}


def _prompts(
    engine: Engine, questions: Sequence[Question], thinking: bool | None, room: int, counts: AnswerCounts
) -> dict[int, list[int]]:
    """Token ids of the prompts that leave room, by index."""
    prompts = {}
    for question in questions:
        try:
            (ids,) = encode(engine.tokenizer, [question.item], thinking)
        except InputError as error:
            if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
                raise InputError(f"{question.source}: {error}") from error
            counts.skip("the chat template refuses the conversation")
            continue
        if len(ids) > room:
            counts.skip(f"longer than {room} tokens")
        else:
            prompts[question.index] = ids
    return prompts


def _done(file: BinaryIO, path: Path, prompts: Mapping[int, list[int]], made_with: Mapping[str, Any]) -> set[int]:
    """Indexes that the file answers. A line that was torn off at its end is removed; no other run can write while the file is open."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed, by a crash too
    except BlockingIOError as error:
        raise InputError(f"{path}: another run is writing to it") from error
    file.seek(0)
    done: set[int] = set()
    whole = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
            break  # torn off
        whole += len(line)
        try:
            answer: dict[str, Any] = json.loads(line)
            index, prompt = answer["index"], answer["prompt_ids"]
            if type(index) is not int:
                raise TypeError(index)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number} is no answer; give a file of answers or a new one") from error
        for name, value in (answer.get("made_with") or {}).items():
            wanted = made_with.get(name)
            if None not in (value, wanted) and value != wanted:
                raise InputError(
                    f"{path}:{number} was made with {name} {value}, and {wanted} is asked for; give a new file"
                )
        if prompts.get(index, prompt) != prompt:
            raise InputError(f"{path}:{number} answers another question {index}; give a new file")
        if index in prompts:
            done.add(index)
    file.truncate(whole)
    return done

"""Training samples: token ids and which of them are supervised, from conversations, pairs, texts or token ids."""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.sources import (
    ANSWER_FIELDS,
    PROMPT_FIELDS,
    Message,
    Record,
    Unusable,
    conversation,
    read_records,
    text_field,
    token_field,
)
from jaxspec.training.turns import chat_turns, join_turns, plain_turn

_FORMS = "messages, conversations, prompt or question with response or answer, text, prompt_ids with token_ids"


@dataclass(frozen=True, eq=False)
class Sample:
    """One document to train on.

    Fields:
        tokens: int32 [n].
        loss_mask: bool [n], whether the token is one that the drafter shall learn to predict.
        source: where it comes from, such as "answers.jsonl:12"; "answers.jsonl:12#2" is the second sample of that line.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    source: str


@dataclass
class Counts:
    """What became of the lines.

    Fields:
        lines: read.
        samples: made of them; a conversation can give several.
        tokens: in the samples.
        supervised: tokens of those that are supervised.
        truncated: samples that lost their end to max_tokens.
        skipped: lines, or single answers in them, that were left out, by reason.
    """

    lines: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count one that is left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        """One line for people."""
        parts = [
            f"{self.samples:,} samples of {self.lines:,} lines",
            f"{self.tokens:,} tokens, {self.supervised:,} supervised",
        ]
        if self.truncated:
            parts.append(f"{self.truncated:,} cut at the longest length")
        if self.skipped:
            parts.append(f"left out: {self._reasons()}")
        return "; ".join(parts)

    def _reasons(self) -> str:
        return ", ".join(f"{number:,} ({reason})" for reason, number in sorted(self.skipped.items()))


@dataclass(frozen=True)
class _Rules:
    """What `load_samples` was asked for."""

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_tokens: int
    too_long: str
    min_supervised: int
    thinking: bool | None


def load_samples(
    sources: Sequence[str],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    max_tokens: int,
    too_long: Literal["truncate", "skip"] = "truncate",
    min_supervised: int = 1,
    thinking: bool | None = None,
    limit: int | None = None,
) -> tuple[list[Sample], Counts]:
    """Samples of all lines, in order.

    A line is an object with one of the following; other fields are the data set's own business.
        `messages`: a conversation; assistant messages may hold their thinking in `reasoning_content` or `thinking`.
        `conversations`: the same in ShareGPT's form, `from` and `value`.
        `prompt` or `question` with `response` or `answer`: one question and its answer, through the chat template where there is one.
        `text`: every token is supervised.
        `prompt_ids` with `token_ids`: as `answers.write_answers` writes them; the latter are supervised.

    Args:
        sources: paths of files of JSON lines, and hub datasets (`sources.read_records`).
        tokenizer: the verifier's; None allows lines of token ids only.
        vocab_size: V of the verifier.
        eos_ids: the verifier's ids that end an answer.
        max_tokens: longest sample.
        too_long: whether longer ones lose their end or are left out.
        min_supervised: samples with fewer supervised tokens are left out.
        thinking: the mode that answers are trained in (`turns.chat_turns`); None takes each in the mode that it shows.
        limit: most lines to read.

    Returns:
        The samples, and what became of the lines.

    Raises:
        InputError: a line that is not as it should be, named by file and number; no usable line at all.
    """
    if too_long not in ("truncate", "skip"):
        raise InputError(f"too_long is {too_long!r}; it must be truncate or skip")
    for name, number in (("max_tokens", max_tokens), ("min_supervised", min_supervised), ("limit", limit)):
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}; it must be at least 1")
    if not sources:
        raise InputError("there is no training data; name at least one file or hub dataset")
    rules = _Rules(tokenizer, vocab_size, tuple(eos_ids), max_tokens, too_long, min_supervised, thinking)
    samples, counts = [], Counts()
    for where, record in (found for source in sources for found in read_records(source)):
        if counts.lines == limit:
            break
        counts.lines += 1
        try:
            samples += _checked(_sequences(record, where, rules, counts), where, rules, counts)
        except Unusable as reason:
            counts.skip(str(reason))
    if not samples:
        what = f"{counts.lines} lines; {counts._reasons()}" if counts.lines else "there are no lines"
        raise InputError(f"{', '.join(sources)}: nothing to train on: {what}")
    return samples, counts


def hold_out(samples: Sequence[Sample], fraction: float, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Training samples, and about `fraction` of all, held out.

    The samples of a line stay together. Its file's name, its number and the seed decide on a line: more data moves none to the other side.

    Raises:
        InputError: a fraction that is not in [0, 1), or so that nothing is left on either side.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}; it must be at least 0 and below 1")
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples:
        line = re.sub(r"#\d+$", "", sample.source).rpartition("/")[2]
        sides[zlib.crc32(f"{seed} {line}".encode()) < fraction * 2**32].append(sample)
    if fraction and not all(sides):
        raise InputError(f"{len(samples)} samples are too few to hold out {fraction} of them")
    return sides


def _sequences(record: Record, where: str, rules: _Rules, counts: Counts) -> list[tuple[list[int], list[bool]]]:
    """Token ids and masks of a line, of any length."""
    if "prompt_ids" in record and "token_ids" in record:
        prompt = token_field(record, "prompt_ids", rules.vocab_size, where)
        answer = token_field(record, "token_ids", rules.vocab_size, where)
        return [([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
    messages = conversation(record, where)
    if messages is not None:
        return _conversation_sequences(messages, _with_tokenizer(rules, where), rules, counts)
    prompt, answer = (text_field(record, names, where) for names in (PROMPT_FIELDS, ANSWER_FIELDS))
    if prompt is not None and answer is not None:
        tokenizer = _with_tokenizer(rules, where)
        if not tokenizer.has_chat_template:
            return join_turns([plain_turn(tokenizer, prompt, answer, rules.eos_ids)])
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return _conversation_sequences(messages, tokenizer, rules, counts)
    text = text_field(record, ["text"], where)
    if text is None:
        raise InputError(f"{where} holds nothing to train on; it must have {_FORMS}")
    tokens = _with_tokenizer(rules, where).encode(text)
    return [(tokens, [True] * len(tokens))]


def _conversation_sequences(
    messages: Sequence[Message], tokenizer: Tokenizer, rules: _Rules, counts: Counts
) -> list[tuple[list[int], list[bool]]]:
    if all(message["role"] != "assistant" for message in messages):
        raise Unusable("a conversation without an answer")
    return join_turns(chat_turns(tokenizer, messages, rules.eos_ids, rules.thinking, counts.skip))


def _with_tokenizer(rules: _Rules, where: str) -> Tokenizer:
    if rules.tokenizer is None:
        raise InputError(f"{where} is text, and the model has no tokenizer; give prompt_ids and token_ids")
    return rules.tokenizer


def _checked(
    sequences: Sequence[tuple[list[int], list[bool]]], where: str, rules: _Rules, counts: Counts
) -> Iterator[Sample]:
    """Those that can be trained on; the others are counted."""
    for number, (ids, marks) in enumerate(sequences, 1):
        tokens, mask = np.array(ids, np.int32), np.array(marks, bool)
        if len(tokens) and tokens.max() >= rules.vocab_size:
            raise InputError(
                f"{where}: the tokenizer makes it {tokens.max()}, and the model's ids run from 0 to {rules.vocab_size - 1}; "
                "give the model's own tokenizer"
            )
        if len(tokens) > rules.max_tokens and rules.too_long == "skip":
            counts.skip(f"longer than {rules.max_tokens} tokens")
            continue
        if not mask.any():
            counts.skip("no answer token")
            continue
        cut = tokens[: rules.max_tokens], mask[: rules.max_tokens]
        if cut[1].sum() < rules.min_supervised:
            fewer = f"fewer than {rules.min_supervised} answer token{'s' if rules.min_supervised > 1 else ''}"
            late = mask.sum() >= rules.min_supervised
            counts.skip(f"{fewer} in the first {rules.max_tokens}" if late else fewer)
            continue
        if len(cut[0]) < 2:
            counts.skip("a single token")
            continue
        counts.samples += 1
        counts.tokens += len(cut[0])
        counts.supervised += int(cut[1].sum())
        counts.truncated += len(cut[0]) < len(tokens)
        yield Sample(*cut, where if number == 1 else f"{where}#{number}")

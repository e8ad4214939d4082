"""Where training data comes from: files of JSON lines and hub datasets, and the forms that their lines have."""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.tokenizer import REASONING_FIELDS

HUB_PREFIX = "hub:"
PROMPT_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("response", "answer")

Record = Mapping[str, Any]
Message = dict[str, Any]

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}


class Unusable(Exception):
    """A line, or an answer in it, that is well-formed but cannot be trained on; its text is the reason, the same for all of a kind."""


def read_records(source: str) -> Iterator[tuple[str, Record]]:
    """The objects of a source, each with where it stands, such as "answers.jsonl:12"; blank lines are skipped.

    `source` is the path of a file of JSON lines, or "hub:ORG/NAME", "hub:ORG/NAME:SPLIT" or "hub:ORG/NAME:CONFIG:SPLIT" for a dataset of
    the Hugging Face hub, read with the package datasets. The split is "train" unless given.

    Raises:
        InputError: naming the file, and the line where there is one.
    """
    if source.startswith(HUB_PREFIX):
        yield from _hub_records(source)
        return
    path = Path(source)
    try:
        file = path.open("rb")
    except OSError as error:
        hint = "" if path.suffix == ".jsonl" else f"; a hub dataset is written {HUB_PREFIX}ORG/NAME"
        raise InputError(f"{source}: {error.strerror}{hint}") from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{source}:{number}"
                yield where, _present(_object(line, where))


def conversation(record: Record, where: str) -> list[Message] | None:
    """The messages of a record, from `messages` or from ShareGPT's `conversations`; None where it has neither.

    Every message has a role and a text as its content; other fields stay.

    Raises:
        InputError: a field that is not what it should be.
        Unusable: content that is no text, tool calls, a speaker that is neither user nor assistant nor system.
    """
    if "messages" in record:
        return [_message(message, where) for message in _listed(record, "messages", where)]
    if "conversations" in record:
        return [_shared(turn, where) for turn in _listed(record, "conversations", where)]
    return None


def text_field(record: Record, names: Sequence[str], where: str) -> str | None:
    """The text of the first of the fields that is there; None where there is none of them.

    Raises:
        InputError: it is no text.
    """
    for name in names:
        if name in record:
            if not isinstance(record[name], str):
                raise InputError(f"{where}: {name} is {_short(record[name])}; it must be a text")
            return record[name]
    return None


def whole_text(record: Record, where: str) -> str:
    """All that a record says, from any of its forms, a line break between messages, or between prompt and answer.

    Raises:
        InputError: it says nothing.
        Unusable: as `conversation`.
    """
    messages = conversation(record, where)
    if messages is not None:
        return "\n".join(message["content"] for message in messages)
    parts = [text_field(record, names, where) for names in (PROMPT_FIELDS, ANSWER_FIELDS, ("text",))]
    said = [part for part in parts if part is not None]
    if not said:
        raise InputError(
            f"{where} holds no text; it must have messages, conversations, prompt, question, response, answer or text"
        )
    return "\n".join(said)


def token_field(record: Record, name: str, vocab_size: int | None, where: str) -> list[int]:
    """A list of token ids.

    Raises:
        InputError: it is none, or holds an id that a vocabulary of `vocab_size` does not have.
    """
    ids = record[name]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{where}: {name} is {_short(ids)}; it must be a list of token ids")
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise InputError(f"{where}: {name} holds {max(ids)}; the model's ids run from 0 to {vocab_size - 1}")
    return ids


def _object(line: bytes, where: str) -> Record:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not text: byte {error.start + 1} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise InputError(f"{where} is nested too deeply") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} is {_short(value)}; it must be a JSON object")
    return value


def _hub_records(source: str) -> Iterator[tuple[str, Record]]:
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) > 2:
        raise InputError(
            f"{source}: must be {HUB_PREFIX}ORG/NAME, {HUB_PREFIX}ORG/NAME:SPLIT or one with :CONFIG:SPLIT"
        )
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    try:
        datasets = importlib.import_module("datasets")  # optional: only hub datasets need it
    except ImportError as error:
        raise InputError(f"{source}: hub datasets need the package datasets; pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # no network, no such dataset, configuration or split: each its own kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source} cannot be loaded: {reason}") from error
    for number, row in enumerate(rows, 1):
        yield f"{source}:{number}", _present(row)


def _present(fields: Mapping[str, Any]) -> Record:
    """Without null fields, which tables have where a line lacks a field."""
    return {key: value for key, value in fields.items() if value is not None}


def _listed(record: Record, name: str, where: str) -> list[Any]:
    value = record[name]
    if not isinstance(value, list):
        raise InputError(f"{where}: {name} is {_short(value)}; it must be a list")
    if not value:
        raise Unusable("an empty conversation")
    return value


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"{where}: a message is {_short(message)}; it must be an object with a role and a content")
    if message.get("tool_calls") or message["role"] in ("tool", "function"):
        raise Unusable("tool calls")
    if not isinstance(message.get("content"), str):
        raise Unusable("a message whose content is no text")
    return dict(_present(message))


def _shared(turn: object, where: str) -> Message:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
        raise InputError(f"{where}: a turn is {_short(turn)}; it must be an object with from and value")
    role = _SPEAKERS.get(turn["from"].lower())
    if role is None:
        raise Unusable("a turn that is neither system's, human's nor gpt's")
    if not isinstance(turn.get("value"), str):
        raise Unusable("a message whose content is no text")
    reasoning = {key: turn[key] for key in REASONING_FIELDS if isinstance(turn.get(key), str)}
    return {"role": role, "content": turn["value"], **reasoning}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

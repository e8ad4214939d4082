"""Where a command's prompts come from: arguments, token ids, a JSON-lines file, stdin. Imports no JAX."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")

PromptItem = Mapping[str, Any]  # exactly one of PROMPT_KEYS


def collect_prompts(texts: Sequence[str], prompt_ids: Sequence[int] | None, file: str | None) -> list[PromptItem]:
    """The prompts in order: arguments, --prompt-ids, --prompt-file; stdin where there is none of these and stdin is not a terminal.

    Raises:
        InputError: no prompt at all, an empty one, or a file that is not what it should be.
    """
    items: list[PromptItem] = []
    for number, text in enumerate(texts, 1):
        items.append(checked_item({"prompt": text}, f"PROMPT {number}"))
    if prompt_ids is not None:
        items.append(checked_item({"prompt_ids": prompt_ids}, "--prompt-ids"))
    if file is not None:
        items.extend(read_prompt_file(Path(file)))
    if not texts and prompt_ids is None and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give PROMPT, --prompt-file, --prompt-ids, or text on stdin")
        text = _text(sys.stdin.buffer.read(), "stdin", "text")
        items.append(checked_item({"prompt": text.removesuffix("\n")}, "stdin"))
    return items


def read_prompt_file(path: Path) -> list[PromptItem]:
    """Read JSON lines, each an object with exactly one of "prompt", "messages", "prompt_ids"; blank lines are skipped.

    Raises:
        InputError: naming the file, and the line where there is one.
    """
    return [checked_item(item, where) for where, item in read_lines(path, "--prompt-file")]


def read_lines(path: Path, flag: str) -> list[tuple[str, object]]:
    """The values of a file of JSON lines, each with where it stands; blank lines are skipped.

    Raises:
        InputError: naming the flag and the file, and the line where there is one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error
    items = []
    for number, line in enumerate(_text(content, f"{flag} {path}", "JSON lines").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{flag} {path}, line {number}"
        try:
            items.append((where, json.loads(line)))
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error
        except ValueError as error:
            raise InputError(f"{where} is not JSON: {error}") from error
        except RecursionError as error:
            raise InputError(f"{where} is nested too deeply") from error
    if not items:
        raise InputError(f"{flag} {path} is empty; it must hold one JSON object a line")
    return items


def apply_chat(items: Sequence[PromptItem], chat: bool, system: str | None) -> list[PromptItem]:
    """Make text prompts conversations where `chat` is on, each begun by the system message where one is given.

    Conversations from a file get the system message unless they begin with one of their own.

    Raises:
        InputError: a system message that a prompt has no place for.
    """
    if system is not None and not chat:
        raise InputError("--system needs the chat template, which is off or which this model does not have")
    opening = [] if system is None else [{"role": "system", "content": system}]
    prompts: list[PromptItem] = []
    for item in items:
        if "prompt_ids" in item:
            if system is not None:
                raise InputError("--system has no place in a prompt of token ids; leave one of them out")
            prompts.append(item)
        elif "messages" in item:
            own = item["messages"]
            prompts.append({"messages": own if own[0]["role"] == "system" else [*opening, *own]})
        elif chat:
            prompts.append({"messages": [*opening, {"role": "user", "content": item["prompt"]}]})
        else:
            prompts.append(item)
    return prompts


def check_messages(messages: object) -> None:
    """Refuse what is no conversation of text messages.

    Raises:
        InputError: naming the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"message {number} has no role; every message must have a role and a content")
        if not isinstance(message.get("content"), str):
            raise InputError(f"message {number} has no text as its content; images and other parts are not supported")
        check_text(message["role"] + message["content"], f"message {number}")


def check_text(text: str, where: str) -> None:
    """Refuse text that is no Unicode: half a surrogate pair, which JSON can hold, or bytes of the command line that are not UTF-8.

    Raises:
        InputError: naming `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is not text: character {error.start + 1} is {text[error.start]!a}, no character at all"
        ) from error


def _text(content: bytes, where: str, wanted: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not text: byte {error.start + 1} is not UTF-8; it must be {wanted}") from error


def checked_item(item: object, where: str) -> PromptItem:
    """Refuse an item that is not an object with exactly one known key of the right kind."""
    if not isinstance(item, dict):
        raise InputError(f"{where} is no JSON object; it must be one with one of the keys {', '.join(PROMPT_KEYS)}")
    unknown = sorted(set(item) - set(PROMPT_KEYS))
    if unknown:
        raise InputError(f"{where} has the unknown key {unknown[0]!r}; known keys: {', '.join(PROMPT_KEYS)}")
    if len(item) != 1:
        raise InputError(f"{where} has {len(item)} keys; it must have exactly one of {', '.join(PROMPT_KEYS)}")
    ((key, value),) = item.items()
    if key == "messages":
        try:
            check_messages(value)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    elif key == "prompt":
        if not isinstance(value, str):
            raise InputError(f"{where}: prompt is {value!r}; it must be a string")
        check_text(value, where)
    elif key == "prompt_ids" and not (isinstance(value, list) and all(type(token) is int for token in value)):
        raise InputError(f"{where}: prompt_ids is {value!r}; it must be a list of whole numbers")
    if not value:
        raise InputError(f"{where} is empty; it must hold at least one token")
    return item

"""The prompts of an evaluation: a file of JSON lines, or a named set in a directory. Imports no JAX."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.errors import InputError
from jaxspec.prompts import PROMPT_KEYS, PromptItem, checked_item, read_lines

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer

TEXT_FIELDS = ("question", "turns")  # where data sets keep their prompts, beside PROMPT_KEYS


def set_file(directory: Path, name: str) -> Path:
    """Where the set is: NAME.jsonl in the directory.

    Raises:
        InputError: it isn't there; the message lists what is.
    """
    file = directory / f"{name}.jsonl"
    if file.is_file():
        return file
    if not directory.is_dir():
        raise InputError(f"--data-dir {directory}: no such directory; it must hold {name}.jsonl")
    there = ", ".join(sorted(path.stem for path in directory.glob("*.jsonl"))) or "none"
    raise InputError(f"--set {name}: no such set in --data-dir {directory}; sets there: {there}")


def read_prompts(path: Path, flag: str) -> list[PromptItem]:
    """One prompt a line, from its field `prompt_ids`, `messages`, `turns` (the first turn), `prompt` or `question`, the first that is
    there; other fields are the data set's own business.

    Raises:
        InputError: naming the flag, the file and the line.
    """
    return [_prompt(line, where) for where, line in read_lines(path, flag)]


def spread(items: Sequence[PromptItem], limit: int | None) -> list[PromptItem]:
    """`limit` of the items, evenly spaced over the file, so that every part of a set has its share; all where there are fewer.

    Raises:
        InputError: a limit below 1.
    """
    if limit is None:
        return list(items)
    if limit < 1:
        raise InputError(f"--limit is {limit}; it must be at least 1")
    number = min(limit, len(items))
    return [items[at * len(items) // number] for at in range(number)]


def encode(tokenizer: "Tokenizer | None", items: Sequence[PromptItem], thinking: bool | None = None) -> list[list[int]]:
    """Token ids of each prompt. `thinking`: the chat template's thinking mode; None leaves it to the template.

    Raises:
        InputError: a prompt that is text where the model has no tokenizer, or that the chat template refuses.
    """
    return [_encode(tokenizer, item, f"prompt {number}", thinking) for number, item in enumerate(items, 1)]


def _encode(tokenizer: "Tokenizer | None", item: PromptItem, where: str, thinking: bool | None) -> list[int]:
    if "prompt_ids" in item:
        return list(item["prompt_ids"])
    if tokenizer is None:
        raise InputError(f"{where} is text, and the model has no tokenizer; give prompt_ids")
    return tokenizer.encode_chat(item["messages"], thinking) if "messages" in item else tokenizer.encode(item["prompt"])


def _prompt(line: object, where: str) -> PromptItem:
    fields = line if isinstance(line, Mapping) else {}
    for key in ("prompt_ids", "messages", "turns", "prompt", "question"):
        if key not in fields:
            continue
        value = fields[key]
        if key == "turns":
            if not isinstance(value, list) or not value:
                raise InputError(f"{where}: turns is {value!r}; it must be a list of texts")
            value = value[0]
        return checked_item({"prompt" if key in TEXT_FIELDS else key: value}, where)
    known = ", ".join((*PROMPT_KEYS, *TEXT_FIELDS))
    raise InputError(f"{where} holds no prompt; it must be an object with one of the fields {known}")

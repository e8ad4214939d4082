"""Which token ids end a text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.safetensors import read_json
from jaxspec.errors import InputError


def eos_ids(directory: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The ids of `generation_config.json`, `config.json` (with its `text_config`) and the tokenizer together,
    ascending.

    Chat models end a turn with a token that often stands in only one of the three.
    """
    found: set[int] = set()
    generation = directory / "generation_config.json"
    if generation.is_file():
        found.update(_ids(read_json(generation), generation))
    where = directory / "config.json"
    found.update(_ids(hf_config, where))
    text = hf_config.get("text_config")
    if isinstance(text, dict):
        found.update(_ids(text, where))
    try:
        found.update(_tokenizer_ids(directory))
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"{directory}: tokenizer_config.json or tokenizer.json is damaged: {error}") from error
    return tuple(sorted(found))


def _ids(data: dict[str, Any], where: Path) -> Iterable[int]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in ids):
        raise InputError(f"{where}: eos_token_id is {value!r}; a token id or a list of them is wanted")
    return ids


def _tokenizer_ids(directory: Path) -> set[int]:
    """The id of the tokenizer's `eos_token`: its config names the text, the vocabulary the id."""
    config_file = directory / "tokenizer_config.json"
    if not config_file.is_file():
        return set()
    config = read_json(config_file)
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return set()
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == token:
            return {int(key)}
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        return set()
    tokenizer = read_json(tokenizer_file)
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == token:
            return {int(entry["id"])}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and isinstance(vocabulary.get(token), int):
        return {vocabulary[token]}
    return set()

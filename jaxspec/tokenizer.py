"""Text to token ids and back, and the chat template. transformers' tokenizer without its models, so without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.prompts import check_messages

Message = Mapping[str, Any]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        has_chat_template: whether `encode_chat` works.
        has_thinking_mode: whether the template knows a thinking mode (`enable_thinking`) that can be set.
    """

    def __init__(self, tokenizer: Any):
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        self.has_chat_template = tokenizer.chat_template is not None
        self.has_thinking_mode = "enable_thinking" in str(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Plain text, with the special tokens the tokenizer puts round it (a BOS, for some models)."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """A conversation through the chat template, up to where the assistant's answer begins.

        `thinking`: the template's thinking mode; None leaves it to the template.

        Raises:
            InputError: no template, a message without role and text, or a conversation the template refuses.
        """
        if not self.has_chat_template:
            raise InputError("messages need a chat template, and this model's tokenizer has none; give a plain prompt")
        check_messages(messages)
        from jinja2 import TemplateError

        try:
            return list(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **({} if thinking is None else {"enable_thinking": thinking}),
                )
            )
        except TemplateError as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special tokens left out. Bytes that are no whole character show as U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(source: Path) -> Tokenizer | None:
    """The tokenizer of a model directory or a .gguf file; None where a directory holds none.

    Raises:
        InputError: there are tokenizer files, but they cannot be read.
    """
    if source.is_file():
        from jaxspec.checkpoint.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(gguf_tokenizer(source))
    if not any((source / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(source, local_files_only=True))
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: its tokenizer cannot be read: {reason}") from error

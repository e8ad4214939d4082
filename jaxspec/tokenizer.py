"""Text to token ids and back, and the chat template. transformers' tokenizer without its models, so without torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.prompts import check_messages, check_text

Message = Mapping[str, Any]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # as templates name it, the most usual one first
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        has_chat_template: whether `encode_chat` works.
        has_thinking_mode: whether the template knows a thinking mode (`enable_thinking`) that can be set.
        has_answer_marks: whether the template marks what the assistant generates (`{% generation %}`).
        reasoning_field: the field in which the template looks for an assistant message's thinking; None where it looks for none.
        parses_thinking: whether the template itself takes thinking between <think> and </think> out of a message's content.
        special_ids: ids of the special tokens.
    """

    def __init__(self, tokenizer: Any):
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        self.has_chat_template = isinstance(tokenizer.chat_template, str) or "default" in (
            tokenizer.chat_template or ()
        )
        self.has_thinking_mode = "enable_thinking" in template
        self.has_answer_marks = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
        self.reasoning_field = next((key for key in REASONING_FIELDS if re.search(rf"[.'\"]{key}\b", template)), None)
        self.parses_thinking = "</think>" in template
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        """Plain text, with the special tokens the tokenizer puts round it (a BOS, for some models)."""
        check_text(text, "the text")
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """A conversation through the chat template, up to where the assistant's answer begins.

        `thinking`: the template's thinking mode; None leaves it to the template.

        Raises:
            InputError: no template, a message without role and text, or a conversation the template refuses.
        """
        return list(
            self._apply_template(messages, thinking, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def render_chat(self, messages: Sequence[Message], thinking: bool | None = None, prompt: bool = True) -> str:
        """The text of a conversation. `prompt`: with the beginning of the assistant's answer behind it, as `encode_chat` has it.

        Errors: as for `encode_chat`.
        """
        return self._apply_template(messages, thinking, add_generation_prompt=prompt, tokenize=False)

    def encode_rendered(self, text: str) -> list[int]:
        """Text that came out of the chat template: special tokens are read where they stand, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def encode_marked(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[list[int], list[bool]]:
        """A conversation that ends with an answer, and for each token whether the template marks it as generated.

        Errors: as for `encode_chat`.
        """
        encoded = self._apply_template(
            messages, thinking, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _apply_template(self, messages: Sequence[Message], thinking: bool | None, **how: Any) -> Any:
        if not self.has_chat_template:
            raise InputError("messages need a chat template, and this model's tokenizer has none; give a plain prompt")
        check_messages(messages)
        from jinja2 import TemplateError

        mode = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self._tokenizer.apply_chat_template([dict(message) for message in messages], **how, **mode)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from error

    def mask_id(self, vocab_size: int) -> int | None:
        """The id that a drafter's mask slots hold: the tokenizer's own mask token, else its first id that no token has, else the padding
        or end token (SPEC 0.6). vocab_size: V of the model."""
        tokenizer = self._tokenizer
        if tokenizer.mask_token_id is not None:
            return tokenizer.mask_token_id
        if len(tokenizer) < vocab_size:
            return len(tokenizer)
        return next(
            (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) if i is not None), None
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special tokens left out. Bytes that are no whole character show as U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_exactly(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special tokens shown as they are written."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(source: Path) -> Tokenizer | None:
    """The tokenizer of a model directory or a .gguf file; None where a directory holds none.

    Raises:
        InputError: there are tokenizer files, but they cannot be read.
    """
    if not source.is_file() and not any((source / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        if source.is_file():
            from jaxspec.checkpoint.gguf_tokenizer import gguf_tokenizer

            return Tokenizer(gguf_tokenizer(source))
        from transformers import AutoTokenizer

        return Tokenizer(AutoTokenizer.from_pretrained(source, local_files_only=True))
    except InputError:
        raise
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: its tokenizer cannot be read: {reason}") from error

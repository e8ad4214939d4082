"""The answers of a conversation as the model itself would see and generate them: prompt tokens, then answer tokens.

An answer is what the chat template puts behind the prompt that generation starts from (the conversation before it, with the beginning of an
answer): the *prefix difference*, up to and with the token that ends the turn. It needs no marks in the template, and where there are marks
(`{% generation %}`) only what they mark too is supervised. Templates such as Qwen3's write an answer otherwise once it is history (without
its thinking); such answers become sequences of their own.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxspec.errors import InputError
from jaxspec.tokenizer import REASONING_FIELDS, Tokenizer
from jaxspec.training.sources import Message, Unusable

_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)
_EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>")


@dataclass(frozen=True)
class Turn:
    """One answer behind its prompt.

    Fields:
        prompt: ids that generation would start from.
        answer: ids that follow, the token that ends the turn included.
        mask: for each of those, whether it is supervised.
    """

    prompt: list[int]
    answer: list[int]
    mask: list[bool]


def chat_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    eos_ids: Collection[int],
    thinking: bool | None,
    skip: Callable[[str], None],
) -> list[Turn]:
    """The usable answers of a conversation, in order.

    Args:
        tokenizer: with a chat template.
        messages: as `sources.conversation` gives them.
        eos_ids: the first of these ends an answer.
        thinking: the mode that all answers are to be in; None takes each answer in the mode that it shows: with thinking or without.
            With True, answers without thinking are no use where the template has a thinking mode; with False, thinking is left out.
        skip: called with the reason for every answer that is no use.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise InputError(
            "conversations need a chat template, and this model's tokenizer has none; give token ids or text"
        )
    messages = [_told(tokenizer, message, thinking) for message in messages]
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                turns.append(_chat_turn(tokenizer, messages[: index + 1], eos_ids, thinking))
            except Unusable as reason:
                skip(str(reason))
    return turns


def plain_turn(tokenizer: Tokenizer, prompt: str, answer: str, eos_ids: Sequence[int]) -> Turn:
    """Prompt and answer as they are, without a chat template, ended by the first of `eos_ids`.

    Raises:
        Unusable: they cannot be told apart in tokens.
    """
    prompt_ids, answer_ids = _divide(tokenizer, tokenizer.encode, prompt, answer)
    answer_ids = _until_end(tokenizer, answer_ids, eos_ids)
    if eos_ids and (not answer_ids or answer_ids[-1] not in eos_ids):
        answer_ids = [*answer_ids, eos_ids[0]]
    return Turn(prompt_ids, answer_ids, [True] * len(answer_ids))


def join_turns(turns: Sequence[Turn]) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss masks of as few sequences as hold every answer behind exactly its own prompt."""
    joined: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        tokens, mask = joined[-1] if joined else ([], [])
        if not joined or turn.prompt[: len(tokens)] != tokens:
            tokens, mask = [], []
            joined.append((tokens, mask))
        new = turn.prompt[len(tokens) :]
        tokens += [*new, *turn.answer]
        mask += [*[False] * len(new), *turn.mask]
    return joined


def _told(tokenizer: Tokenizer, message: Message, thinking: bool | None) -> Message:
    """An assistant's message with its thinking where the template looks for it, or without where there is to be none."""
    if message["role"] != "assistant":
        return message
    content, reasoning = _parts(tokenizer, message, thinking)
    told = {**{key: value for key, value in message.items() if key not in REASONING_FIELDS}, "content": content}
    if not reasoning:
        return told
    if tokenizer.reasoning_field is None and tokenizer.parses_thinking:
        return {**told, "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
    return {**told, tokenizer.reasoning_field or REASONING_FIELDS[0]: reasoning}


def _parts(tokenizer: Tokenizer, message: Message, thinking: bool | None = None) -> tuple[str, str]:
    """An assistant message's content without its thinking, and the thinking: "" for a model that does not think, or is not to."""
    content = message["content"]
    reasoning = next((message[key] for key in REASONING_FIELDS if isinstance(message.get(key), str)), "")
    thinks = tokenizer.has_thinking_mode or tokenizer.reasoning_field is not None or tokenizer.parses_thinking
    inside = _THINKING.fullmatch(content)
    if inside and (thinks or thinking is False):
        reasoning, content = reasoning or inside[1], inside[2]
    return content, reasoning.strip() if thinks and thinking is not False else ""


def _chat_turn(
    tokenizer: Tokenizer, messages: Sequence[Message], eos_ids: Collection[int], thinking: bool | None
) -> Turn:
    """The last message as an answer to those before it."""
    if len(messages) < 2:
        raise Unusable("an answer to nothing")
    content, reasoning = _parts(tokenizer, messages[-1])
    if not content.strip() and not reasoning:
        raise Unusable("an empty answer")
    mode = thinking
    if tokenizer.has_thinking_mode:
        mode = bool(reasoning) if thinking is None else thinking
        if mode and not reasoning:
            raise Unusable("an answer without thinking, in thinking mode")
    try:
        prompt = tokenizer.render_chat(messages[:-1], mode)
        whole = tokenizer.render_chat(messages, mode, prompt=False)
        marked = tokenizer.encode_marked(messages, mode) if tokenizer.has_answer_marks else None
    except InputError:
        raise Unusable("the chat template refuses the conversation") from None
    answer = whole.removeprefix(prompt)
    if not whole.startswith(prompt) or _EMPTY_THINKING.match(answer):
        # Such a template begins answers in a way that it does not write them down, or puts in empty thinking, which no model generates.
        raise Unusable("the chat template writes the answer otherwise than it would be generated")
    for part, what in ((content.strip(), "content"), (reasoning, "thinking")):
        if part not in answer:
            raise Unusable(f"the chat template leaves out the answer's {what}")
    prompt_ids, answer_ids = _divide(tokenizer, tokenizer.encode_rendered, prompt, answer)
    marks = [True] * len(answer_ids)
    if marked is not None and marked[0] == [*prompt_ids, *answer_ids]:
        marks = marked[1][len(prompt_ids) :]
    answer_ids = _until_end(tokenizer, answer_ids, eos_ids)
    return Turn(prompt_ids, answer_ids, marks[: len(answer_ids)])


def _divide(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]], prompt: str, answer: str
) -> tuple[list[int], list[int]]:
    """Ids of the prompt as generation would see them, and of the answer behind it."""
    prompt_ids, whole = encode(prompt), encode(prompt + answer)
    if whole[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, whole[len(prompt_ids) :]
    # A token reaches over the boundary; generation starts from the prompt's own tokens whatever follows.
    alone = tokenizer.encode_rendered(answer)
    if tokenizer.decode_exactly([*prompt_ids, *alone]) != tokenizer.decode_exactly(whole):
        raise Unusable("prompt and answer share a token")
    return prompt_ids, alone


def _until_end(tokenizer: Tokenizer, answer: list[int], eos_ids: Collection[int]) -> list[int]:
    """The answer up to and with the first token that ends it; where none does, without the white space at its end."""
    for index, token in enumerate(answer):
        if token in eos_ids:
            return answer[: index + 1]
    end = len(answer)
    while end and not tokenizer.decode_exactly(answer[end - 1 : end]).strip():
        end -= 1
    return answer[:end]

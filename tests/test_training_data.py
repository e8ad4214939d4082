"""Training data: lines to samples with loss masks, and the draft vocabulary."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import CHAT_TEMPLATE, END, byte_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.samples import Counts, Sample, hold_out, load_samples
from jaxspec.training.turns import chat_turns, join_turns
from jaxspec.training.vocabulary import (
    count_texts,
    count_tokens,
    draft_vocabulary,
    ending_ids,
    load_counts,
)

EOS = 256
TURN = "{{ '<|' + message.role + '|>' }}"
OPEN = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"

# The same conversation text as CHAT_TEMPLATE, with a line break behind every turn that the model does not generate ...
BROKEN_LINES = f"{{% for message in messages %}}{TURN}{{{{ message.content + '{END}\\n' }}}}{{% endfor %}}{OPEN}"
# ... and with what the assistant generates marked, up to and with the end token ...
MARKED = (
    f"{{% for message in messages %}}{TURN}{{% if message.role == 'assistant' %}}"
    f"{{% generation %}}{{{{ message.content + '{END}' }}}}{{% endgeneration %}}{{{{ '\\n' }}}}"
    f"{{% else %}}{{{{ message.content + '{END}\\n' }}}}{{% endif %}}{{% endfor %}}{OPEN}"
)
# ... or without it.
MARKED_TEXT_ONLY = MARKED.replace(
    f"{{{{ message.content + '{END}' }}}}{{% endgeneration %}}", f"{{{{ message.content }}}}{{% endgeneration %}}{END}"
)

# As Qwen3's: the last answer has a thinking block, if only an empty one; history has none; without thinking the prompt ends with one.
SWITCHED = (
    "{% set last = namespace(user=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    f"{{% for message in messages %}}{TURN}{{% if message.role == 'assistant' and loop.index0 > last.user %}}"
    "{{ '<think>' + (message.reasoning_content or '') + '</think>' }}{% endif %}"
    f"{{{{ message.content + '{END}' }}}}{{% endfor %}}"
    f"{OPEN}{{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}}"
    "{{ '<think></think>' }}{% endif %}"
)
# A model that always thinks: its prompt opens the block.
THINKING_ONLY = SWITCHED.split("{% if add_generation_prompt and enable")[0].replace(
    "{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}"
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2, said he."},
]
THOUGHTFUL = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1.", "reasoning_content": "count"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "3.", "reasoning_content": "count on"},
]


def with_template(template: str) -> Tokenizer:
    fast = byte_tokenizer()
    fast.chat_template = template
    return Tokenizer(fast)


PLAIN = with_template(CHAT_TEMPLATE)


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def load(
    source: str | Sequence[str], tokenizer: Tokenizer | None = PLAIN, **options: Any
) -> tuple[list[Sample], Counts]:
    sources = [source] if isinstance(source, str) else source
    settings = {"vocab_size": 259, "eos_ids": (EOS,), "max_tokens": 512, **options}
    return load_samples(sources, tokenizer, **settings)


def supervised(tokenizer: Tokenizer, sample: Sample) -> list[str]:
    """Text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
    return [tokenizer.decode_exactly(sample.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def answers_of(
    template: str, messages: list[dict[str, str]], thinking: bool | None = None
) -> tuple[list[tuple[str, str]], list[str]]:
    """(prompt, answer) texts of every usable answer, and why others are not."""
    tokenizer, skipped = with_template(template), []
    turns = chat_turns(tokenizer, messages, (EOS,), thinking, skipped.append)
    texts = [(tokenizer.decode_exactly(turn.prompt), tokenizer.decode_exactly(turn.answer)) for turn in turns]
    return texts, skipped


def test_answers_and_their_end_tokens_are_supervised_and_nothing_else(tmp_path):
    tokenizer = with_template(BROKEN_LINES)
    (sample,), counts = load(written(tmp_path / "a.jsonl", {"messages": CHAT}), tokenizer)
    assert supervised(tokenizer, sample) == [f"1.{END}", f"2, said he.{END}"]
    assert sample.tokens.tolist() == tokenizer.encode_chat(CHAT[:4]) + tokenizer.encode_rendered(f"2, said he.{END}")
    assert (sample.tokens.dtype, sample.loss_mask.dtype) == (np.int32, bool)
    assert sample.source == f"{tmp_path}/a.jsonl:1"
    assert (counts.lines, counts.samples, counts.tokens) == (1, 1, len(sample.tokens))
    assert counts.supervised == sample.loss_mask.sum()


def test_the_prompt_of_an_answer_is_what_generation_starts_from():
    for template in (CHAT_TEMPLATE, BROKEN_LINES, SWITCHED):
        tokenizer = with_template(template)
        for mode, turn in zip((4, 2), chat_turns(tokenizer, CHAT, (EOS,), False, list)[::-1], strict=True):
            assert turn.prompt == tokenizer.encode_chat(CHAT[:mode], thinking=False)


def test_generation_marks_give_the_mask_that_prefix_differences_give(tmp_path):
    source = written(tmp_path / "a.jsonl", {"messages": CHAT})
    assert with_template(MARKED).has_answer_marks and not with_template(BROKEN_LINES).has_answer_marks
    (marked,), _ = load(source, with_template(MARKED))
    (unmarked,), _ = load(source, with_template(BROKEN_LINES))
    np.testing.assert_array_equal(marked.tokens, unmarked.tokens)
    np.testing.assert_array_equal(marked.loss_mask, unmarked.loss_mask)


def test_what_generation_marks_leave_out_is_not_supervised(tmp_path):
    tokenizer = with_template(MARKED_TEXT_ONLY)
    (sample,), _ = load(written(tmp_path / "a.jsonl", {"messages": CHAT}), tokenizer)
    assert supervised(tokenizer, sample) == ["1.", "2, said he."]


def test_thinking_is_supervised_as_the_model_would_generate_it():
    one, two, three = "<|user|>One?", "<|user|>Two?", "<|user|>Three?"
    first, second = f"{one}{END}<|assistant|>1.{END}", f"{two}{END}<|assistant|>2.{END}"
    thinks = "an answer without thinking, in thinking mode"
    assert answers_of(SWITCHED, THOUGHTFUL) == (
        [
            (f"{one}{END}<|assistant|>", f"<think>count</think>1.{END}"),
            (f"{first}{two}{END}<|assistant|><think></think>", f"2.{END}"),
            (f"{first}{second}{three}{END}<|assistant|>", f"<think>count on</think>3.{END}"),
        ],
        [],
    )
    texts, skipped = answers_of(SWITCHED, THOUGHTFUL, thinking=True)
    assert [answer for _, answer in texts] == [f"<think>count</think>1.{END}", f"<think>count on</think>3.{END}"]
    assert skipped == [thinks]
    texts, skipped = answers_of(SWITCHED, THOUGHTFUL, thinking=False)
    assert [answer for _, answer in texts] == [f"1.{END}", f"2.{END}", f"3.{END}"]
    assert all(prompt.endswith("<|assistant|><think></think>") for prompt, _ in texts) and not skipped


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("messages", [CHAT, THOUGHTFUL])
def test_empty_thinking_is_never_supervised(messages, thinking):
    for template in (SWITCHED, THINKING_ONLY):
        for _, answer in answers_of(template, messages, thinking)[0]:
            assert "<think></think>" not in answer and not answer.startswith("</think>")


def test_a_model_that_always_thinks_is_trained_on_answers_with_thinking_only():
    texts, skipped = answers_of(THINKING_ONLY, THOUGHTFUL)
    assert [answer for _, answer in texts] == [f"count</think>1.{END}", f"count on</think>3.{END}"]
    assert skipped == ["the chat template writes the answer otherwise than it would be generated"]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "3.", "reasoning_content": "count on"},
        {"content": "3.", "thinking": "count on"},
        {"content": "<think>\ncount on\n</think>\n\n3."},
    ],
)
def test_thinking_is_found_wherever_the_data_keeps_it(message):
    messages = [{"role": "user", "content": "Three?"}, {"role": "assistant", **message}]
    assert answers_of(SWITCHED, messages)[0][0][1] == f"<think>count on</think>3.{END}"
    assert answers_of(SWITCHED, messages, thinking=False)[0][0][1] == f"3.{END}"
    renamed = SWITCHED.replace("reasoning_content", "thinking")
    assert answers_of(renamed, messages)[0][0][1] == f"<think>count on</think>3.{END}"
    if "thinking" in message:  # a model that knows no thinking generates none
        assert answers_of(CHAT_TEMPLATE, messages)[0][0][1] == f"3.{END}"


def test_a_template_that_would_lose_the_thinking_makes_the_answer_unusable():
    lossy = SWITCHED.replace("(message.reasoning_content or '')", "''") + "{# message.reasoning_content #}"
    texts, skipped = answers_of(lossy, THOUGHTFUL[:2], thinking=True)
    assert not texts and len(skipped) == 1


def test_a_template_that_rewrites_history_gives_each_answer_a_sample_of_its_own(tmp_path):
    source = written(tmp_path / "a.jsonl", {"messages": THOUGHTFUL})
    tokenizer = with_template(SWITCHED)
    samples, counts = load(source, tokenizer)
    assert [supervised(tokenizer, sample) for sample in samples] == [
        [f"<think>count</think>1.{END}"],
        [f"2.{END}"],
        [f"<think>count on</think>3.{END}"],
    ]
    assert [sample.source for sample in samples] == [f"{source}:1", f"{source}:1#2", f"{source}:1#3"]
    assert (counts.lines, counts.samples) == (1, 3)


def test_joined_answers_each_stand_behind_their_own_prompt():
    tokenizer = with_template(SWITCHED)
    turns = chat_turns(tokenizer, THOUGHTFUL, (EOS,), None, list)
    plain = chat_turns(PLAIN, CHAT, (EOS,), None, list)
    for given, number in ((turns, 3), (plain, 1)):
        joined = join_turns(given)
        assert len(joined) == number
        ends = [(turn, len(turn.prompt), len(turn.prompt) + len(turn.answer)) for turn in given]
        for turn, start, end in ends:
            assert any(
                ids[:start] == turn.prompt and ids[start:end] == turn.answer and mask[start:end] == turn.mask
                for ids, mask in joined
            )
        assert sum(map(sum, (mask for _, mask in joined))) == sum(len(turn.answer) for turn in given)


def test_prompt_tokens_stay_those_of_generation_where_a_merge_would_reach_over_the_boundary():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)} | {"ĊĊ": 256}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END)
    hf.chat_template = "{% for m in messages %}{{ m.role + '\\n' + m.content }}{{ eos_token }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    tokenizer = Tokenizer(hf)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    whole = tokenizer.encode_rendered(tokenizer.render_chat(messages, prompt=False))
    (turn,) = chat_turns(tokenizer, messages, (257,), None, list)
    assert turn.prompt == tokenizer.encode_chat(messages[:1])
    assert 256 in whole and 256 not in turn.prompt + turn.answer
    assert tokenizer.decode_exactly(turn.prompt + turn.answer) == tokenizer.decode_exactly(whole)
    assert tokenizer.decode_exactly(turn.answer) == f"\nb{END}"


def test_an_answer_that_cannot_be_told_from_its_prompt_in_tokens_is_left_out():
    pieces = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "ab": 4, "▁ab": 5}
    fast = FastTokenizer(models.BPE(vocab=pieces, merges=[("▁", "a"), ("a", "b"), ("▁a", "b")]))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    fast.decoder = decoders.Metaspace(prepend_scheme="never")
    hf = PreTrainedTokenizerFast(tokenizer_object=fast)
    hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    skipped: list[str] = []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat_turns(Tokenizer(hf), messages, (), None, skipped.append) == []
    assert skipped == ["prompt and answer share a token"]


def test_every_form_of_line_is_read(tmp_path):
    pair = f"<|user|>Two?{END}<|assistant|>2.{END}"
    source = written(
        tmp_path / "a.jsonl",
        {"messages": CHAT, "prompt": 3, "text": None},
        {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2."}], "id": 7},
        {"prompt": "Two?", "response": "2."},
        "\n",
        {"question": "Two?", "answer": "2.", "task": "sums"},
        {"text": "Once."},
        {"index": 4, "prompt_ids": [1, 2], "token_ids": [3, EOS], "finish_reason": "stop"},
    )
    samples, counts = load(source)
    for sample in samples[1:4]:
        assert PLAIN.decode_exactly(sample.tokens.tolist()) == pair
        assert supervised(PLAIN, sample) == [f"2.{END}"]
    assert supervised(PLAIN, samples[4]) == ["Once."] and samples[4].loss_mask.all()
    assert samples[5].tokens.tolist() == [1, 2, 3, EOS]
    assert samples[5].loss_mask.tolist() == [False, False, True, True]
    assert [sample.source.rpartition(":")[2] for sample in samples] == ["1", "2", "3", "5", "6", "7"]
    assert (counts.lines, counts.samples, counts.skipped) == (6, 6, {})


def test_pairs_without_a_chat_template_end_with_the_end_token(tmp_path):
    tokenizer = Tokenizer(byte_tokenizer(chat=False))
    (sample,), _ = load(written(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2 \n"}), tokenizer)
    assert supervised(tokenizer, sample) == [f"2{END}"]
    with pytest.raises(InputError, match="chat template"):
        load(written(tmp_path / "b.jsonl", {"messages": CHAT}), tokenizer)


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path):
    tokens = written(tmp_path / "a.jsonl", {"prompt_ids": [1], "token_ids": [2]})
    assert len(load(tokens, None)[0]) == 1
    with pytest.raises(InputError, match=r"b\.jsonl:1 is text, and the model has no tokenizer"):
        load(written(tmp_path / "b.jsonl", {"text": "Once."}), None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'a': 1}\n", r"a\.jsonl:2 is not JSON: .* at character 2"),
        ('{"text": "torn', r"a\.jsonl:2 is not JSON"),
        ([1], r"a\.jsonl:2 is \[1\]; it must be a JSON object"),
        ({"turns": ["One?"]}, r"a\.jsonl:2 holds nothing to train on; it must have messages, conversations, .*"),
        ({"prompt": "One?"}, r"a\.jsonl:2 holds nothing to train on"),
        ({"text": 4}, r"a\.jsonl:2: text is 4; it must be a text"),
        ({"messages": "hi"}, r"a\.jsonl:2: messages is 'hi'; it must be a list"),
        ({"messages": [{"content": "hi"}]}, r"a\.jsonl:2: a message is .*; it must be an object with a role"),
        ({"conversations": [{"value": "hi"}]}, r"a\.jsonl:2: a turn is .*; it must be an object with from and value"),
        ({"prompt_ids": [1], "token_ids": [259]}, r"a\.jsonl:2: token_ids holds 259; .* from 0 to 258"),
        ({"prompt_ids": [1], "token_ids": [1.5]}, r"a\.jsonl:2: token_ids is \[1\.5\]; it must be a list of token ids"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    with pytest.raises(InputError, match=said):
        load(written(tmp_path / "a.jsonl", {"text": "Once."}, line))


def test_a_file_that_is_not_text_or_not_there_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1 is not text: byte 11"):
        load(str(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match=r"No such file.*a hub dataset is written hub:ORG/NAME"):
        load("openai/gsm8k")
    with pytest.raises(InputError, match="there is no training data"):
        load([])


def test_a_tokenizer_of_a_larger_vocabulary_than_the_models_is_refused(tmp_path):
    source = written(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(
        InputError, match=r"a\.jsonl:1: the tokenizer makes it 258, and the model's ids run from 0 to 257"
    ):
        load(source, vocab_size=258)


def test_what_cannot_be_used_is_counted_with_its_reason(tmp_path):
    parts = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "1."}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}
    source = written(
        tmp_path / "a.jsonl",
        {"text": "Once."},
        {"messages": []},
        {"messages": CHAT[:2]},
        {"messages": CHAT[2:3]},
        {"messages": parts},
        {"messages": [*CHAT[:2], call]},
        {"messages": [*CHAT[:2], {"role": "assistant", "content": " "}]},
        {"conversations": [{"from": "moderator", "value": "Order!"}]},
        {"prompt_ids": [1], "token_ids": []},
        {"prompt_ids": [], "token_ids": [1]},
    )
    samples, counts = load(source)
    assert (len(samples), counts.lines) == (1, 10)
    assert counts.skipped == {
        "an empty conversation": 1,
        "a conversation without an answer": 1,
        "an answer to nothing": 1,
        "a message whose content is no text": 1,
        "tool calls": 1,
        "an empty answer": 1,
        "a turn that is neither system's, human's nor gpt's": 1,
        "no answer token": 1,
        "a single token": 1,
    }
    assert str(counts).startswith("1 samples of 10 lines; 5 tokens, 5 supervised; left out: 1 (a conversation ")


def test_a_conversation_that_the_template_refuses_is_counted(tmp_path):
    tokenizer = with_template("{{ raise_exception('no') if messages[0].role == 'system' }}" + CHAT_TEMPLATE)
    source = written(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[1:]})
    samples, counts = load(source, tokenizer)
    assert (len(samples), counts.skipped) == (1, {"the chat template refuses the conversation": 2})


def test_long_samples_lose_their_end_or_are_left_out_as_asked(tmp_path):
    source = written(
        tmp_path / "a.jsonl",
        {"prompt_ids": [1, 2, 3], "token_ids": [4, 5, 6, 7]},
        {"prompt_ids": [1, 2, 3, 4, 5], "token_ids": [6]},
        {"prompt_ids": [1], "token_ids": [2]},
    )
    samples, counts = load(source, max_tokens=5)
    assert [sample.tokens.tolist() for sample in samples] == [[1, 2, 3, 4, 5], [1, 2]]
    assert samples[0].loss_mask.tolist() == [False, False, False, True, True]
    assert (counts.truncated, counts.skipped) == (1, {"fewer than 1 answer token in the first 5": 1})
    samples, counts = load(source, max_tokens=5, too_long="skip")
    assert [sample.tokens.tolist() for sample in samples] == [[1, 2]]
    assert (counts.truncated, counts.skipped) == (0, {"longer than 5 tokens": 2})
    with pytest.raises(InputError, match="too_long is 'split'; it must be truncate or skip"):
        load(source, too_long="split")


def test_answers_shorter_than_asked_are_counted_and_nothing_usable_is_an_error(tmp_path):
    lines = [{"prompt_ids": [1], "token_ids": list(range(size))} for size in (3, 5, 40)]
    source = written(tmp_path / "a.jsonl", *lines)
    samples, counts = load(source, min_supervised=8)
    assert (len(samples), counts.skipped) == (1, {"fewer than 8 answer tokens": 2})
    with pytest.raises(InputError, match=r"a\.jsonl: nothing to train on: 3 lines; 3 \(fewer than 41 answer tokens\)"):
        load(source, min_supervised=41)
    with pytest.raises(InputError, match="nothing to train on: there are no lines"):
        load(written(tmp_path / "b.jsonl"))


def test_sources_follow_one_another_up_to_the_limit(tmp_path):
    first = written(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "cd"})
    second = written(tmp_path / "b.jsonl", {"text": "ef"}, {"text": "gh"})
    samples, counts = load([first, second], limit=3)
    assert [sample.source.rpartition("/")[2] for sample in samples] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert counts.lines == 3


def test_a_hub_dataset_is_read_by_name_configuration_and_split(monkeypatch):
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, object]]:
        asked.append((name, config, split))
        return [{"question": "One?", "answer": "1.", "messages": None}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for source in ("hub:openai/gsm8k", "hub:openai/gsm8k:test", "hub:openai/gsm8k:main:test"):
        (sample,), _ = load(source)
        assert supervised(PLAIN, sample) == [f"1.{END}"] and sample.source == f"{source}:1"
    assert asked == [
        ("openai/gsm8k", None, "train"),
        ("openai/gsm8k", None, "test"),
        ("openai/gsm8k", "main", "test"),
    ]


def test_a_hub_dataset_that_cannot_be_had_is_an_input_error(monkeypatch):
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(InputError, match=r"^hub:a/b cannot be loaded: no route to the hub$"):
        load("hub:a/b")
    with pytest.raises(InputError, match="must be hub:ORG/NAME"):
        load("hub:a:b:c:d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="need the package datasets; pip install datasets"):
        load("hub:a/b")


def test_held_out_samples_never_share_a_line_with_training(tmp_path):
    source = written(tmp_path / "a.jsonl", *[{"messages": THOUGHTFUL}] * 60)
    samples, _ = load(source, with_template(SWITCHED))
    train, held = hold_out(samples, 0.25)
    lines = [{sample.source.partition("#")[0] for sample in side} for side in (train, held)]
    assert len(train) + len(held) == len(samples) == 180 and not lines[0] & lines[1]
    assert 6 <= len(lines[1]) <= 24
    assert hold_out(samples[:90], 0.25)[1] == [sample for sample in held if sample in samples[:90]]
    assert hold_out(samples, 0.25, seed=1)[1] != held
    assert hold_out(samples, 0.0) == (samples, [])
    with pytest.raises(InputError, match="too few"):
        hold_out(samples[:1], 0.25)


def test_only_supervised_tokens_are_counted():
    samples = [
        Sample(np.array([1, 2, 3, 3], np.int32), np.array([False, True, True, True]), "a"),
        Sample(np.array([3, 5], np.int32), np.array([True, False]), "b"),
    ]
    counts = count_tokens(samples, 7)
    assert counts.tolist() == [0, 0, 1, 3, 0, 0, 0] and counts.dtype == np.int64


def test_the_draft_vocabulary_is_the_most_frequent_tokens_in_rising_order():
    counts = np.array([0, 5, 9, 2, 5, 5, 0, 1])
    made = draft_vocabulary(counts, 3)
    assert made.tolist() == [1, 2, 4] and made.dtype == np.int32  # of the equally frequent, the lowest
    assert draft_vocabulary(counts, 3, required=[7]).tolist() == [1, 2, 7]
    assert draft_vocabulary(counts, 7).tolist() == [0, 1, 2, 3, 4, 5, 7]  # filled up with the lowest unused one
    assert draft_vocabulary(counts, 8).tolist() == list(range(8))


def test_all_that_a_text_says_is_counted(tmp_path):
    source = written(
        tmp_path / "a.jsonl",
        {"question": "ab", "answer": "b", "topic": "zz"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "tool", "content": "zz"}]},
        {"text": "a"},
    )
    counts = count_texts(source, PLAIN, 259)
    ids = PLAIN.encode("ab\n")
    assert counts[ids].tolist() == [3, 3, 2] and counts.sum() == 8
    with pytest.raises(
        InputError, match=r"a\.jsonl:1: the tokenizer makes it \d+, and the model's ids run from 0 to 9"
    ):
        count_texts(source, PLAIN, 10)
    with pytest.raises(InputError, match=r"b\.jsonl:1 holds no text"):
        count_texts(written(tmp_path / "b.jsonl", {"prompt_ids": [1]}), PLAIN, 259)


def test_a_draft_vocabulary_of_an_impossible_size_is_refused():
    counts = np.ones(8, np.int64)
    with pytest.raises(InputError, match="size is 9; it must be from 1 to the verifier's 8"):
        draft_vocabulary(counts, 9)
    with pytest.raises(InputError, match="size is 1; the 2 required ids"):
        draft_vocabulary(counts, 1, required=[3, 4])
    with pytest.raises(InputError, match="required id 8"):
        draft_vocabulary(counts, 2, required=[8])


def test_the_ids_that_answers_end_with_are_found(tmp_path):
    source = written(
        tmp_path / "a.jsonl",
        {"messages": CHAT},
        {"prompt_ids": [257], "token_ids": [3, 257, 4]},
        {"prompt_ids": [1], "token_ids": [258]},
    )
    samples, _ = load(source)
    assert ending_ids(samples, PLAIN.special_ids) == (256, 258)


@pytest.mark.parametrize("name", ["counts.json", "counts.npz"])
def test_token_counts_are_read_from_either_form(tmp_path, name):
    counts = np.array([0, 3, 0, 2**40, 1])
    (tmp_path / "counts.json").write_text('{"1": 3, "3": 1099511627776, "4": 1}')
    np.savez_compressed(tmp_path / "counts.npz", counts=counts)
    np.testing.assert_array_equal(load_counts(tmp_path / name, 5), counts)
    assert load_counts(tmp_path / name, 6).tolist() == [*counts.tolist(), 0]
    with pytest.raises(InputError, match=rf"{name} holds no token counts of a vocabulary of 4"):
        load_counts(tmp_path / name, 4)


def test_a_file_that_holds_no_counts_is_refused(tmp_path):
    for name, content in (("a.json", "[1]"), ("b.json", '{"1": "x"}'), ("c.npz", "x"), ("d.pt", "x"), ("e.json", "{")):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=rf"{name} holds no token counts"):
            load_counts(tmp_path / name, 5)
    with pytest.raises(InputError, match=r"gone\.json: No such file"):
        load_counts(tmp_path / "gone.json", 5)

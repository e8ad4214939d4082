"""Plain decoding with tiny models: the engine against naive recomputation, rows against their solo runs, stopping, streaming."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CHAT_TEMPLATE, WholeSequence, byte_tokenizer, tiny_config, tiny_decoder

from jaxspec import compilation_cache
from jaxspec.decoding.engine import STREAM_CYCLES, Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import Programs, power_of_two
from jaxspec.decoding.result import GenerationInterrupted
from jaxspec.decoding.sampling import SamplingRows
from jaxspec.decoding.state import NO_TOKEN, DecodeState, Finish, Requests, pad_stop_ids
from jaxspec.decoding.stopping import REPLACEMENT, Answer
from jaxspec.errors import InputError
from jaxspec.layers.cache import KVCache
from jaxspec.prompts import collect_prompts
from jaxspec.tokenizer import Tokenizer

CONFIG = tiny_config()
DECODER = tiny_decoder(CONFIG)
NAIVE = WholeSequence(DECODER)
TOKENIZER = Tokenizer(byte_tokenizer())
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 256, length).tolist() for length in (1, 2, 5, 16, 17, 18, 40, 3)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Without end-of-sequence ids, so that answers are as long as asked."""
    return Engine(CONFIG, DECODER, tokenizer=TOKENIZER)


def variant(engine: Engine, eos_ids: Sequence[int] = (), max_batch_size: int = 8) -> Engine:
    """The same engine, its compiled programs included, with other settings."""
    other = copy(engine)
    other._eos_ids = tuple(eos_ids)
    other._max_batch_size = max_batch_size
    return other


class Letters:
    """Stands for a tokenizer whose tokens are two letters each."""

    has_chat_template = False

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) + chr(ord("a") + token // 26) for token in tokens)


@pytest.fixture(scope="module")
def letters(engine: Engine) -> Engine:
    other = copy(engine)
    other.tokenizer = Letters()
    return other


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params) -> list[list[int]]:
    return [list(result.token_ids) for result in engine.generate(prompts, params)]


def test_greedy_tokens_equal_recomputing_the_whole_sequence(engine):
    for prompt in (PROMPTS[0], PROMPTS[4]):
        (tokens,) = answers(engine, [prompt], SamplingParams(max_new_tokens=12))
        assert tokens == NAIVE.greedy(prompt, 12)


def test_a_prompt_of_several_prefill_calls_equals_recomputing(engine):
    prompt = RNG.integers(0, 256, 530).tolist()
    (tokens,) = answers(engine, [prompt], SamplingParams(max_new_tokens=2))
    assert tokens == WholeSequence(DECODER, 544).greedy(prompt, 2)


def test_rows_of_a_ragged_batch_equal_their_solo_runs(engine):
    params = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=11, temperature=1.0, seed=3),
        SamplingParams(max_new_tokens=33, temperature=0.8, top_p=0.9, seed=3),
        SamplingParams(max_new_tokens=25, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=40, temperature=1.5, top_k=20, seed=2**40),
        SamplingParams(max_new_tokens=1, temperature=1.0, min_p=0.1, seed=0),
        SamplingParams(max_new_tokens=34),
        SamplingParams(max_new_tokens=36, temperature=1.0, frequency_penalty=0.8, seed=9),
    ]
    together = answers(engine, PROMPTS, params)
    for prompt, wanted, tokens in zip(PROMPTS, params, together, strict=True):
        assert len(tokens) == wanted.max_new_tokens
        assert answers(engine, [prompt], wanted) == [tokens]


def test_results_come_in_input_order_over_several_batches(engine):
    small = variant(engine, max_batch_size=4)
    params = SamplingParams(max_new_tokens=5)
    results = small.generate(PROMPTS, params)
    assert [list(result.prompt_ids) for result in results] == PROMPTS
    assert [list(result.token_ids) for result in results] == answers(engine, PROMPTS, params)
    assert {result.batch for result in results} == {0, 1}


def test_seeds_repeat_and_differ(engine):
    def tokens(seed: int | None) -> list[list[int]]:
        return answers(engine, [PROMPTS[2]], SamplingParams(max_new_tokens=16, temperature=2.0, seed=seed))

    assert tokens(42) == tokens(42)
    assert tokens(42) != tokens(43)
    assert tokens(None) != tokens(None)


def test_penalties_equal_the_reference_token_by_token(engine):
    params = SamplingParams(max_new_tokens=24, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    prompt = PROMPTS[4]
    (tokens,) = answers(engine, [prompt], params)
    expected: list[int] = []
    for _ in range(params.max_new_tokens):
        logits = NAIVE.logits(prompt + expected)[-1].astype(np.float64)
        for token in {*prompt, *expected}:
            logits[token] *= 1.4 if logits[token] < 0 else 1 / 1.4
        for token in set(expected):
            logits[token] -= 0.3 + 0.2 * expected.count(token)
        expected.append(int(logits.argmax()))
    assert tokens == expected
    assert tokens != NAIVE.greedy(prompt, params.max_new_tokens)


def test_stale_and_unwritten_slots_are_never_read(engine, monkeypatch):
    params = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=1.0, seed=1)]
    clean = answers(engine, PROMPTS[4:6], params)
    empty = Programs.empty

    def poisoned(*arguments) -> tuple[KVCache, None]:
        cache, _ = empty(*arguments)
        return jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else jnp.full_like(leaf, jnp.nan), cache), None

    monkeypatch.setattr(Programs, "empty", poisoned)
    assert answers(engine, PROMPTS[4:6], params) == clean


# Stopping


def test_any_of_several_end_tokens_stops_and_is_kept(engine):
    plain = NAIVE.greedy(PROMPTS[4], 12)
    first = min(plain.index(plain[7]), plain.index(plain[3]))
    ending = variant(engine, (plain[7], plain[3]))
    (result,) = ending.generate([PROMPTS[4]], SamplingParams(max_new_tokens=12))
    assert list(result.token_ids) == plain[: first + 1]
    assert result.finish_reason == "stop"
    assert result.usage.completion_tokens == first + 1 and result.usage.prompt_tokens == len(PROMPTS[4])
    (ignoring,) = ending.generate([PROMPTS[4]], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert list(ignoring.token_ids) == plain and ignoring.finish_reason == "length"
    (asked,) = ending.generate(
        [PROMPTS[4]], SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=[plain[3]])
    )
    assert list(asked.token_ids) == plain[: plain.index(plain[3]) + 1] and asked.finish_reason == "stop"


def test_a_stop_token_as_the_last_allowed_one_is_a_stop_and_past_the_cap_is_none(engine):
    plain = NAIVE.greedy(PROMPTS[6], 12)
    place = next(i for i in range(2, 12) if plain[i] not in plain[:i])
    ending = variant(engine, [plain[place]])
    for cap, reason in ((place + 3, "stop"), (place + 1, "stop"), (place, "length")):
        (result,) = ending.generate([PROMPTS[6]], SamplingParams(max_new_tokens=cap))
        assert (list(result.token_ids), result.finish_reason) == (plain[: min(cap, place + 1)], reason)


def test_rows_that_stop_early_do_not_disturb_the_others(engine):
    plain = answers(engine, PROMPTS, SamplingParams(max_new_tokens=40))
    params = [SamplingParams(max_new_tokens=n) for n in (3, 9, 17, 40, 1, 2, 39, 33)]
    assert answers(engine, PROMPTS, params) == [
        tokens[: p.max_new_tokens] for tokens, p in zip(plain, params, strict=True)
    ]


def test_a_row_that_has_ended_is_frozen(engine):
    programs = engine._programs
    empty, none = programs.empty(np.array([5, 5], np.int32), 256)
    cache, _ = programs.prefill(empty, none, np.ones((2, 17), np.int32), np.array([4, 7], np.int32))
    params = [SamplingParams()] * 2
    requests = Requests(SamplingRows.of(params, [0, 0]), jnp.array([9, 9], jnp.int32), pad_stop_ids([(), ()], 4))
    zeros = np.zeros(2, np.int32)
    state = DecodeState(
        cache, jnp.array([5, 5], jnp.int32), jnp.array(zeros), jnp.array([Finish.STOP, Finish.RUNNING], jnp.int32), None
    )
    state, dispatch = programs.decode(state, requests, 6)
    assert state.cache.length.tolist() == [4, 13]
    assert state.generated.tolist() == [0, 6]
    tokens = dispatch.records.tokens[:, :, 0]  # [C, B]
    assert state.anchor[0] == 5 and state.anchor[1] == tokens[5, 1]
    assert (tokens[:, 0] == NO_TOKEN).all() and (tokens[6:, 1] == NO_TOKEN).all()


def test_an_answer_ends_at_the_models_longest_sequence():
    config = tiny_config(max_positions=40)
    short = Engine(config, tiny_decoder(config))
    (result,) = short.generate([list(range(30))], SamplingParams(max_new_tokens=500))
    assert len(result.token_ids) == 10 and result.finish_reason == "length"
    (result,) = short.generate([list(range(39))], SamplingParams(max_new_tokens=500))
    assert len(result.token_ids) == 1
    with pytest.raises(InputError, match="prompt 2 has 40 tokens; the model takes at most 40"):
        short.generate([[1], list(range(40))])


@pytest.mark.parametrize(("start", "length"), [(6, 2), (7, 2), (11, 1), (60, 8), (63, 3)])
def test_a_stop_string_over_token_boundaries_cuts_text_and_tokens(letters, start, length):
    # Two letters a token and 32 tokens a dispatch: letters 62 to 65 lie round the boundary of two dispatches.
    params = SamplingParams(max_new_tokens=40, temperature=3.0, seed=8)
    (plain,) = letters.generate([PROMPTS[4]], params)
    stop = plain.text[start : start + length]
    (result,) = letters.generate([PROMPTS[4]], replace(params, stop=("NEVER", stop)))
    at = plain.text.index(stop)
    assert result.text == plain.text[:at]
    assert result.token_ids == plain.token_ids[: (at + length + 1) // 2]
    assert result.finish_reason == "stop"


def test_a_row_stopped_by_the_host_stays_stopped_in_its_batch(letters):
    sampled = SamplingParams(max_new_tokens=100, temperature=3.0, seed=8)
    plain = letters.generate(PROMPTS[4:6], sampled)
    stop = plain[0].text[20:25]
    first, second = letters.generate(PROMPTS[4:6], [replace(sampled, stop=[stop]), sampled])
    assert first.text == plain[0].text[: plain[0].text.index(stop)] and first.finish_reason == "stop"
    assert second.token_ids == plain[1].token_ids and second.finish_reason == "length"


# Streaming


def spell(tokens: Sequence[int]) -> str:
    """A decoder of bytes, as byte-level tokenizers have it."""
    return bytes(tokens).decode(errors="replace")


def test_no_half_character_is_shown():
    answer = Answer(spell, ())
    pieces = []
    for byte in "a\u00e9\u4e16\U0001f642z".encode():
        answer.extend([byte])
        pieces.append(answer.new_text(last=False))
    assert "".join(pieces) == "a\u00e9\u4e16\U0001f642z"
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_half_character_at_the_very_end_is_shown_as_it_is():
    answer = Answer(spell, ())
    answer.extend("ab\u4e16".encode()[:-1])
    assert answer.new_text(last=False) == "ab"
    assert answer.new_text(last=True) == REPLACEMENT


def test_what_may_become_a_stop_string_is_held_back():
    answer = Answer(spell, ("STOP", "TEN"))
    shown = []
    for token in b"an STe STEN":
        answer.extend([token])
        shown.append(answer.new_text(last=answer.stopped))
    assert shown == ["a", "n", " ", "", "", "STe", " ", "", "", "S", ""]
    assert answer.stopped and answer.text() == "an STe S"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_the_first_stop_string_to_be_completed_counts_whatever_the_dispatch(size):
    answer = Answer(spell, ("dog", "cat, do"))
    text = b"a cat, dog, cat"
    for start in range(0, len(text), size):
        if not answer.stopped:
            answer.extend(text[start : start + size])
    assert answer.stopped
    assert bytes(answer.token_ids) == b"a cat, do"
    assert answer.text() == "a "


@pytest.mark.parametrize(
    "params", [SamplingParams(max_new_tokens=50), SamplingParams(max_new_tokens=50, temperature=1.5, seed=4)]
)
def test_streamed_pieces_add_up_to_the_result(engine, params):
    (whole,) = engine.generate([PROMPTS[6]], params)
    events = list(engine.stream(PROMPTS[6], params))
    assert "".join(event.text for event in events) == whole.text
    assert [token for event in events for token in event.token_ids] == list(whole.token_ids)
    assert all(event.result is None for event in events[:-1])
    assert replace(events[-1].result, timing=whole.timing) == whole
    assert len(events) > 50 / STREAM_CYCLES / 4


def test_a_streamed_stop_string_never_shows(letters):
    params = SamplingParams(max_new_tokens=40, temperature=3.0, seed=8)
    (plain,) = letters.generate([PROMPTS[4]], params)
    stop = plain.text[21:30]
    events = list(letters.stream(PROMPTS[4], replace(params, stop=[stop])))
    assert "".join(event.text for event in events) == plain.text[: plain.text.index(stop)]
    assert events[-1].result.finish_reason == "stop"
    assert [token for event in events for token in event.token_ids] == list(events[-1].result.token_ids)


# Prompts


def test_messages_go_through_the_chat_template(engine):
    (result,) = engine.generate([{"messages": [{"role": "user", "content": "Hi"}]}], SamplingParams(max_new_tokens=1))
    assert list(result.prompt_ids) == TOKENIZER.encode("<|user|>Hi<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 1 is empty"),
        ([], "prompt 1 is empty"),
        ([1, 259], "prompt 1 holds token id 259; the model's ids run from 0 to 258"),
        ([-1], "prompt 1 holds token id -1"),
        ([1.0], "prompt 1 holds token id 1.0"),
        ([0] * 1024, "prompt 1 has 1024 tokens; the model takes at most 1024"),
        (7, "prompt 1 is 7; it must be a text"),
        ({"text": "a"}, "prompt 1 has the keys .*exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"content": "a"}]}, "message 1 has no role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "images and other parts are not supported",
        ),
    ],
)
def test_a_bad_prompt_is_named(engine, prompt, message):
    with pytest.raises(InputError, match=message):
        engine.generate([prompt])


def test_bad_calls_are_refused(engine):
    with pytest.raises(InputError, match="must be a list of prompts"):
        engine.generate("Hello")
    with pytest.raises(InputError, match="params has 2 entries for 1 prompts"):
        engine.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(InputError, match="stop_token_ids holds 259"):
        engine.generate([[1]], SamplingParams(stop_token_ids=[259]))
    with pytest.raises(InputError, match="mesh: data 2 are 2 devices; there are 1"):
        Engine.from_pretrained("anything", mesh="data=2")
    with pytest.raises(InputError, match="there is no drafter"):
        Engine.from_pretrained("anything", speculative_config={"method": "dflash"})
    assert engine.generate([]) == []


def test_without_a_tokenizer_token_ids_work_and_text_is_refused():
    bare = Engine(CONFIG, DECODER)
    (result,) = bare.generate([[1, 2]], SamplingParams(max_new_tokens=3))
    assert result.text == "" and len(result.token_ids) == 3
    assert [len(event.token_ids) for event in bare.stream([1, 2], SamplingParams(max_new_tokens=6))] == [4, 2]
    with pytest.raises(InputError, match="no tokenizer; give token ids"):
        bare.generate(["text"])
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        bare.generate([[1]], SamplingParams(stop=["x"]))


def test_messages_without_a_template_are_refused():
    plain = Engine(CONFIG, DECODER, tokenizer=Tokenizer(byte_tokenizer(chat=False)))
    with pytest.raises(InputError, match="need a chat template"):
        plain.generate([{"messages": [{"role": "user", "content": "Hi"}]}])


def test_a_conversation_the_template_refuses_is_an_input_error():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}" + CHAT_TEMPLATE
    strict = Engine(CONFIG, DECODER, tokenizer=Tokenizer(tokenizer))
    with pytest.raises(InputError, match="refuses them: roles must alternate"):
        strict.generate([{"messages": [{"role": "user", "content": "Hi"}]}])


# Programs


def test_buckets():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert power_of_two(3, 16) == 16
    programs = Programs(tiny_config(max_positions=1000), DECODER)
    assert [programs.capacity(n) for n in (1, 256, 257, 513, 1000)] == [256, 256, 512, 1024, 1024]
    assert Programs(tiny_config(max_positions=300), DECODER).capacity(300) == 384


def test_nothing_compiles_once_the_buckets_are_warm(engine):
    compiled = []

    def listen(event: str, duration: float, **_: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    rng = np.random.default_rng(2)
    mixed = [rng.integers(0, 256, rng.integers(1, 120)).tolist() for _ in range(20)]
    params = [
        SamplingParams(max_new_tokens=int(rng.integers(1, 60)), temperature=float(t), seed=1, ignore_eos=True)
        for t in rng.choice([0.0, 0.7], 20)
    ]
    before = engine.compiled_programs
    first = engine.generate(mixed, params)
    warm = engine.compiled_programs
    # Batches of 8, 8 and 4 rows; per batch size one empty cache, one loop, and prefill buckets from 16 to 128.
    assert len(warm) - len(before) <= 2 * (1 + 1 + 4)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        second = engine.generate(mixed[::-1], params[::-1])
        engine.generate(
            mixed, SamplingParams(max_new_tokens=3, temperature=0.2, top_p=0.5, top_k=3, stop=["x"], seed=3)
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.compiled_programs == warm
    assert compiled == []
    assert all(result.timing.compile_s == 0 for result in second)
    assert [result.token_ids for result in second] == [result.token_ids for result in first[::-1]]


def test_compile_time_is_apart_from_run_time():
    fresh = Engine(CONFIG, DECODER)
    (cold,) = fresh.generate([[1]], SamplingParams(max_new_tokens=3))
    (warm,) = fresh.generate([[1]], SamplingParams(max_new_tokens=3))
    assert cold.timing.compile_s > cold.timing.prefill_s + cold.timing.decode_s
    assert warm.timing.compile_s == 0 and warm.timing.tokens_per_s == 3 / warm.timing.decode_s


def test_an_interrupted_call_keeps_what_was_generated(engine, monkeypatch):
    whole = engine.generate(PROMPTS[:3], SamplingParams(max_new_tokens=100))
    decode, calls = Programs.decode, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(Programs, "decode", interrupted)
    params = [SamplingParams(max_new_tokens=n) for n in (10, 100, 100)]
    with pytest.raises(GenerationInterrupted) as caught:
        variant(engine, max_batch_size=2).generate(PROMPTS[:3], params)
    first, second, third = caught.value.results
    assert (first.finish_reason, second.finish_reason, third) == ("length", None, None)
    assert second.token_ids == whole[1].token_ids[:64]


def test_an_unwritable_cache_of_programs_is_a_warning_given_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.warns(
            UserWarning, match="compiled programs cannot be kept .*; set JAXSPEC_CACHE to a writable directory"
        ):
            compilation_cache.enable()
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize(("limit", "kept"), [(-1, 4 * 1024**3), (1000, 1000)])
def test_the_cache_of_programs_is_limited_as_the_user_says(tmp_path, monkeypatch, limit, kept):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update(names[0], None)
    jax.config.update(names[1], limit)
    try:
        compilation_cache.enable()
        assert jax.config.values[names[0]] == str(tmp_path / "xla") and jax.config.values[names[1]] == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_prompts_are_what_their_key_says(engine):
    for prompt, said in (
        ({"prompt_ids": "1,2,3"}, "prompt_ids is '1,2,3'; a list of token ids is wanted"),
        ({"prompt": [1, 2]}, r"prompt is \[1, 2\]; a text is wanted"),
        (b"Hello", "must be a text, a list of token ids, or a mapping"),
    ):
        with pytest.raises(InputError, match=said):
            engine.generate([prompt])


def test_text_that_is_no_unicode_is_refused_by_name(engine):
    half = "\ud800 hello"  # JSON can hold it, UTF-8 cannot
    with pytest.raises(InputError, match=r"the text is not text: character 1 is .*ud800"):
        engine.generate([half])
    with pytest.raises(InputError, match="message 2 is not text"):
        engine.generate([{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": half}]}])
    with pytest.raises(InputError, match="PROMPT 1 is not text"):
        collect_prompts([half], None, None)


def test_templates_that_fail_are_one_line():
    fast = byte_tokenizer()
    fast.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(InputError, match="the model's chat template refuses them"):
        Tokenizer(fast).encode_chat([{"role": "user", "content": "a"}])
    fast.chat_template = {"tools": CHAT_TEMPLATE}  # named ones, and none for plain messages
    assert not Tokenizer(fast).has_chat_template
    fast.chat_template = {"default": CHAT_TEMPLATE, "tools": CHAT_TEMPLATE}
    assert Tokenizer(fast).has_chat_template

"""The state between cycles, with random drafters of every kind: nothing stale is read, nothing compiles twice, an answer goes on as if it
had been decoded in one go, and the model's longest sequence is filled to its end."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import quick_programs
from scripted_engine import DECODER, VERIFIER, V, tokens_of
from test_cycle import real_drafter

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.state import NO_TOKEN, DecodeState, Finish
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder

K, ROWS = 5, 4
PROMPTS = [np.random.default_rng(5).integers(0, V, length).tolist() for length in (1, 5, 9, 12)]


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs():
        yield


def engine_with(drafter: nnx.Module | None, decoder: Decoder = DECODER, longest: int = 1024) -> Engine:
    plan = None if drafter is None else Plan(drafts=K, sample_drafts=True, widths=(K,))
    config = replace(VERIFIER, max_positions=longest)
    return Engine(config, decoder, drafter, plan, max_batch_size=ROWS)


@pytest.fixture(scope="module", params=["eagle3", "peagle", "dflash", "dspark"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_with(real_drafter(request.param))


def poisoned(state: DecodeState) -> DecodeState:
    """NaN in every slot of both caches that isn't committed."""

    def fill(cache: KVCache) -> KVCache:
        length = np.asarray(cache.length)

        def entry(values: jax.Array) -> jax.Array:
            stale = np.arange(values.shape[2])[None] >= length[:, None]
            return jnp.array(np.where(stale[:, None, :, None], np.float32(np.nan), values))

        return replace(cache, k=tuple(map(entry, cache.k)), v=tuple(map(entry, cache.v)))

    assert state.draft is not None
    return replace(state, cache=fill(state.cache), draft=replace(state.draft, cache=fill(state.draft.cache)))


def test_what_was_rejected_is_never_read(engine):
    """NaN in every stale slot of both caches, before the first dispatch and between them; rows end one by one."""
    params = SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=7)
    tokens = {}
    for spoil in (lambda state: state, poisoned):
        state, requests = engine.start(PROMPTS, params)
        requests = replace(requests, limit=jnp.array([6, 20, 13, 17], jnp.int32))
        records = []
        while (np.asarray(state.finish) == Finish.RUNNING).any():
            state, dispatch = engine.programs.decode(spoil(state), requests, 3)
            records.append(np.asarray(dispatch.records.tokens))
        made = np.concatenate(records).transpose(1, 0, 2).reshape(ROWS, -1)
        tokens[spoil] = [row[row != NO_TOKEN].tolist() for row in made]
    clean, spoilt = tokens.values()
    assert [len(row) for row in clean] == [6, 20, 13, 17]
    assert spoilt == clean


def test_an_answer_goes_on_as_if_decoded_in_one_go(engine):
    """The prompt and a part of the answer as a new prompt: the same tokens follow, and the same drafts on the way."""
    params = SamplingParams(max_new_tokens=18, temperature=0.0)
    whole = engine.generate(PROMPTS, params)
    prompts, wanted = [], []
    for result in whole:
        at = len(result.cycles) // 2
        done = sum(len(cycle.tokens) for cycle in result.cycles[:at])
        prompts.append([*result.prompt_ids, *result.token_ids[:done]])
        wanted.append(result.cycles[at:])
    limits = [replace(params, max_new_tokens=sum(len(cycle.tokens) for cycle in cycles)) for cycles in wanted]
    for result, cycles in zip(engine.generate(prompts, limits), wanted, strict=True):
        assert [cycle.tokens for cycle in result.cycles] == [cycle.tokens for cycle in cycles]
        assert [cycle.draft for cycle in result.cycles] == [cycle.draft for cycle in cycles]


def mixed_prompts(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """20 prompts of 1 to 60 tokens, greedy and sampled, with stop tokens and limits of their own."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, V, length).tolist() for length in (*rng.integers(1, 60, 18), 1, 60)]
    params = [
        SamplingParams(
            max_new_tokens=int(rng.integers(1, 30)),
            temperature=float(rng.choice([0, 0.7])),
            top_p=float(rng.choice([0.8, 1])),
            top_k=int(rng.choice([0, 20])),
            seed=int(rng.integers(99)),
            stop_token_ids=tuple(rng.integers(0, V, 3).tolist()),
        )
        for _ in prompts
    ]
    return prompts, params


def test_nothing_compiles_after_warm_up(engine, caplog):
    """20 mixed prompts twice, then 20 others; JAX itself is asked, so that operations outside the programs count too."""

    def compilations(run: Callable[[], object]) -> list[str]:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            run()
        return [message for message in caplog.messages if message.startswith("Compiling")]

    for seed in (0, 1):
        engine.generate(*mixed_prompts(seed))
    before = engine.compiled_programs
    assert compilations(lambda: engine.generate(*mixed_prompts(2))) == []
    assert engine.compiled_programs == before
    assert len(compilations(lambda: jax.jit(lambda x: x * 1.5)(np.float32(1)))) == 1


def test_the_models_longest_sequence_ends_the_answer():
    """With the caches filled to the last slot, so that blocks reach to their end; the tokens are plain decoding's."""
    longest = 122  # and 6 scratch slots: a cache of 128
    prompts = [np.random.default_rng(length).integers(0, V, length).tolist() for length in (80, 100, 117, 121)]
    params = SamplingParams(max_new_tokens=64)
    engine, plain = engine_with(real_drafter("dflash"), longest=longest), engine_with(None, longest=longest)
    results = engine.generate(prompts, params)
    assert {key[2] for key in engine.compiled_programs if key[0] == "decode"} == {128}
    assert [len(result.token_ids) for result in results] == [min(64, longest - len(prompt)) for prompt in prompts]
    assert {result.finish_reason for result in results} == {"length"}
    assert tokens_of(results) == tokens_of(plain.generate(prompts, params))


@pytest.mark.slow
def test_bfloat16_differs_from_plain_decoding_at_near_ties_only():
    """A block and a single token may round differently; behind a first difference the answers are different texts. Its two tokens must
    be as close as 2^-8 sqrt(2 L) max |logit|: each of the 2 L sums along the residual stream rounds by up to 2^-8 of it."""
    graph, state = nnx.split(DECODER)
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    graph, state = nnx.split(real_drafter("dflash"))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, state)
    params = SamplingParams(max_new_tokens=64)
    plain = engine_with(None, decoder).generate(PROMPTS, params)
    drafted = engine_with(nnx.merge(graph, half), decoder).generate(PROMPTS, params)
    layers = [layer.attention for layer in VERIFIER.layers]
    for one, other in zip(plain, drafted, strict=True):
        differing = np.flatnonzero(np.array(one.token_ids) != np.array(other.token_ids))
        if not len(differing):
            continue
        tokens = jnp.array([[*one.prompt_ids, *one.token_ids[: differing[0]]]], jnp.int32)
        hidden, _, _ = decoder(tokens, KVCache.empty(layers, 1, tokens.shape[1], jnp.bfloat16))
        logits = np.asarray(decoder.logits(hidden))[0, -1]
        pair = logits[[one.token_ids[differing[0]], other.token_ids[differing[0]]]]
        assert abs(pair[0] - pair[1]) <= 2**-8 * np.sqrt(2 * len(layers)) * abs(logits).max()

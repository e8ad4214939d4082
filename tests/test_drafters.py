"""Drafters against themselves: however the context arrives, whatever was rejected before, the drafts are the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import Jitted, padded_context

from jaxspec.config import AttentionConfig, LayerConfig, RopeConfig
from jaxspec.drafters.base import Context, Proposal, attention_layers
from jaxspec.drafters.build import build_drafter
from jaxspec.drafters.config import BlockConfig, ConfidenceConfig, DrafterConfig, EagleConfig, MarkovConfig, Method
from jaxspec.layers.cache import KVCache

V, VD, D, TAPS, MASK, BLOCK = 40, 24, 32, (1, 3), 39, 6
LENGTH, PADDED = 21, 24


def layer(index: int, *, wide: bool, causal: bool, window: int | None) -> LayerConfig:
    rope = RopeConfig(theta=1e4, head_dim=8)
    attention = AttentionConfig(
        4, 2, 8, rope, 8**-0.5, index, window=window, qk_norm=True, causal=causal, in_width=2 * D if wide else None
    )
    return LayerConfig(attention, 48, "silu")


def config(method: Method, **changes: object) -> DrafterConfig:
    eagle = method in ("eagle3", "peagle")
    layers = tuple(
        layer(i, wide=eagle and i == 0, causal=eagle or i == 1, window=9 if i == 1 else None) for i in range(2)
    )
    spark = method == "dspark"
    made = DrafterConfig(
        method=method,
        vocab_size=V,
        draft_vocab_size=VD,
        width=D,
        taps=TAPS,
        layers=layers,
        norm_eps=1e-6,
        max_positions=128,
        own_embed=True,
        own_head=True,
        mask_token=None if method == "eagle3" else MASK,
        eagle=EagleConfig(norm_before_residual=True, fc_norm=True, norm_output=True) if eagle else None,
        block=None
        if eagle
        else BlockConfig(
            BLOCK,
            sample_from_anchor=spark,
            markov=MarkovConfig("rnn", 4) if spark else None,
            confidence=ConfidenceConfig(with_markov=True) if spark else None,
        ),
    )
    return replace(made, **changes)


def with_block(made: DrafterConfig, **changes: object) -> DrafterConfig:
    assert made.block is not None
    return replace(made, block=replace(made.block, **changes))


CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": config("eagle3"),
    "eagle3 plain": config("eagle3", eagle=EagleConfig(norm_before_residual=False, norm_before_fc=True)),
    "peagle": config("peagle"),
    "dflash": config("dflash"),
    "dflash from anchor": with_block(config("dflash"), sample_from_anchor=True),
    "dspark": config("dspark"),
    "dspark not from anchor": with_block(config("dspark"), sample_from_anchor=False),
    "dspark gated": with_block(config("dspark"), markov=MarkovConfig("gated", 4)),
    "dspark rank 0": with_block(config("dspark"), markov=None, confidence=ConfidenceConfig(with_markov=False)),
}


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def drafter(request: pytest.FixtureRequest) -> Jitted:
    """A random drafter whose norms and map are random too."""
    made = CONFIGS[request.param]
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_drafter(made, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def fill(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype == jnp.int32:
            return np.sort(rng.permutation(V)[:VD]).astype(np.int32)
        noise = 0.3 * rng.standard_normal(leaf.shape, np.float32)
        return noise if leaf.ndim > 1 else 1 + noise

    return Jitted(nnx.merge(graphdef, jax.tree.map(fill, state)))


@pytest.fixture(scope="module")
def sequence() -> tuple[np.ndarray, np.ndarray]:
    """Features [1, LENGTH, F] and the tokens [1, LENGTH] that follow."""
    rng = np.random.default_rng(2)
    features = rng.standard_normal((1, LENGTH, len(TAPS) * D), np.float32)
    return features, rng.integers(0, V - 1, (1, LENGTH), np.int32)


def empty(drafter: Jitted, batch: int = 1) -> KVCache:
    return KVCache.empty(attention_layers(drafter.config), batch, 48, jnp.float32)


def context(features: np.ndarray, tokens: np.ndarray, start: int, stop: int) -> Context:
    """Rows start..stop-1, padded."""
    return padded_context(features, tokens, start, stop, PADDED)


def poison(cache: KVCache) -> KVCache:
    """NaN in every slot that isn't committed."""
    length = np.asarray(cache.length)

    def fill(entry: jax.Array) -> np.ndarray:
        stale = np.arange(entry.shape[2])[None] >= length[:, None]
        return np.where(stale[:, None, :, None], np.float32(np.nan), entry)

    return replace(cache, k=tuple(map(fill, cache.k)), v=tuple(map(fill, cache.v)))


def check_same(got: Proposal, want: Proposal, row: int = 0) -> None:
    np.testing.assert_array_equal(np.asarray(got.tokens)[row], np.asarray(want.tokens)[0])
    if want.confidence is not None:
        assert got.confidence is not None
        np.testing.assert_allclose(np.asarray(got.confidence)[row], np.asarray(want.confidence)[0], rtol=1e-4)


def drafts_of(drafter: Jitted) -> int:
    return drafter.config.max_drafts or 5


def test_context_in_pieces_with_rejected_rows_drafts_as_in_one_go(drafter, sequence):
    features, tokens = sequence
    drafts = drafts_of(drafter)
    want, _ = drafter.draft(context(features, tokens, 0, LENGTH), empty(drafter), drafts)
    cache = poison(drafter.prefill(context(features, tokens, 0, 7), poison(empty(drafter))))
    for start, stop in ((7, 8), (8, 13), (13, 15)):
        _, cache = drafter.draft(context(features, tokens, start, stop), cache, drafts)
        assert cache.length.tolist() == [stop]
        cache = poison(cache)
    got, cache = drafter.draft(context(features, tokens, 15, LENGTH), cache, drafts)
    check_same(got, want)


def test_ragged_rows_draft_as_alone(drafter, sequence):
    features, tokens = sequence
    drafts, lengths = drafts_of(drafter), (5, LENGTH, 12)
    contexts = [context(features, tokens, 0, n) for n in lengths]
    got, cache = drafter.draft(jax.tree.map(lambda *rows: np.concatenate(rows), *contexts), empty(drafter, 3), drafts)
    assert cache.length.tolist() == list(lengths)
    for row, alone in enumerate(contexts):
        check_same(got, drafter.draft(alone, empty(drafter), drafts)[0], row)


def test_fewer_drafts_are_the_first_drafts(drafter, sequence):
    features, tokens = sequence
    most, _ = drafter.draft(context(features, tokens, 0, LENGTH), empty(drafter), drafts_of(drafter))
    for drafts in (1, 3):
        fewer, _ = drafter.draft(context(features, tokens, 0, LENGTH), empty(drafter), drafts)
        np.testing.assert_array_equal(fewer.tokens, np.asarray(most.tokens)[:, :drafts])


def test_drafts_are_verifier_ids(drafter, sequence):
    features, tokens = sequence
    proposal, _ = drafter.draft(context(features, tokens, 0, LENGTH), empty(drafter), drafts_of(drafter))
    allowed = drafter.target_ids
    np.testing.assert_array_equal(allowed[proposal.ids], proposal.tokens)


def test_drafts_follow_the_context(drafter, sequence):
    features, tokens = sequence
    one, _ = drafter.draft(context(features, tokens, 0, LENGTH), empty(drafter), drafts_of(drafter))
    other, _ = drafter.draft(context(-features, tokens, 0, LENGTH), empty(drafter), drafts_of(drafter))
    assert (np.asarray(one.tokens) != np.asarray(other.tokens)).any()


def test_logits_are_those_that_drafts_come_from(drafter, sequence):
    features, tokens = sequence
    proposal, _ = drafter.draft(context(features, tokens, 0, 9), empty(drafter), drafts_of(drafter))
    block = drafter.config.block
    if block is None:
        slots = np.asarray(drafter.logits(features[:, :9], tokens[:, :9]))[:, -1:]
    else:
        drafted = np.concatenate([tokens[:, 8:9], proposal.tokens], axis=1)[:, : block.size]
        slots = np.asarray(drafter.logits(features[:, :9], drafted))
        slots = slots if block.sample_from_anchor else slots[:, 1:]
    allowed = drafter.target_ids
    np.testing.assert_array_equal(allowed[slots.argmax(-1)], np.asarray(proposal.tokens)[:, : slots.shape[1]])

"""Feature taps: which residual stream an id means, in both conventions, exactly."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import AttentionConfig, LayerConfig, RopeConfig, VerifierConfig
from jaxspec.errors import InputError
from jaxspec.layers.cache import KVCache
from jaxspec.layers.moe import route
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.taps import aux_ids, default_aux_ids, default_output_ids

LAYERS, WIDTH, VOCAB = 5, 8, 11
EMBEDDED = 64.0  # what the embedding puts into every channel


def small_config(**fields: object) -> VerifierConfig:
    """A Llama of L = 5 whose MLPs have biases."""
    attention = AttentionConfig(
        heads=2, kv_heads=1, head_dim=4, rope=RopeConfig(theta=10000.0, head_dim=4), scale=0.5, kv_source=0
    )
    layers = tuple(
        LayerConfig(attention=replace(attention, kv_source=i), mlp_width=6, activation="silu", mlp_bias=True)
        for i in range(LAYERS)
    )
    config = VerifierConfig(
        family="llama", vocab_size=VOCAB, width=WIDTH, layers=layers, norm_eps=1e-6, max_positions=64, tied=False
    )
    return replace(config, **fields)


def decoder_of(config: VerifierConfig, fill: Callable[[tuple[int, ...]], np.ndarray]) -> Decoder:
    """A float32 decoder whose every parameter is `fill` of its shape."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(fill(leaf.shape), jnp.float32), state))


@pytest.fixture(scope="module")
def doubling() -> Decoder:
    """A decoder whose layer i adds exactly 2^i to every channel of the stream, by the bias of its MLP."""
    decoder = decoder_of(small_config(), np.zeros)
    decoder.embed.weight[...] = jnp.full((VOCAB, WIDTH), EMBEDDED)
    for i, layer in enumerate(decoder.layers):
        layer.mlp.down.bias[...] = jnp.full(WIDTH, 2.0**i)
    return decoder


def run(decoder: Decoder, tokens: list[list[int]], taps: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """Logits [B, T, V] and features of one call on an empty cache."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def call(tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, jax.Array | None]:
        hidden, features, _ = decoder(tokens, cache, taps=taps)
        return decoder.logits(hidden), features

    layers = [layer.attention for layer in decoder.config.layers]
    return call(jnp.array(tokens, jnp.int32), KVCache.empty(layers, len(tokens), 16, jnp.float32))


def tapped(decoder: Decoder, taps: tuple[int, ...]) -> np.ndarray:
    """One value a tap [len(taps)]; checks that it stands in every row, token and channel."""
    _, features = run(decoder, [[1, 2, 3], [4, 5, 10]], taps)
    assert features is not None
    assert features.shape == (2, 3, len(taps) * WIDTH)
    values = np.asarray(features).reshape(2, 3, len(taps), WIDTH)
    np.testing.assert_array_equal(values, np.broadcast_to(values[:1, :1, :, :1], values.shape))
    return values[0, 0, :, 0]


@pytest.mark.parametrize("ids", [(1, 3), (0, 5), (0, 1, 2, 3, 4, 5)])
def test_aux_id_k_is_the_stream_entering_layer_k(doubling: Decoder, ids: tuple[int, ...]) -> None:
    found = tapped(doubling, aux_ids(ids, "aux", LAYERS))
    np.testing.assert_array_equal(found, [EMBEDDED + 2.0**k - 1 for k in ids])


@pytest.mark.parametrize("ids", [(1, 3), (-1, 4), (-1, 0, 1, 2, 3, 4)])
def test_output_id_t_is_what_layer_t_puts_out(doubling: Decoder, ids: tuple[int, ...]) -> None:
    found = tapped(doubling, aux_ids(ids, "output", LAYERS))
    np.testing.assert_array_equal(found, [EMBEDDED + 2.0 ** (t + 1) - 1 for t in ids])


def test_the_same_ids_differ_by_one_layer_between_conventions() -> None:
    assert aux_ids([1, 3], "aux", LAYERS) == (1, 3)
    assert aux_ids([1, 3], "output", LAYERS) == (2, 4)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_of_norm_of_the_last_tap_is_the_logits(softcap: float | None) -> None:
    rng = np.random.default_rng(0)
    decoder = decoder_of(small_config(logit_softcap=softcap), lambda shape: rng.normal(0.5, 0.5, shape))
    logits, features = run(decoder, [[1, 2, 3, 4]], (LAYERS,))
    stream = np.asarray(features, np.float64)
    normed = (
        stream / np.sqrt((stream**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(decoder.norm.weight[...], np.float64)
    )
    expected = normed @ np.asarray(decoder.head.weight[...], np.float64).T
    if softcap is not None:
        expected = softcap * np.tanh(expected / softcap)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_no_taps_give_no_features(doubling: Decoder) -> None:
    _, features = run(doubling, [[1, 2]], ())
    assert features is None


@pytest.mark.parametrize(
    ("ids", "convention", "named"),
    [
        ((1, 6), "aux", r"aux layer ids \[1, 6\] must lie in 0\.\.5 for a verifier of 5 layers"),
        ((-1, 2), "aux", r"must lie in 0\.\.5"),
        ((1, 5), "output", r"target_layer_ids \[1, 5\] must lie in -1\.\.4 for a verifier of 5 layers"),
        ((-2, 2), "output", r"must lie in -1\.\.4"),
        ((3, 1), "aux", "must be distinct and increasing"),
        ((1, 1), "output", "must be distinct and increasing"),
        ((), "aux", "are empty"),
        ((1.0, 2.0), "aux", "must be integers"),
        ((True, 2), "output", "must be integers"),
        ((1,), "input", "convention 'input' is unknown"),
    ],
)
def test_bad_tap_ids_are_named(ids: tuple[int, ...], convention: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        aux_ids(ids, convention, LAYERS)


@pytest.mark.parametrize("taps", [(6,), (-1,), (1, 1)])
def test_decoder_refuses_taps_it_does_not_have(doubling: Decoder, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="taps"):
        run(doubling, [[1, 2]], taps)


def test_default_aux_ids() -> None:
    assert default_aux_ids(36) == (2, 18, 33)
    assert default_aux_ids(30) == (2, 15, 27)
    assert default_aux_ids(7) == (2, 3, 4)
    with pytest.raises(InputError, match="6 layers"):
        default_aux_ids(6)


def test_default_output_ids_are_those_of_the_published_drafters() -> None:
    assert default_output_ids(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-8B
    assert default_output_ids(48, 5) == (1, 12, 23, 34, 45)  # Qwen3-30B-A3B
    assert default_output_ids(36, 1) == (18,)
    assert default_output_ids(30, 2) == (1, 27)
    assert default_output_ids(10, 5) == (1, 2, 4, 6, 7)  # 2.5 and 5.5 round to the even id
    for layers, drafts in ((5, 4), (3, 2), (36, 0)):
        with pytest.raises(InputError):
            default_output_ids(layers, drafts)


def test_routing_is_float32_whatever_the_logits_are() -> None:
    logits = (jax.random.normal(jax.random.key(1), (16, 8)) * 3).astype(jnp.bfloat16)
    for normalize in (False, True):
        weights, experts = route(logits, 3, normalize)
        exact_weights, exact_experts = route(logits.astype(jnp.float32), 3, normalize)
        assert weights.dtype == jnp.float32
        np.testing.assert_array_equal(experts, exact_experts)
        np.testing.assert_array_equal(weights, exact_weights)
        total = np.asarray(weights).sum(-1)
        assert np.allclose(total, 1.0, atol=1e-6) == normalize


def test_router_order_is_softmax_then_top_k_then_renormalise() -> None:
    logits = np.array([[2.0, 0.0, 1.0, -1.0]], np.float32)
    share = np.exp(logits) / np.exp(logits).sum()
    weights, experts = route(jnp.asarray(logits), 2, normalize=False)
    np.testing.assert_array_equal(experts, [[0, 2]])
    np.testing.assert_allclose(weights, share[:, [0, 2]], rtol=1e-6)
    weights, _ = route(jnp.asarray(logits), 2, normalize=True)
    np.testing.assert_allclose(weights, share[:, [0, 2]] / share[:, [0, 2]].sum(), rtol=1e-6)

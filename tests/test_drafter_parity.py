"""The drafters against their PyTorch originals: tests/goldens/drafters, made by tools/make_drafter_goldens.py.

Each meta.json names the peer. Everything is computed in float32 on the checkpoints' bfloat16 weights; logits and features must agree
to 1e-4 of their scale, greedy drafts to the token. `pytest tests/test_drafter_parity.py -rP` shows the errors.
"""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import QUICK_COMPILE, Jitted, padded_context

from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import LoadedVerifier, load_verifier
from jaxspec.drafters.base import attention_layers, greedy
from jaxspec.layers.cache import KVCache

GOLDENS = Path(__file__).parent / "goldens" / "drafters"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/meta.json"))
VERIFIERS = ["verifier", "verifier_gemma"]
TOLERANCE = 1e-4
CAPACITY = 32


@cache
def verifier(name: str) -> LoadedVerifier:
    return load_verifier(GOLDENS / name, dtype=jnp.float32)


class Case:
    """A fixture: the loaded drafter and what its original computed (`drafter_goldens.common.Outputs`)."""

    def __init__(self, name: str):
        directory = GOLDENS / name
        self.meta = json.loads((directory / "meta.json").read_text())
        with np.load(directory / "outputs.npz") as arrays:
            self.arrays = dict(arrays)
        self.sequence = self.arrays["sequence"].astype(np.int32)  # [1, T + 1]
        self.features = self.arrays["features"]  # [1, T, n * D]
        self.ends = self.arrays["ends"].tolist()  # rows committed at each draft
        loaded = load_drafter(directory, verifier=verifier(self.meta["verifier"]), dtype=jnp.float32)
        self.config = loaded.config
        self.drafter = Jitted(loaded.module)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def check(what: str, ours: jax.Array | np.ndarray, theirs: np.ndarray) -> None:
    """The largest absolute difference, over the largest absolute value of the reference."""
    assert ours.shape == theirs.shape
    error = np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()
    print(f"{what}: {error:.1e}")
    assert error <= TOLERANCE


def test_logits_equal_the_original(case: Case) -> None:
    """EAGLE-3 and P-EAGLE: the draft after every position. Block drafters: every slot of the block at the last anchor, the tokens
    before it being the true ones; and the confidence head's logits."""
    if case.config.block is None:
        check("logits", case.drafter.logits(case.features, case.sequence[:, 1:]), case.arrays["logits"])
        return
    end = case.ends[-1]
    features, tokens = case.features[:, :end], case.sequence[:, end : end + case.config.block.size]
    if case.config.method == "dflash":
        logits, confidence = case.drafter.logits(features, tokens), None
    else:
        logits, confidence = case.drafter.heads(features, tokens)
    check("logits", logits, case.arrays["logits"][-1:])
    assert (confidence is None) == ("confidence" not in case.arrays)
    if confidence is not None:
        check("confidence", confidence, case.arrays["confidence"][-1:])


def test_greedy_drafts_equal_the_original(case: Case) -> None:
    """Three cycles on one cache, each committing a few rows more: EAGLE-3's recycled steps, P-EAGLE's masked depths, block drafters'
    incremental context, DSpark's sequential sampling."""
    tokens, cache = case.sequence[:, 1:], KVCache.empty(attention_layers(case.config), 1, CAPACITY, jnp.float32)
    drafts = case.arrays["draft_tokens"].shape[1]
    assert case.config.max_drafts in (None, drafts)
    for row, (start, end) in enumerate(zip([0, *case.ends], case.ends, strict=False)):
        context = padded_context(case.features, tokens, start, end, rows=10)
        proposal, cache = case.drafter.draft(context, cache, drafts, greedy_with_logits)
        check(f"draft logits at {end}", proposal.log_q, case.arrays["draft_logits"][row : row + 1])
        np.testing.assert_array_equal(proposal.tokens, case.arrays["draft_tokens"][row : row + 1])
        assert (proposal.confidence is None) == ("draft_confidence" not in case.arrays)
        if proposal.confidence is not None:
            theirs = 1 / (1 + np.exp(-case.arrays["draft_confidence"][row : row + 1]))
            check(f"draft confidence at {end}", proposal.confidence, theirs)


def greedy_with_logits(logits: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`greedy`, with the logits where the log-probabilities would be."""
    return greedy(logits, slot)[0], logits


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifier_gives_the_features_that_the_originals_take(name: str) -> None:
    """The taps of each format (aux ids, layer outputs, defaults, the embeddings, the last stream) mean the same streams."""
    module = verifier(name).module
    layers = [layer.attention for layer in module.config.layers]
    graphdef, state = nnx.split(module)

    def streams(state: nnx.State, tokens: jax.Array) -> jax.Array:
        every_tap = tuple(range(module.config.num_layers + 1))
        empty = KVCache.empty(layers, *tokens.shape, jnp.float32)
        features = nnx.merge(graphdef, state)(tokens, empty, taps=every_tap)[1]
        return features.reshape(*tokens.shape, len(every_tap), module.config.width)

    cases = [Case(case) for case in CASES if json.loads((GOLDENS / case / "meta.json").read_text())["verifier"] == name]
    tokens = np.concatenate([case.sequence[:, :-1] for case in cases])
    rows = np.asarray(jax.jit(streams, compiler_options=QUICK_COMPILE)(state, tokens))  # [cases, T, L + 1, D]
    for case, row in zip(cases, rows, strict=True):
        assert list(case.config.taps) == case.meta["taps"]
        check(case.meta["case"], row[:, case.config.taps, :].reshape(case.features[0].shape), case.features[0])

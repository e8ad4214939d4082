"""Training forwards against decoding: with the data's tokens before every draft, both must give the same logits, packed or not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_drafters as tiny
from flax import nnx
from jitted import QUICK_COMPILE

from jaxspec.drafters.base import Context, attention_layers
from jaxspec.drafters.build import build_drafter
from jaxspec.drafters.config import BlockConfig, ConfidenceConfig, DrafterConfig, EagleConfig, MarkovConfig
from jaxspec.layers.cache import KVCache
from jaxspec.training import losses
from jaxspec.training.anchors import chains_at, choose_anchors, choose_chains
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objective_of import plan_objective
from jaxspec.training.objectives.base import Metrics, Target, take, terms_of
from jaxspec.training.objectives.block import BlockObjective
from jaxspec.training.objectives.eagle3 import Eagle3Objective
from jaxspec.training.objectives.peagle import PEagleObjective
from jaxspec.training.recipe import ObjectiveRecipe

V, D, WIDTH = tiny.V, tiny.D, 2 * tiny.D
LENGTHS = ((13, 9), (20,))  # documents of each row
T = 24  # and padding behind them
K = 4


def packed(seed: int = 0) -> tuple[Batch, Features]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (2, T), dtype=np.int32)
    documents, positions = np.full((2, T), -1, np.int32), np.zeros((2, T), np.int32)
    mask = np.zeros((2, T), bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            mask[row, start + 3 : start + length] = True
            start += length
    batch = Batch(*map(jnp.asarray, (tokens, documents, positions, mask)))
    taps = rng.standard_normal((2, T, WIDTH)).astype(np.float32)
    last = rng.standard_normal((2, T, D)).astype(np.float32)
    return batch, Features(jnp.asarray(taps), jnp.asarray(last))


def target(seed: int = 1) -> Target:
    rng = np.random.default_rng(seed)
    head = rng.standard_normal((V, D)).astype(np.float32)
    return Target(jnp.ones(D), jnp.asarray(head), None, 1e-6)


def module(config: DrafterConfig) -> Any:
    drafter = build_drafter(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(5)

    def larger(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape).astype(np.float32) * 0.3)

    nnx.update(drafter, jax.tree.map(larger, nnx.state(drafter, nnx.Param)))
    return drafter


def served(drafter: Any, drafts: int) -> Callable[[jax.Array, jax.Array, int], np.ndarray]:
    """Gives logits [K, V] of the drafts behind an anchor of one document, each with the data's tokens before it: of tokens int32 [n],
    features [n, F] and the anchor's index."""
    graphdef, state = nnx.split(drafter)

    def run(state: nnx.State, tokens: jax.Array, taps: jax.Array, anchor: jax.Array) -> jax.Array:
        def choose(logits: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
            return tokens[anchor + 1 + first + jnp.arange(logits.shape[1])][None], logits

        context = Context(taps[None], tokens[None, 1 : T + 1], anchor[None])
        cache = KVCache.empty(attention_layers(drafter.config), 1, T + 16, jnp.float32)
        log_q = nnx.merge(graphdef, state).draft(context, cache, drafts, choose)[0].log_q
        assert log_q is not None
        return log_q[0]

    program = jax.jit(run, compiler_options=QUICK_COMPILE)

    def logits(tokens: jax.Array, taps: jax.Array, anchor: int) -> np.ndarray:
        missing = T - len(tokens)
        tokens = jnp.pad(tokens, (0, missing + drafts + 2))
        return np.asarray(program(state, tokens, jnp.pad(taps, ((0, missing), (0, 0))), jnp.int32(anchor)))

    return logits


def trained_program(drafter: Any) -> Callable[[Batch, Features, jax.Array], jax.Array]:
    """Gives logits [B, A, K, V] behind anchors int32 [B, A], by the training forward."""
    method, (graphdef, state) = drafter.config.method, nnx.split(drafter)

    def run(state: nnx.State, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        drafter = nnx.merge(graphdef, state)
        if method == "eagle3":
            passes = Eagle3Objective(steps=K).passes(drafter, batch, features, K)
            return drafter.logits_of(take(jnp.stack(passes, axis=2), anchors - 1))
        if method == "peagle":
            rows = [jnp.broadcast_to(jnp.arange(T)[None], (2, T))] + [anchors - 1 + d for d in range(1, K)]
            streams = PEagleObjective(K).streams(drafter, batch, features, anchors - 1, rows)
            first = take(streams[:, :T], anchors - 1)
            rest = streams[:, T:].reshape(2, K - 1, anchors.shape[1], D).swapaxes(1, 2)
            return drafter.logits_of(jnp.concatenate([first[:, :, None], rest], axis=2))
        block = drafter.config.block
        objective = BlockObjective(block.size, block.sample_from_anchor)
        return objective.heads(drafter, batch, objective.denoise(drafter, batch, features, anchors), anchors)[0]

    return partial(jax.jit(run, compiler_options=QUICK_COMPILE), state)


def sliding(**changes: Any) -> dict[str, Any]:
    return {"layers": tiny.layers(windows=(5, None), **changes)}


def spark(kind: Any, anchored: bool) -> DrafterConfig:
    block = BlockConfig(5 + (not anchored), anchored, MarkovConfig(kind, 4), ConfidenceConfig(True))
    return tiny.block("dspark", block=block)


CASES = {
    "eagle3": tiny.eagle("eagle3"),
    "eagle3 norms": tiny.eagle("eagle3", eagle=EagleConfig(True, fc_norm=True, norm_output=True)),
    "eagle3 window": tiny.eagle("eagle3", layers=tiny.layers(1, wide=True, causal=True, windows=(6,))),
    "peagle": tiny.eagle("peagle"),
    "peagle window": tiny.eagle("peagle", layers=tiny.layers(2, wide=True, causal=True, windows=(6, None))),
    "dflash": tiny.block("dflash"),
    "dflash from anchor": tiny.block("dflash", block=BlockConfig(5, True)),
    "dflash causal window": tiny.block("dflash", **sliding()),
    "dflash window both ways": tiny.block("dflash", **sliding(causal=False)),
    "dflash window from block": tiny.block("dflash", **sliding(from_block=True)),
    "dspark": spark("vanilla", True),
    "dspark gated": spark("gated", False),
    "dspark rnn": spark("rnn", False),
    "dspark rnn from anchor": spark("rnn", True),
}


@pytest.mark.parametrize("name", CASES)
def test_training_and_decoding_give_the_same_logits(name: str) -> None:
    drafter = module(CASES[name])
    batch, features = packed()
    anchors = jnp.array([[5, 8, 15, 17], [2, 5, 11, 15]], jnp.int32)
    logits, decoded = np.asarray(trained_program(drafter)(batch, features, anchors)), served(drafter, K)
    for row in range(2):
        for number, anchor in enumerate(anchors[row].tolist()):
            document = int(batch.documents[row, anchor])
            inside = np.flatnonzero(np.asarray(batch.documents[row]) == document)
            start, stop = inside[0], inside[-1] + 1
            tokens, taps = batch.tokens[row, start:stop], features.taps[row, start:stop]
            want = decoded(tokens, taps, anchor - start)
            last = min(K, stop - anchor)  # later drafts have tokens of another document before them
            got = logits[row, number, :last]
            assert np.max(np.abs(got - want[:last])) < 2e-5 * np.max(np.abs(want)), (row, anchor)


def objectives() -> dict[str, tuple[DrafterConfig, Any]]:
    both = {"ce": 0.1, "tv": 0.9}
    return {
        "eagle3": (CASES["eagle3"], Eagle3Objective(steps=3)),
        "peagle": (CASES["peagle"], PEagleObjective(4, seeds=8)),
        "dflash": (CASES["dflash"], BlockObjective(6, False, 5, decay="dpace")),
        "dspark": (CASES["dspark"], BlockObjective(5, True, 5, both, "fixed", confidence=1.0)),
        "dspark data": (
            CASES["dspark rnn"],
            BlockObjective(6, False, 5, both, "fixed", labels="data", normalise="weights", confidence=0.5),
        ),
    }


@cache
def gradient_program(name: str, chunk: int | None) -> Callable[[Batch, Features, Any], Any]:
    """((loss, metrics), gradients) of a batch, its features and the choices, by the objective `name` in chunks."""
    config, objective = objectives()[name]
    objective = replace(objective, chunk=chunk, scored=chunk)
    graphdef, state = nnx.split(module(config))

    def of(state: nnx.State, batch: Batch, features: Features, choices: Any) -> tuple[jax.Array, Metrics]:
        sums, metrics = objective.sums(nnx.merge(graphdef, state), target(), batch, features, choices)
        return jnp.sum(terms_of(sums, objective.weights(batch, choices))), metrics

    program = jax.jit(jax.value_and_grad(of, has_aux=True, allow_int=True), compiler_options=QUICK_COMPILE)
    return partial(program, state)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])  # without and with slots of one block
def test_chunks_change_nothing(name: str) -> None:
    batch, features = packed()
    choices = objectives()[name][1].choose(jax.random.key(0), batch)
    (whole, metrics), grads = gradient_program(name, None)(batch, features, choices)
    (parts, again), part_grads = gradient_program(name, 3)(batch, features, choices)
    assert whole > 0 and abs(whole - parts) < 1e-6 * abs(whole)
    assert metrics.accepted.tolist() == again.accepted.tolist()
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(part_grads), strict=True):
        if one.dtype == jnp.float32:
            assert jnp.max(jnp.abs(one - other)) <= 1e-5 * jnp.max(jnp.abs(one)) + 1e-9


@pytest.mark.parametrize("name", objectives())
def test_documents_do_not_leak(name: str) -> None:
    """Another first document in row 0 changes nothing that the second one gives."""
    batch, features = packed()
    other, other_features = packed(seed=9)
    first = jnp.asarray(batch.documents == 0) & (jnp.arange(2) == 0)[:, None]
    changed = replace(batch, tokens=jnp.where(first, other.tokens, batch.tokens))
    changed_features = jax.tree.map(lambda new, old: jnp.where(first[..., None], new, old), other_features, features)
    only_second = batch.loss_mask & ~first
    batch, changed = replace(batch, loss_mask=only_second), replace(changed, loss_mask=only_second)
    choices = objectives()[name][1].choose(jax.random.key(3), batch)
    (one, _), grads = gradient_program(name, None)(batch, features, choices)
    (two, _), changed_grads = gradient_program(name, None)(changed, changed_features, choices)
    assert one == two
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(changed_grads), strict=True):
        if a.dtype == jnp.float32:
            assert (a == b).all()


def test_a_block_never_sees_what_it_must_predict() -> None:
    """Anchors three apart, blocks of 6: another tail from an anchor on leaves that anchor's logits as they are (SpecForge #470)."""
    drafter, (batch, features) = module(CASES["dflash"]), packed()
    other, other_features = packed(seed=9)
    logits = trained_program(drafter)
    anchors = jnp.array([[2, 5, 8, 11], [3, 6, 9, 12]], jnp.int32)
    before = logits(batch, features, anchors)
    for number in range(4):
        anchor = anchors[:, number, None]
        at = jnp.arange(T)[None]
        changed = replace(batch, tokens=jnp.where(at > anchor, other.tokens, batch.tokens))
        tail = Features(jnp.where((at >= anchor)[..., None], other_features.taps, features.taps), other_features.last)
        after = logits(changed, tail, anchors)
        assert (before[:, number] == after[:, number]).all()
        if number:
            assert not (before[:, -1] == after[:, -1]).all() or number == 3


def test_anchors_stay_where_an_answer_follows() -> None:
    batch, _ = packed()
    seen = set()
    for seed in range(40):
        anchors = np.asarray(choose_anchors(jax.random.key(seed), batch, 7))
        for row in range(2):
            chosen = anchors[row][anchors[row] >= 0].tolist()
            assert len(set(chosen)) == len(chosen) == 7 and chosen == sorted(chosen)
            seen |= {(row, anchor) for anchor in chosen}
    documents, mask = np.asarray(batch.documents), np.asarray(batch.loss_mask)
    want = {
        (row, at)
        for row in range(2)
        for at in range(T - 1)
        if mask[row, at + 1] and documents[row, at] == documents[row, at + 1]
    }
    assert seen == want


def test_chains_are_nested_and_stay_in_their_document() -> None:
    batch, _ = packed()
    documents, mask = np.asarray(batch.documents), np.asarray(batch.loss_mask)
    sizes = chains_at(16, 4, 0.7, 0.2)
    deepest = 0
    for seed in range(20):
        chains = jax.tree.map(np.asarray, choose_chains(jax.random.key(seed), batch, 4, 0.7, 0.2, 16))
        assert (np.diff(chains.lengths, axis=1) <= 0).all()
        for row in range(2):
            lengths = chains.lengths[row]
            assert all((lengths >= depth).sum() <= size for depth, size in enumerate(sizes, start=1))
            for anchor, length in zip(chains.anchors[row], lengths, strict=True):
                for depth in range(1, length + 1):
                    assert documents[row, anchor] == documents[row, anchor + depth + 1] >= 0
                    assert mask[row, anchor + depth + 1]
        deepest = max(deepest, chains.lengths.max())
    assert deepest == 3


@pytest.mark.parametrize("labels", ["verifier", "data"])
def test_dpace_is_of_the_cross_entropy_whatever_the_losses(labels: Any) -> None:
    """And a label that the draft vocabulary lacks is never drafted: nothing hangs on the slots behind it."""
    drafter, (batch, features) = module(CASES["dflash"]), packed()
    objective = BlockObjective(6, False, 5, {"kl": 1.0}, "dpace", labels=labels)
    half = target()
    if labels == "data":
        half = replace(half, draft_ids=jnp.where(jnp.arange(V) % 2 == 0, jnp.arange(V, dtype=jnp.int32), -1))
    choices = objective.choose(jax.random.key(0), batch)
    sums, _ = objective.sums(drafter, half, batch, features, choices)
    source, label = (index[..., 1:] for index in objective.indices(choices))
    logits, _ = objective.heads(drafter, batch, objective.denoise(drafter, batch, features, choices), choices)
    wanted, counts = half.logits(take(features.last, source)), objective.counts(batch, choices)[..., 1:]
    ids = half.labels(take(batch.tokens, label))
    if labels == "data":
        assert (counts & (ids < 0)).any() and (counts & (ids >= 0)).any()
        ce = jnp.where(ids < 0, jnp.inf, losses.ce_on_labels(logits, ids))
    else:
        ce = losses.position_loss("ce", logits, wanted)
    want = jnp.where(counts, losses.position_loss("kl", logits, wanted) * losses.dpace(ce, counts, 0.5), 0.0)
    np.testing.assert_allclose(sums[0], jnp.sum(want), rtol=1e-5)


@pytest.mark.parametrize(("decay", "divisor"), [("fixed", "weights"), ("dpace", "slots"), ("none", "slots")])
def test_the_datas_labels_are_divided_by_what_they_were_weighed_with(decay: Any, divisor: str) -> None:
    made = plan_objective(ObjectiveRecipe(labels="data", decay=decay), CASES["dflash"], 64).objective
    assert isinstance(made, BlockObjective) and made.normalise == divisor

"""What a training objective may look at: the document's past, never what it must predict, never another document.

On the drafters and batches of tests/goldens/training. Dependence is read off derivatives: exactly zero where nothing is seen.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import QUICK_COMPILE
from training_case import TrainingCase

from jaxspec.drafters.dspark import DSpark
from jaxspec.training.anchors import Chains
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Metrics, terms_of
from jaxspec.training.objectives.block import BlockObjective
from jaxspec.training.objectives.eagle3 import Eagle3Objective
from jaxspec.training.objectives.peagle import PEagleObjective


def reach(case: TrainingCase, logits: Any, taps: jax.Array) -> np.ndarray:
    """bool [rows, T]: on which positions of row 0 each of the rows that `logits(drafter, taps)` [rows, ...] returns depends."""
    graphdef, state = nnx.split(case.drafter)

    def rows(taps: jax.Array) -> jax.Array:
        made = logits(nnx.merge(graphdef, state), taps)
        # Fixed random weights, so that no sum cancels.
        weights = jax.random.normal(jax.random.key(0), made.shape)
        return jnp.sum((weights * made).reshape(made.shape[0], -1), axis=1)

    jacobian = jax.jit(jax.jacrev(rows), compiler_options=QUICK_COMPILE)(taps)  # [rows, 1, T, n * D]
    assert jnp.isfinite(jacobian).all()
    return np.asarray(jnp.abs(jacobian[:, 0]).max(-1) > 0)


@pytest.mark.parametrize(
    "name", ["dflash", "dflash_sliding", "dflash_sliding_both_ways", "dspark_vanilla", "dspark_rnn"]
)
def test_a_block_sees_its_document_before_its_anchor(name: str) -> None:
    """Anchors three apart, blocks of six that overlap (SpecForge #470), in two documents."""
    case = TrainingCase(name)
    assert isinstance(case.objective, BlockObjective)
    objective, batch = case.objective, case.batch
    stop = int(batch.documents[0].max()) and int(jnp.argmax(batch.documents[0] == 1))
    length = int(jnp.sum(batch.documents[0] >= 0))
    anchors = [1, 4, 7, 10, 13, *([stop, stop + 3, stop + 6] if stop else [16, 19, 22])]
    assert anchors[-1] < length

    def logits(drafter: Any, taps: jax.Array) -> jax.Array:
        features = replace(case.features, taps=taps)
        chosen = jnp.array([anchors], jnp.int32)
        return objective.heads(drafter, batch, objective.denoise(drafter, batch, features, chosen), chosen)[0][0]

    seen = reach(case, logits, case.features.taps)
    windows = [layer.attention.window for layer in case.config.layers]
    for row, anchor in enumerate(anchors):
        first = stop if stop and anchor >= stop else 0
        if None not in windows:
            first = max(first, anchor - max(window or 0 for window in windows))
        assert np.flatnonzero(seen[row]).tolist() == list(range(first, anchor)), anchor


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_rnn"])
def test_a_slot_of_the_sequential_head_sees_the_tokens_before_it(name: str) -> None:
    """Another token at anchor + j changes the drafts of what follows it, and nothing before: all of them where the head is recurrent."""
    case = TrainingCase(name)
    assert isinstance(case.objective, BlockObjective) and isinstance(case.drafter, DSpark)
    objective, anchor = case.objective, 7
    graphdef, state = nnx.split(case.drafter)

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        batch = replace(case.batch, tokens=tokens)
        drafter, chosen = nnx.merge(graphdef, state), jnp.array([[anchor]], jnp.int32)
        hidden = objective.denoise(drafter, batch, case.features, chosen)
        return objective.heads(drafter, batch, hidden, chosen)[0][0, 0]

    tokens, drafts = np.asarray(case.batch.tokens), objective.size - objective.first
    before = np.asarray(logits(case.batch.tokens))
    for offset in range(1, objective.size + 2):
        changed = tokens.copy()
        changed[0, anchor + offset] = (changed[0, anchor + offset] + 1) % 90
        differs = (np.asarray(logits(jnp.asarray(changed))) != before).any(-1)
        # Draft k stands at anchor + 1 + k.
        reached = range(offset, drafts) if name == "dspark_rnn" else range(offset, min(offset + 1, drafts))
        assert np.flatnonzero(differs).tolist() == list(reached), offset


def test_a_pass_of_eagle3_sees_its_document_up_to_its_row() -> None:
    case = TrainingCase("eagle3")
    objective, documents = case.objective, np.asarray(case.batch.documents[0])
    assert isinstance(objective, Eagle3Objective)
    rows = np.flatnonzero(documents >= 0)[::4]

    def logits(drafter: Any, taps: jax.Array) -> jax.Array:
        passes = objective.passes(drafter, case.batch, replace(case.features, taps=taps), 3)
        return jnp.stack([one[0, rows] for one in passes]).reshape(3 * len(rows), -1)

    seen = reach(case, logits, case.features.taps)
    every = np.arange(len(documents))
    for index, row in enumerate(np.tile(rows, 3)):
        np.testing.assert_array_equal(seen[index], (every <= row) & (documents == documents[row]), str(row))


def test_a_chain_of_peagle_sees_its_document_up_to_its_anchor() -> None:
    """Overlapping chains, and the mask pairs before each depth only."""
    case = TrainingCase("peagle")
    objective, documents = case.objective, np.asarray(case.batch.documents[0])
    assert isinstance(objective, PEagleObjective)
    anchors = jnp.array([[2, 4, 5, 9, 17, 18]], jnp.int32)
    rows = [jnp.arange(len(documents), dtype=jnp.int32)[None]] + [anchors + depth for depth in (1, 2, 3)]

    def logits(drafter: Any, taps: jax.Array) -> jax.Array:
        streams = objective.streams(drafter, case.batch, replace(case.features, taps=taps), anchors, rows)
        return streams[0, len(documents) :]

    seen = reach(case, logits, case.features.taps)
    every = np.arange(len(documents))
    for index, anchor in enumerate(np.tile(np.asarray(anchors[0]), 3)):
        np.testing.assert_array_equal(seen[index], (every <= anchor) & (documents == documents[anchor]), str(anchor))


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "dflash_from_anchor", "dspark_rnn"])
def test_packed_documents_learn_what_they_learn_alone(name: str) -> None:
    """With prompts as answers too, where speculators lets the drafts behind a document's end learn from the next document."""
    case = TrainingCase(name)
    if isinstance(case.objective, PEagleObjective):
        case.objective = replace(case.objective, ratio=1.0)  # no chain is dropped
    documents = np.asarray(case.batch.documents[0])
    everything = replace(case.batch, loss_mask=jnp.asarray(documents >= 0)[None])
    whole = anchored(case, everything, np.flatnonzero(documents >= 0))
    packed_sums, packed_weights, packed_metrics = evaluate(case, everything, case.features, whole)
    parts = []
    for number in range(2):
        inside = np.flatnonzero(documents == number)
        place = slice(inside[0], inside[-1] + 1)
        alone = pad(jax.tree.map(lambda x, place=place: x[:, place], everything), len(documents))
        alone = replace(alone, documents=jnp.where(jnp.arange(len(documents)) < len(inside), 0, -1)[None])
        features = pad(jax.tree.map(lambda x, place=place: x[:, place], case.features), len(documents))
        choices = anchored(case, alone, np.arange(len(inside)))
        parts.append(evaluate(case, alone, features, choices))
    sums, weights, metrics = jax.tree.map(lambda *each: sum(each), *parts)
    np.testing.assert_array_equal(packed_weights, weights)
    np.testing.assert_allclose(packed_sums, sums, rtol=1e-5)
    assert float(packed_metrics.anchors) == float(metrics.anchors)
    if name != "peagle":  # whose acceptance at a depth is an estimate from all chains
        np.testing.assert_array_equal(packed_metrics.accepted, metrics.accepted)


def anchored(case: TrainingCase, batch: Batch, places: np.ndarray) -> Any:
    """Choices with an anchor at every third of `places`; P-EAGLE's chains as deep as they can be there."""
    if case.config.method == "eagle3":
        return None
    anchors, count = places[::3], 12
    if case.config.method == "peagle":
        documents, depths = np.asarray(batch.documents[0]), 4
        reach = [
            max(d for d in range(depths) if a + d + 1 < len(documents) and documents[a + d + 1] == documents[a])
            if a + 1 < len(documents) and documents[a + 1] == documents[a]
            else 0
            for a in anchors
        ]
        order = np.argsort([-each for each in reach], kind="stable")
        rows = [np.pad(np.asarray(x)[order], (0, count - len(order))) for x in (anchors, reach)]
        return Chains(*(jnp.asarray(row[None], jnp.int32) for row in rows))
    return jnp.asarray(np.pad(anchors, (0, count - len(anchors)), constant_values=-1)[None], jnp.int32)


def pad(tree: Any, length: int) -> Any:
    """Every [B, T, ...] of the tree with zeros behind, up to `length`."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2))), tree)


def evaluate(
    case: TrainingCase, batch: Batch, features: Features, choices: Any
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Sums, weights and metrics of the objective."""
    graphdef, state = nnx.split(case.drafter)

    def run(batch: Batch, features: Features, choices: Any) -> tuple[jax.Array, jax.Array, Metrics]:
        drafter = nnx.merge(graphdef, state)
        sums, metrics = case.objective.sums(drafter, case.target, batch, features, choices)
        return sums, case.objective.weights(batch, choices), metrics

    return jax.jit(run, compiler_options=QUICK_COMPILE)(batch, features, choices)


def test_rows_add_up() -> None:
    """Sums, weights and metrics of a batch are those of its rows together, so that micro-batches make the step of one batch."""
    case = TrainingCase("deepspec_dspark")
    whole = evaluate(case, case.batch, case.features, case.choices)
    rows = [
        evaluate(case, *jax.tree.map(lambda x, row=row: x[row : row + 1], (case.batch, case.features, case.choices)))
        for row in range(2)
    ]
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(jax.tree.map(jnp.add, *rows)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_last_stream_is_not_looked_at_without_a_term_that_needs_it() -> None:
    """Cross-entropy on the data's tokens and no confidence head: features without a usable last stream do (TorchSpec #127)."""
    case = TrainingCase("deepspec_dflash")
    blind = replace(case.features, last=jnp.full_like(case.features.last, jnp.nan))
    sums, weights, _ = evaluate(case, case.batch, blind, case.choices)
    np.testing.assert_allclose(float(jnp.sum(terms_of(sums, weights))), case.meta["loss"], rtol=1e-5)

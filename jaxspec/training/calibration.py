"""Calibration of a finished DSpark's confidences on held-out documents: temperatures, their figures, the reliability picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.drafters.checks import check_verifier
from jaxspec.checkpoint.drafters.export import store_temperatures
from jaxspec.checkpoint.drafters.load import OpenedDrafter, open_drafter
from jaxspec.checkpoint.orbax import name_of
from jaxspec.drafters.dspark import DSpark
from jaxspec.errors import InputError
from jaxspec.sharding import by_rows, rows, whole
from jaxspec.training.batch import Batch, Features
from jaxspec.training.features import FeatureStore
from jaxspec.training.files import RELIABILITY
from jaxspec.training.initial import initial_drafter
from jaxspec.training.objectives.block import BlockObjective
from jaxspec.training.online import VerifierParts, load_leaves, verifier_dtype
from jaxspec.training.packing import batches
from jaxspec.training.placement import check_rows, make_mesh
from jaxspec.training.recipe import DrafterRecipe, Recipe
from jaxspec.training.samples import Sample
from jaxspec.training.setup import Say, VerifierSide, compute_dtype, feature_source, load_documents, open_side
from jaxspec.training.step import DrafterParts
from jaxspec.training.temperatures import BINS, calibration_error, fit_temperatures, survivals
from jaxspec.training.validation import cycles, everywhere, in_a_row

Confidences = Callable[[Batch, Features | None, np.ndarray], tuple[jax.Array, jax.Array]]
"""Of a batch at anchors int32 [B, A]: as `BlockObjective.confidences`."""


@dataclass(frozen=True)
class Observed:
    """What greedy cycles had.

    Fields:
        logits: float64 [N, K], of the confidence head, not divided by temperatures.
        accepted: int64 [N], drafts accepted in a row, 0 .. K.
    """

    logits: np.ndarray
    accepted: np.ndarray

    def happened(self) -> np.ndarray:
        """bool [N, K], whether drafts 1 .. k were all accepted."""
        return self.accepted[:, None] > np.arange(self.logits.shape[1])[None]


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and how well the survivals of other documents' cycles fit then.

    Fields:
        temperatures: one for each draft.
        judged: the cycles that the errors are of; none of them was fitted to.
    """

    temperatures: tuple[float, ...]
    judged: Observed

    def survivals(self, calibrated: bool) -> np.ndarray:
        """Predicted probabilities [N, K] that drafts 1 .. k are all accepted, after or before."""
        return survivals(self.judged.logits, np.array(self.temperatures) if calibrated else None)

    def errors(self, calibrated: bool) -> list[float]:
        """The ECE of each draft's survival."""
        predicted, happened = self.survivals(calibrated), self.judged.happened()
        return [calibration_error(predicted[:, k], happened[:, k]) for k in range(predicted.shape[1])]

    def error(self, calibrated: bool) -> float:
        """The ECE of all of them together."""
        return calibration_error(self.survivals(calibrated).ravel(), self.judged.happened().ravel())

    def lines(self) -> list[str]:
        """In words, a line for each draft and one for all."""
        pairs = zip(self.temperatures, self.errors(False), self.errors(True), strict=True)
        each = [
            f"draft {k}: temperature {temperature:.3g}, calibration error {before:.2%} -> {after:.2%}"
            for k, (temperature, before, after) in enumerate(pairs, 1)
        ]
        before, after = self.error(False), self.error(True)
        made = [*each, f"all drafts: calibration error {before:.2%} -> {after:.2%}"]
        return made if after <= before else [*made, "warning: the error rose; more held-out documents are wanted"]


def calibrate(recipe: Recipe, directory: Path, say: Say) -> Calibration:
    """Fits the temperatures of the drafter in `directory` on the recipe's held-out documents, and stores them with it.

    Cycles are those of greedy generation, as in validation. They are fitted on every other held-out document and judged on the rest; of the
    recipe only the verifier, the data, and the sizes of batches matter.

    Raises InputError for a drafter without a confidence head, or of another verifier, and for too few held-out documents.
    """
    if not directory.is_dir():
        raise InputError(f"--calibrate {directory}: no such directory; the temperatures are stored there")
    side = open_side(recipe.verifier, say)
    opened = _open(directory, side.config.num_layers)
    check_verifier(opened.config, opened.verifier.num_layers, side.config, f"--calibrate {directory}")
    documents = load_documents(recipe.data, side, recipe.run.seed, say).validation
    if len(documents) < 2:
        raise InputError(
            f"--calibrate: {len(documents)} documents are held out; data.validation or data.validation_share gives the two or more that "
            "it needs"
        )
    confidences, store = _program(recipe, opened, side)
    if store is not None:
        store.require(documents)
    fitted, judged = (observe(recipe, half, opened, confidences, store) for half in (documents[::2], documents[1::2]))
    for found in (fitted, judged):
        if not len(found.accepted):
            raise InputError("--calibrate: no held-out answer is as long as the drafter's block")
    temperatures = tuple(fit_temperatures(fitted.logits, fitted.accepted).tolist())
    made = Calibration(temperatures, judged)
    say(
        f"fitted on {len(fitted.accepted):,} cycles of {len(documents[::2])} held-out documents, judged on "
        f"{len(judged.accepted):,} of {len(documents[1::2])} others"
    )
    draw(made, directory / RELIABILITY)
    store_temperatures(opened, temperatures)
    return made


def observe(
    recipe: Recipe,
    documents: Sequence[Sample],
    opened: OpenedDrafter,
    confidences: Confidences,
    store: FeatureStore | None,
) -> Observed:
    """The cycles of the documents' answers, but for those whose block reaches past the answer's end, where nothing tells how long it
    would have been right."""
    data, drafts = recipe.data, opened.config.max_drafts
    assert drafts is not None
    logits, accepted = [np.zeros((0, drafts))], [np.zeros(0, np.int64)]
    for packed in batches(documents, data.rows, data.length, shuffle=False, pack=data.pack):
        features = None if store is None else store.join(packed, documents)

        def at(anchors: np.ndarray, batch: Batch = packed.batch, features: Features | None = features) -> Any:
            return confidences(batch, features, anchors)

        found, right = everywhere(packed.batch, at, min(recipe.objective.anchors, data.length))
        taken = in_a_row(right)
        for cycle in cycles(packed.batch, taken):
            if cycle.anchor + drafts <= cycle.last:
                logits.append(found[cycle.row, cycle.anchor][None].astype(np.float64))
                accepted.append(taken[cycle.row, cycle.anchor][None])
    return Observed(np.concatenate(logits), np.concatenate(accepted))


def draw(calibration: Calibration, path: Path) -> None:
    """The reliability diagram, before and after: of each draft's survival and of all together, what happened over what was predicted.

    Raises InputError where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    happened = calibration.judged.happened()
    for axes, calibrated in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        predicted = calibration.survivals(calibrated)
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="dotted")
        for k in range(predicted.shape[1]):
            axes.plot(
                *_reliability(predicted[:, k], happened[:, k]), linewidth=1, alpha=0.6, label=f"drafts 1 to {k + 1}"
            )
        axes.plot(*_reliability(predicted.ravel(), happened.ravel()), color="black", marker="o", label="all")
        when = "calibrated" if calibrated else "as trained"
        axes.set_title(f"{when}: calibration error {calibration.error(calibrated):.2%}")
        axes.set_xlabel("predicted probability that the drafts are accepted")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of cycles that accepted them")
    figure.axes[0].legend()
    work = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(work, dpi=120)
        work.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        work.unlink(missing_ok=True)


def _reliability(predicted: np.ndarray, happened: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean prediction and share that happened, of every bin that is not empty."""
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    sizes = np.bincount(bins, minlength=BINS)
    sums = (np.bincount(bins, values, BINS)[sizes > 0] for values in (predicted, happened))
    mean, share = (values / sizes[sizes > 0] for values in sums)
    return mean, share


def _open(directory: Path, verifier_layers: int) -> OpenedDrafter:
    opened = open_drafter(directory, verifier_layers)
    block = opened.config.block
    if block is None or block.confidence is None:
        raise InputError(
            f"--calibrate {directory}: this {opened.config.method} drafter has no confidence head; a dspark one with "
            "drafter.confidence.enabled has"
        )
    return opened


def _program(recipe: Recipe, opened: OpenedDrafter, side: VerifierSide) -> tuple[Confidences, FeatureStore | None]:
    """The drafter's confidences as a compiled function, and where features are read from if not made in it."""
    config, block, dtype = opened.config, opened.config.block, compute_dtype(recipe.optimizer)
    assert block is not None
    mesh = make_mesh(recipe.mesh)
    check_rows(recipe.data, mesh)
    store = online = leaves = None
    if recipe.data.features is not None:
        store = FeatureStore(Path(recipe.data.features).expanduser(), feature_source(recipe.data, side, config.taps))
    else:
        kept = verifier_dtype(side, recipe.verifier.dtype)
        online = by_rows(VerifierParts(side.config, kept, config.taps).features, mesh)
        leaves = load_leaves(side, kept, mesh)
    parts = DrafterParts(config, dtype)
    values = initial_drafter(DrafterRecipe(config.method), config, side.lend, opened.target_ids, opened, seed=0).values
    drafter = {
        name_of(path): jax.device_put(value if value.dtype == np.int32 else value.astype(dtype), whole(mesh))
        for path, value in values.items()
    }
    objective = BlockObjective(
        block.size,
        block.sample_from_anchor,
        chunk=recipe.objective.attention_chunk,
        scored=recipe.objective.logits_chunk,
    )

    @jax.jit
    def compute(drafter: Any, leaves: Any, batch: Batch, features: Features | None, anchors: jax.Array) -> Any:
        if features is None:
            assert online is not None, "there are no features"
            features = online(leaves, batch)
        cast = jax.tree.map(lambda x: x.astype(dtype), features)
        merged = parts.merge({}, drafter)
        assert isinstance(merged, DSpark)
        return objective.confidences(merged, batch, cast, anchors)

    def confidences(batch: Batch, features: Features | None, anchors: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return compute(drafter, leaves, *jax.device_put((batch, features, anchors), rows(mesh)))

    return confidences, store

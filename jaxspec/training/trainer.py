"""The run: steps, reports, validation, checkpoints, the finished drafter."""

import errno
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import distributed
from jaxspec.checkpoint.drafters.load import HEAD_PATH
from jaxspec.checkpoint.orbax import name_of
from jaxspec.errors import CheckFailed, InputError
from jaxspec.sharding import put, rows
from jaxspec.training.batch import Batch, Features
from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.features import FeatureStore
from jaxspec.training.files import SUMMARY
from jaxspec.training.finish import Exported, check_export, export_best
from jaxspec.training.objectives.base import Target
from jaxspec.training.online import VerifierParts, load_leaves, verifier_dtype
from jaxspec.training.packing import Packed, PackedBatches, batches
from jaxspec.training.placement import check_rows, own_rows
from jaxspec.training.programs import Programs
from jaxspec.training.report import Progress, RunLog, draw
from jaxspec.training.samples import Sample
from jaxspec.training.setup import Say, Setup, describe, digest_of, keep_vocabulary
from jaxspec.training.step import StepReport
from jaxspec.training.stop import Stop
from jaxspec.training.validation import Acceptance, validate

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` steps, with a drafter, or stopped by a signal without one."""

    step: int
    exported: Exported | None


@dataclass(frozen=True)
class _Pending:
    """A step that was sent off and not yet looked at."""

    step: int
    report: StepReport
    packed: tuple[Packed, ...]


class Trainer:
    """A run of a recipe."""

    def __init__(self, setup: Setup, mesh: Mesh, say: Say):
        """say: takes what a user should know, a line at a time."""
        recipe = setup.recipe
        self._setup, self._say, self._mesh = setup, say, mesh
        self._output = Path(recipe.run.output).expanduser()
        check_export(setup)
        check_rows(recipe.data, mesh)
        self._own_rows = own_rows(mesh, recipe.data.rows)
        source = None if recipe.data.features is None else Path(recipe.data.features).expanduser()
        self._store = None if source is None else FeatureStore(source, setup.feature_source)
        if self._store is not None:
            self._store.require(setup.documents.all)
        self._accumulation = recipe.optimizer.accumulation
        self._batches = self._packed()
        self.steps = recipe.optimizer.steps or len(self._batches) // self._accumulation
        if not self.steps:
            raise InputError(
                f"optimizer.accumulation is {self._accumulation}, and all epochs have {len(self._batches)} micro-batches"
            )
        verifier = leaves = None
        if self._store is None:
            dtype = verifier_dtype(setup.verifier, recipe.verifier.dtype)
            verifier = VerifierParts(setup.verifier.config, dtype, setup.drafter.config.taps)
            leaves = load_leaves(setup.verifier, dtype, mesh)
        self._programs = Programs(
            setup.drafter.config,
            sorted(setup.drafter.trainable, key=name_of),
            setup.plan,
            recipe.optimizer,
            steps=self.steps,
            seed=recipe.run.seed,
            dtype=setup.dtype,
            mesh=mesh,
            verifier=verifier,
        )
        target = setup.verifier.target(setup.target_ids, setup.dtype)
        self._frozen = self._programs.frozen(self._untrained(target), target, leaves)
        values = setup.drafter.values
        # Copies: what goes to a device of the CPU may share its memory, and the step overwrites it.
        self._state = self._programs.state(
            {name_of(path): np.array(values[path], np.float32) for path in setup.drafter.trainable}
        )
        self._documents = {
            "documents": digest_of(setup.documents.train),
            "held_out": digest_of(setup.documents.validation),
        }
        self._order = {
            "data.rows": recipe.data.rows,
            "data.row_tokens": recipe.data.length,
            "data.pack": recipe.data.pack,
            "optimizer.accumulation": self._accumulation,
            "run.seed": recipe.run.seed,
        }
        self._best: float | None = None
        self._stop = Stop(mesh)

    def run(self, resume: bool) -> Outcome:
        """Trains to the end, or to SIGTERM or Ctrl-C, which save a checkpoint first.

        resume: go on from the newest checkpoint of the output directory, if there is one.

        Raises:
            CheckFailed: the loss is not finite.
            InputError: the directory holds another run, or cannot be written.
        """
        recipe = self._setup.recipe.run
        checkpoints = Checkpoints(self._output, self._setup.identity(), recipe.keep, recipe.keep_best)
        distributed.by_first(lambda: keep_vocabulary(self._output, self._setup.target_ids))
        self._say(describe(self._setup))
        data: dict[str, Any] | None = None
        if resume and checkpoints.latest is not None:
            found = checkpoints.restore(self._state)
            self._state, self._best, data = found.state, found.best, dict(found.data)
            self._say(f"going on from step {int(self._state.step)}")
            self._compare(data)
        elif checkpoints.latest is not None:
            raise InputError(
                f"run.output {self._output}: holds checkpoints up to step {checkpoints.latest}; --resume goes on from there, --fresh "
                "removes them"
            )
        try:
            with self._stop.on_signals():
                finished = self._loop(checkpoints, data)
            step = int(self._state.step)
            exported = self._finish(checkpoints) if finished else None
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            last = checkpoints.latest
            stands = "there is no checkpoint yet" if last is None else f"the checkpoint of step {last} stands"
            raise InputError(f"run.output {self._output}: cannot be written: {error.strerror}; {stands}") from error
        checkpoints.close()
        if self._stop.agreed == signal.SIGINT:
            raise KeyboardInterrupt
        return Outcome(step, exported)

    def _compare(self, data: dict[str, Any]) -> None:
        """Takes what a checkpoint says of its run out of `data`, and says what has changed. Raises InputError for a change after which the
        place in the documents means nothing."""
        for name, value in data.pop("order", {}).items():
            if value != self._order[name]:
                raise InputError(
                    f"{name} is {self._order[name]}, and the run in {self._output} was begun with {value}; go on with that, or begin anew "
                    "with --fresh"
                )
        if data.pop("documents") != self._documents["documents"]:
            self._say("the training documents have changed since then: from here on the new ones are used")
        if data.pop("held_out", self._documents["held_out"]) != self._documents["held_out"]:
            self._say(
                "the held-out documents have changed since then: acceptance lengths before and after do not compare"
            )

    def describe(self) -> None:
        """Says what `run` would do."""
        self._say(describe(self._setup))
        tokens = self._setup.recipe.data.rows * self._setup.recipe.data.length * self._accumulation
        self._say(
            f"{self.steps} steps of {tokens} tokens, {len(self._batches.epoch_ends)} epochs, rows filled to {self._batches.fill:.0%}"
        )

    def _loop(self, checkpoints: Checkpoints, data: dict[str, Any] | None) -> bool:
        """Steps until the last one or a signal; whether it was the last one."""
        recipe = self._setup.recipe.run
        first = int(self._state.step)
        stream = self._batches.iterator(self._joined)
        if data is not None:
            try:
                stream.set_state(data)
            except IndexError as error:
                raise InputError(
                    f"--resume: step {first} was made of more documents than there are now; give those back, or begin anew with --fresh"
                ) from error
        log = RunLog(self._output, first)
        progress = Progress(self.steps, first)
        since = _Since()
        pending: _Pending | None = None
        saved = first if data is not None else -1
        try:
            for step in range(first + 1, self.steps + 1):
                parts = [next(stream) for _ in range(self._accumulation)]
                stacked = *self._stacked(parts), *self._stop.asked()
                if step == first + 1:
                    self._programs.compile_step(self._state, self._frozen, *stacked)
                self._state, report = self._programs.step(self._state, self._frozen, *stacked)
                self._look(pending, since, log, progress)
                pending = _Pending(step, report, tuple(packed for packed, _ in parts))
                last = step == self.steps or bool(self._stop.agreed)
                validates = bool(self._setup.documents.validation) and _due(step, recipe.validate_every, self.steps)
                if last or validates or _due(step, recipe.checkpoint_every, self.steps):
                    self._look(pending, since, log, progress)
                    pending = None
                    acceptance = self._validated(step, log, progress) if validates else None
                    state = {**stream.get_state(), **self._documents, "order": self._order}
                    checkpoints.save(self._state, state, self._best, acceptance)
                    saved = step
                    since.restart_clock()
                if last:
                    break
        finally:
            progress.close()
            log.close()
        if self._stop.agreed and saved < self.steps:
            self._say(f"stopped at step {saved}, which is saved; --resume goes on from there")
            return False
        return True

    def _look(self, pending: _Pending | None, since: "_Since", log: RunLog, progress: Progress) -> None:
        """Waits for a step and reports it."""
        if pending is None:
            return
        report = jax.device_get(pending.report)
        if report.asked is not None:
            self._stop.agreed = max(self._stop.agreed, int(report.asked))
        step, loss = pending.step, float(report.loss)
        if not np.isfinite(loss) or not np.isfinite(report.gradient_norm):
            sources = sorted(
                {self._source(index) for packed in pending.packed for row in packed.indices for index in row}
            )
            shown = ", ".join(sources[:8]) + (f" and {len(sources) - 8} more" if len(sources) > 8 else "")
            what = f"the loss is {loss}" if not np.isfinite(loss) else f"the gradients' norm is {report.gradient_norm}"
            raise CheckFailed(f"step {step}: {what}; its documents: {shown}")
        if since.add(pending, report):  # the first step compiled
            progress.restart_clock(step)
        if step % self._setup.recipe.run.log_every == 0 or step == self.steps:
            mean = since.report()
            terms = dict(zip(self._setup.plan.objective.terms, mean.terms, strict=True))
            figures = {
                "loss": mean.loss,
                **({} if len(terms) == 1 else terms),
                "acceptance_length": mean.acceptance_length,
                "learning_rate": float(np.asarray(self._programs.rate(step - 1))),
                "gradient_norm": mean.gradient_norm,
                "tokens_per_s": mean.tokens_per_s,
                "epoch": self._batches.epoch_of(step * self._accumulation - 1),
            }
            log.write("train", step, figures)
            progress.show(step, mean.loss, mean.acceptance_length, mean.tokens_per_s)

    def _validated(self, step: int, log: RunLog, progress: Progress) -> float:
        """Walks the held-out documents; their acceptance length."""
        found = self.validation()
        log.write(
            "validation", step, {"acceptance_length": found.length, "acceptance_per_position": found.per_position}
        )
        rates = " ".join(f"{rate:.2f}" for rate in found.per_position)
        progress.line(f"step {step}: acceptance length {found.length:.3f} on held-out documents; per position {rates}")
        self._best = found.length if self._best is None else max(self._best, found.length)
        return found.length

    def validation(self) -> Acceptance:
        """Acceptance of the drafter as it is now on the held-out documents."""
        recipe, plan = self._setup.recipe, self._setup.plan
        documents = self._setup.documents.validation[: recipe.run.validation_documents]
        held_out = batches(documents, recipe.data.rows, recipe.data.length, shuffle=False, pack=recipe.data.pack)
        total = Acceptance(0, np.zeros(plan.drafts, np.int64))
        for packed in held_out:
            features = None if self._store is None else self._store.join(packed, documents, self._own_rows)
            batch, joined = put((packed.batch, features), rows(self._mesh))

            def accepts(anchors: np.ndarray, batch: Batch = batch, joined: Features | None = joined) -> np.ndarray:
                placed = put(anchors, rows(self._mesh))
                return np.asarray(self._programs.accepts(self._state.params, self._frozen, batch, joined, placed))

            total += validate(packed.batch, accepts, plan.drafts, plan.walked)
        return total

    def _finish(self, checkpoints: Checkpoints) -> Exported:
        """The best checkpoint as a drafter, the picture, the summary."""
        made = export_best(self._setup, checkpoints, self._say)
        summary = {"steps": self.steps, "exported_step": made.step, "acceptance_length": made.acceptance}

        def write() -> None:
            draw(self._output)
            (self._output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", "utf-8")

        distributed.by_first(write)
        return made

    def _packed(self) -> PackedBatches:
        recipe = self._setup.recipe

        def packed(epochs: int) -> PackedBatches:
            return batches(
                self._setup.documents.train,
                recipe.data.rows,
                recipe.data.length,
                seed=recipe.run.seed,
                epochs=epochs,
                pack=recipe.data.pack,
            )

        if recipe.optimizer.epochs is not None:
            return packed(recipe.optimizer.epochs)
        assert recipe.optimizer.steps is not None
        wanted = recipe.optimizer.steps * self._accumulation
        epochs = -(-wanted // len(packed(1)))
        while len(made := packed(epochs)) < wanted:  # epochs are packed anew, so that they differ by a batch or so
            epochs += 1
        return made

    def _joined(self, packed: Packed) -> tuple[Packed, Features | None]:
        """In the reading thread: the batch with its features from disk."""
        return packed, None if self._store is None else self._store.join(
            packed, self._setup.documents.train, self._own_rows
        )

    def _stacked(self, parts: list[tuple[Packed, Features | None]]) -> tuple[Batch, Features | None]:
        """Micro-batches on the device, [A, B, ...]."""

        def stack(*arrays: np.ndarray) -> np.ndarray:
            return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)

        batch = jax.tree.map(stack, *(packed.batch for packed, _ in parts))
        features = None if parts[0][1] is None else jax.tree.map(stack, *(joined for _, joined in parts))
        return put((batch, features), rows(self._mesh, 1))

    def _untrained(self, target: Target) -> dict[str, Any]:
        """The drafter's leaves that are not trained, in the dtype of the step; its head is `target`'s where it is the verifier's."""
        drafter, leaves = self._setup.drafter, {}
        for path, value in drafter.values.items():
            if path not in drafter.trainable:
                host = np.asarray(value)
                host = host if host.dtype == np.int32 else host.astype(self._setup.dtype, copy=False)
                lent = path == HEAD_PATH and np.array_equal(host, np.asarray(target.head))
                leaves[name_of(path)] = target.head if lent else host
        return leaves

    def _source(self, index: int) -> str:
        sample: Sample = self._setup.documents.train[index]
        return sample.source


@dataclass(frozen=True)
class _Mean:
    """Of the steps between two reports. `tokens_per_s` None: nothing was timed yet."""

    loss: float
    terms: tuple[float, ...]
    gradient_norm: float
    acceptance_length: float
    tokens_per_s: float | None


class _Since:
    """Steps since the last report; the clock leaves out compiling, validation and saving."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._seconds, self._tokens = 0.0, 0
        self._reports: list[StepReport] = []

    def add(self, pending: _Pending, report: StepReport) -> bool:
        """A step that is done; whether it was the first one."""
        self._reports.append(report)
        now, first = time.monotonic(), self._begun is None
        if self._begun is not None:
            self._seconds += now - self._begun
            self._tokens += sum(int((packed.batch.documents >= 0).sum()) for packed in pending.packed)
        self._begun = now
        return first

    def restart_clock(self) -> None:
        """Leaves out what went on since the last step."""
        self._begun = time.monotonic()

    def report(self) -> _Mean:
        """The means, and a new beginning."""
        reports = self._reports
        metrics = reports[0].metrics
        for other in reports[1:]:
            metrics += other.metrics
        made = _Mean(
            loss=float(np.mean([report.loss for report in reports])),
            terms=tuple(np.mean([report.terms for report in reports], axis=0).tolist()),
            gradient_norm=float(np.mean([report.gradient_norm for report in reports])),
            acceptance_length=metrics.acceptance_length(),
            tokens_per_s=self._tokens / self._seconds if self._seconds else None,
        )
        self._reports, self._seconds, self._tokens = [], 0.0, 0
        return made


def _due(step: int, every: int, steps: int) -> bool:
    """Whether what is done every so many steps, and at the end, is due."""
    return step == steps or (every > 0 and step % every == 0)

"""A run's checkpoints: whole or not there, the latest ones and the best, and only of one drafter."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jaxspec import distributed
from jaxspec.errors import InputError
from jaxspec.training.files import CHECKPOINTS, DRAFTER, IDENTITY, begun
from jaxspec.training.step import TrainState

BEST_METRIC = "acceptance_length"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint in memory. `data`: state of the data iterator. `best`: the best validation's figure so far; None before the first."""

    state: TrainState
    data: dict[str, Any]
    best: float | None


class Checkpoints:
    """The checkpoints in a run's directory.

    `identity` says what run this is (drafter, its vocabulary, the verifier); a directory of another run is refused.
    """

    def __init__(
        self, output: Path, identity: Mapping[str, Any], keep: int, keep_best: bool, *, read_only: bool = False
    ):
        """read_only: leaves alone what another process may be writing."""
        self._output = output
        self._folder = (output / CHECKPOINTS).absolute()
        self._check_identity(identity, read_only)

        def figure(metrics: Any) -> float:
            return metrics[BEST_METRIC]

        policies: list[Any] = [managers.LatestN(n=keep)]
        if keep_best:
            policies.append(managers.BestN(get_metric_fn=figure, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(policies),
            best_fn=figure,  # without it orbax keeps no metrics on disk
            enable_async_checkpointing=False,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        registry = ocp.DefaultCheckpointHandlerRegistry()
        for item in ("params", "rest"):
            arrays = ocp.StandardCheckpointHandler()
            registry.add(item, ocp.args.StandardSave, arrays)
            registry.add(item, ocp.args.StandardRestore, arrays)
        figures = ocp.JsonCheckpointHandler()
        registry.add("run", ocp.args.JsonSave, figures)
        registry.add("run", ocp.args.JsonRestore, figures)
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options, handler_registry=registry)
        except OSError as error:
            raise InputError(f"run.output {output}: cannot be written: {error.strerror or error}") from error

    @property
    def latest(self) -> int | None:
        """Step of the newest one; None without any."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: Mapping[str, Any], best: float | None, acceptance: float | None) -> None:
        """Writes a checkpoint of `state`, the newest one.

        acceptance: of a validation of this very state, by which the best one is found. Raises InputError where it cannot be written;
        those before it stay.
        """
        step = int(state.step)
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave(_rest(state)),
            run=ocp.args.JsonSave({"data": dict(data), "best": best}),
        )
        metrics = None if acceptance is None else {BEST_METRIC: acceptance}
        try:
            self._manager.save(step, args=arguments, metrics=metrics, force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            if not _full(error):
                raise
            last = self.latest
            stands = "there is none before it" if last is None else f"the one of step {last} stands"
            raise InputError(
                f"run.output {self._output}: the checkpoint of step {step} cannot be written: {_reason(error)}; {stands}"
            ) from error

    def restore(self, like: TrainState) -> Resumed:
        """The newest checkpoint, its arrays placed as those of `like` are. Raises InputError where it is damaged."""
        step = self.latest
        if step is None:
            raise InputError(f"run.output {self._output}: holds no checkpoint")
        found = self._restore(
            step,
            params=ocp.args.StandardRestore(_abstract(like.params)),
            rest=ocp.args.StandardRestore(_abstract(_rest(like))),
            run=ocp.args.JsonRestore(),
        )
        rest, run = found["rest"], found["run"]
        optimizer = jax.tree.unflatten(
            jax.tree.structure(like.optimizer), [rest["optimizer"][key] for key in sorted(rest["optimizer"])]
        )
        return Resumed(TrainState(rest["step"], found["params"], optimizer), run["data"], run["best"])

    def restore_params(self, like: Mapping[str, jax.Array | jax.ShapeDtypeStruct], step: int) -> dict[str, jax.Array]:
        """The trained leaves of a checkpoint, placed as those of `like` are."""
        return self._restore(step, params=ocp.args.StandardRestore(_abstract(dict(like))))["params"]

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"{self._folder / str(step)}: cannot be read (damaged or incomplete): {_reason(error)}"
            ) from error

    def best(self) -> tuple[int | None, float | None]:
        """Step and acceptance length of the kept checkpoint whose acceptance is longest; the newest and None where none was validated."""
        scored = []
        for step in self._manager.all_steps():
            metrics = self._manager.metrics(step)
            if metrics is not None and BEST_METRIC in metrics:
                scored.append((metrics[BEST_METRIC], step))
        if not scored:
            return self.latest, None
        acceptance, step = max(scored)
        return step, acceptance

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()

    def _check_identity(self, identity: Mapping[str, Any], read_only: bool) -> None:
        output = self._output
        file = output / IDENTITY
        text = json.dumps(identity, indent=2, sort_keys=True)

        def begin() -> None:
            if file.is_file() and (read_only or begun(output) or (output / DRAFTER).exists()):
                return
            if read_only:
                raise InputError(f"run.output {output}: holds no run: it has no {IDENTITY}")
            if self._folder.is_dir() and any(self._folder.iterdir()):
                raise InputError(f"run.output {output}: holds checkpoints, but no {IDENTITY}; name another directory")
            output.mkdir(parents=True, exist_ok=True)
            work = file.with_suffix(".part")
            work.write_text(text + "\n", "utf-8")
            os.replace(work, file)

        try:
            distributed.by_first(begin)
            if not file.is_file():
                raise InputError(
                    f"run.output {output}: process 0 has written {IDENTITY} there, and it is not here; all processes must see the same "
                    "directory"
                )
            found = json.loads(file.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise InputError(f"{file}: is not JSON: {error}") from error
        except OSError as error:
            raise InputError(f"run.output {output}: cannot be written: {error.strerror or error}") from error
        wanted = json.loads(text)
        other = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
        if other:
            raise InputError(
                f"run.output {output}: holds the run of another drafter: its {', '.join(other)} differ{'s' if len(other) == 1 else ''}; "
                "name another directory, or begin anew with --fresh"
            )


def _rest(state: TrainState) -> dict[str, Any]:
    """All but the parameters as plain dictionaries: the optimizer's leaves by number, since orbax does not know optax's classes."""
    leaves = jax.tree.leaves(state.optimizer)
    return {"step": state.step, "optimizer": {f"{number:05d}": leaf for number, leaf in enumerate(leaves)}}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def _full(error: Exception) -> bool:
    """Whether it was the disk that failed. Orbax's own writer puts the system's message into a ValueError."""
    return isinstance(error, OSError) or any(
        text in str(error) for text in ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", "File too large")
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    for text in ("No space left on device", "Disk quota exceeded", "File too large"):
        if text in str(error):
            return text
    return str(error).strip().split("\n")[0][:200] or type(error).__name__

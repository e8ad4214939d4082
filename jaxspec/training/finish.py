"""The finished drafter, written in a format that generation and other programs read."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxspec import distributed
from jaxspec.checkpoint.drafters.content import DrafterContent, Parameter, as_host
from jaxspec.checkpoint.drafters.export import check_savable, save_drafter
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.fill import checked_dtype
from jaxspec.checkpoint.orbax import name_of
from jaxspec.errors import InputError
from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.files import DRAFTER
from jaxspec.training.recipe import ExportRecipe
from jaxspec.training.setup import Say, Setup


@dataclass(frozen=True)
class Exported:
    """A drafter that was written to `path`: of the checkpoint of `step`, with its acceptance length on held-out documents."""

    step: int
    acceptance: float | None
    path: Path


def check_export(setup: Setup) -> None:
    """Raises InputError where the drafter that the run will end with cannot be written as asked."""
    recipe = setup.recipe.run.export
    try:
        check_savable(_content(setup, {}), recipe.format, drop=recipe.drop, verifier=setup.verifier.lend)
    except InputError as error:
        raise InputError(f"run.export: {error}") from error


def export_best(setup: Setup, checkpoints: Checkpoints, say: Say) -> Exported:
    """Writes the drafter of the best checkpoint that was kept, the newest where none was validated."""
    output = Path(setup.recipe.run.output).expanduser()
    step, acceptance = checkpoints.best()
    if step is None:
        raise InputError(f"run.output {output}: holds no checkpoint to export")
    trained = {name_of(path): setup.drafter.values[path] for path in setup.drafter.trainable}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    like = {name: jax.ShapeDtypeStruct(value.shape, np.float32, sharding=here) for name, value in trained.items()}
    params = checkpoints.restore_params(like, step)  # which the processes do together
    for note in distributed.by_first(lambda: export_drafter(output, setup, params, setup.recipe.run.export)) or ():
        say(note)
    return Exported(step, acceptance, output / DRAFTER)


def export_run(setup: Setup, say: Say) -> Exported:
    """As `export_best`, of a run that may be going on in another process."""
    recipe = setup.recipe.run
    output = Path(recipe.output).expanduser()
    checkpoints = Checkpoints(output, setup.identity(), recipe.keep, recipe.keep_best, read_only=True)
    return export_best(setup, checkpoints, say)


def export_drafter(
    output: Path, setup: Setup, params: Mapping[str, Parameter], recipe: ExportRecipe
) -> tuple[str, ...]:
    """Writes the drafter with trained leaves `params` to `output`/drafter, in place of one that an earlier run wrote.

    Returns what was done to it, in words. Raises InputError where the format cannot hold it.
    """
    content = _content(setup, params)
    target, work = output / DRAFTER, output / f".{DRAFTER}.new"
    shutil.rmtree(work, ignore_errors=True)
    notes = save_drafter(
        work, content, recipe.format, dtype=checked_dtype(recipe.dtype), drop=recipe.drop, verifier=setup.verifier.lend
    )
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)
    return notes


def _content(setup: Setup, params: Mapping[str, Parameter]) -> DrafterContent:
    """The drafter with the trained leaves `params`, the others as they were at first."""
    drafter = setup.drafter
    parameters = {}
    for path in own_shapes(drafter.config):
        trained = params.get(name_of(path))
        parameters[path] = np.asarray(as_host(drafter.values[path] if trained is None else trained), np.float32)
    return DrafterContent(drafter.config, parameters, setup.target_ids, setup.verifier.lend.facts)

"""The finished drafter, written in a format that generation and other programs read."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxspec import distributed
from jaxspec.checkpoint.drafters.content import DrafterContent, Parameter, as_host
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.fill import checked_dtype
from jaxspec.checkpoint.orbax import name_of
from jaxspec.errors import InputError
from jaxspec.training.checkpoints import Checkpoints
from jaxspec.training.files import DRAFTER
from jaxspec.training.recipe import ExportRecipe
from jaxspec.training.setup import Say, Setup


def export_best(setup: Setup, checkpoints: Checkpoints, say: Say) -> tuple[int, Path]:
    """Writes the drafter of the best checkpoint, the newest where none was validated; its step, and where the drafter is."""
    output = Path(setup.recipe.run.output).expanduser()
    step = checkpoints.best_step()
    if step is None:
        raise InputError(f"run.output {output}: holds no checkpoint to export")
    trained = {name_of(path): setup.drafter.values[path] for path in setup.drafter.trainable}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    like = {name: jax.ShapeDtypeStruct(value.shape, np.float32, sharding=here) for name, value in trained.items()}
    params = checkpoints.restore_params(like, step)  # which the processes do together
    for note in distributed.by_first(lambda: export_drafter(output, setup, params, setup.recipe.run.export)) or ():
        say(note)
    return step, output / DRAFTER


def export_run(setup: Setup, say: Say) -> tuple[int, Path]:
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
    drafter = setup.drafter
    parameters = {}
    for path in own_shapes(drafter.config):
        trained = params.get(name_of(path))
        parameters[path] = np.asarray(as_host(drafter.values[path] if trained is None else trained), np.float32)
    content = DrafterContent(drafter.config, parameters, setup.target_ids, setup.verifier.lend.facts)
    target, work = output / DRAFTER, output / f".{DRAFTER}.new"
    shutil.rmtree(work, ignore_errors=True)
    notes = save_drafter(
        work, content, recipe.format, dtype=checked_dtype(recipe.dtype), drop=recipe.drop, verifier=setup.verifier.lend
    )
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)
    return notes

"""`python -m jaxspec.train`: a drafter for a verifier, by a recipe."""

import logging
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec import distributed
from jaxspec.cli import Parser, leave, run
from jaxspec.errors import InputError

if TYPE_CHECKING:
    from jaxspec.training.finish import Exported
    from jaxspec.training.recipe import Recipe

NAME = "jaxspec.train"


def main(argv: list[str]) -> None:
    """Parse, train, print.

    Raises:
        InputError: a flag, recipe, document or model that is not right.
        CheckFailed: the loss is not finite.
        KeyboardInterrupt: Ctrl-C, after a checkpoint has been saved.
    """
    args = _parser().parse_args(argv)
    other = _other_than_training(args)
    if args.fresh and other is not None:
        raise InputError(f"--fresh removes what an earlier run left, and {other} trains nothing: leave one of them out")
    if args.distributed and other not in (None, "--dry-run"):
        raise InputError(f"--distributed goes with training; run {other} as one process")
    distributed.start(args)
    for name in ("absl", "asyncio"):  # orbax tells of whatever it raises as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from jaxspec.training.recipe import read_recipe

    recipe = read_recipe(Path(args.config), [*args.set, *_mesh(args.mesh)])
    distributed.agree(args, recipe=recipe)
    if args.write_answers:
        _write_answers(recipe)
    elif args.write_features:
        _write_features(recipe)
    elif args.calibrate is not None:
        _calibrate(recipe, args.calibrate.expanduser())
    else:
        _train(recipe, args)


def _parser() -> Parser:
    parser = Parser(NAME, "Train a drafter by a recipe, or write what training reads.")
    add = parser.add_argument
    add("--config", required=True, metavar="FILE.yaml", help="the recipe")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe: optimizer.lr=1e-3; repeatable"
    )
    add("--mesh", metavar="data=D,tensor=T,expert=E", help="over the recipe's mesh (default: all devices along data)")
    distributed.add_flags(add)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write-answers", action="store_true", help="let the verifier answer data.questions, and stop")
    what.add_argument(
        "--write-features", action="store_true", help="write the documents' features to data.features, and stop"
    )
    what.add_argument("--export", action="store_true", help="write the drafter of the best checkpoint so far, and stop")
    what.add_argument(
        "--calibrate",
        type=Path,
        metavar="DRAFTER_DIR",
        help="fit the temperatures of a dspark drafter's confidences on the held-out documents, store them with it, and stop",
    )
    what.add_argument("--dry-run", action="store_true", help="check everything, show what would be trained, and stop")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    how.add_argument("--fresh", action="store_true", help="remove what an earlier run left in run.output first")
    return parser


def _other_than_training(args: Namespace) -> str | None:
    """The flag that asks for something else."""
    flags = ("write_answers", "write_features", "export", "calibrate", "dry_run")
    return next((f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)), None)


def _mesh(text: str | None) -> list[str]:
    """The overrides of a recipe that --mesh stands for."""
    if text is None:
        return []
    from jaxspec.sharding import parse_mesh

    return [f"mesh.{axis}={size}" for axis, size in parse_mesh(text).items()]


def _say(line: str) -> None:
    if distributed.first():
        print(line, file=sys.stderr, flush=True)


def _train(recipe: "Recipe", args: Namespace) -> None:
    from jaxspec.training.placement import make_mesh
    from jaxspec.training.setup import digest_of, set_up
    from jaxspec.training.trainer import Trainer

    mesh = None if args.export else make_mesh(recipe.mesh)  # first, as it is quickly refused
    setup = set_up(recipe, _say, fresh=args.fresh)
    if mesh is None:
        from jaxspec.training.finish import export_run

        made = export_run(setup, _say)
        _say(f"the drafter of step {made.step}{_on_held_out(made)}:")
        print(made.path)
        return
    distributed.agree(args, run=setup.identity(), documents=digest_of(setup.documents.all))
    trainer = Trainer(setup, mesh, _say)
    if args.dry_run:
        trainer.describe()
        return
    if args.fresh:  # last, when nothing but the directory itself can be wrong
        distributed.by_first(lambda: _remove(Path(recipe.run.output).expanduser()))
    outcome = trainer.run(args.resume)
    if outcome.exported is not None:
        of = "" if outcome.exported.step == outcome.step else f"; the drafter is that of step {outcome.exported.step}"
        _say(f"finished after {outcome.step} steps{of}{_on_held_out(outcome.exported)}")
        if distributed.first():
            print(outcome.exported.path)


def _on_held_out(made: "Exported") -> str:
    return "" if made.acceptance is None else f", acceptance length {made.acceptance:.3f} on held-out documents"


def _write_features(recipe: "Recipe") -> None:
    from jaxspec.training.write import write_all_features

    write_all_features(recipe, _say)


def _write_answers(recipe: "Recipe") -> None:
    from jaxspec.training.write import write_all_answers

    write_all_answers(recipe, _say)


def _calibrate(recipe: "Recipe", drafter: Path) -> None:
    from jaxspec.training.calibration import calibrate

    for line in calibrate(recipe, drafter, _say).lines():
        _say(line)
    print(drafter)


def _remove(output: Path) -> None:
    """What a run keeps in its directory, and nothing else."""
    from jaxspec.training.files import LEFTOVERS

    for name in LEFTOVERS:
        path = output / name
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"--fresh: {path}: cannot be removed: {error.strerror or error}") from error


if __name__ == "__main__":
    leave(run(NAME, main))

"""Compiles the training step of recipes that no test machine could run: on as many pretended CPU devices as the recipe's mesh has, with
shapes in place of arrays.

    python tools/check_recipes.py [--lower-only] RECIPE.yaml=CONFIG.json ...

CONFIG.json is the verifier's Hugging Face config. For each recipe it prints what every device would hold: the arguments of the step, which
are the verifier, the drafter with its optimizer, and the batch. What the step needs beside them depends on the device's compiler.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

DEVICES = 8
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}  # the same program, compiled faster


def main() -> None:
    """Parse, compile, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="+", metavar="RECIPE.yaml=CONFIG.json")
    parser.add_argument("--lower-only", action="store_true", help="stop before XLA's part")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    for pair in arguments.pairs:
        recipe, _, config = pair.partition("=")
        print(check(Path(recipe), Path(config), not arguments.lower_only), flush=True)


def check(recipe_file: Path, config_file: Path, compiles: bool) -> str:
    """One line about a recipe. Raises whatever does not fit or compile."""
    import jax
    import jax.numpy as jnp

    from jaxspec.sharding import rows
    from jaxspec.training.batch import Batch
    from jaxspec.training.initial import drafter_config, trainable_paths
    from jaxspec.training.objective_of import check_objective, plan_objective
    from jaxspec.training.online import VerifierParts
    from jaxspec.training.placement import make_mesh
    from jaxspec.training.programs import Programs
    from jaxspec.training.recipe import read_recipe
    from jaxspec.verifiers.families import parse_config

    begun = time.monotonic()
    recipe = read_recipe(recipe_file)
    verifier = parse_config(json.loads(config_file.read_text("utf-8")), str(config_file))[0]
    config = drafter_config(recipe.drafter, verifier, mask_token=None)
    check_objective(recipe.objective, config)
    mesh = make_mesh(recipe.mesh)
    online = VerifierParts(verifier, jnp.dtype(recipe.verifier.dtype or "bfloat16"), config.taps)
    programs = Programs(
        config,
        sorted(trainable_paths(recipe.drafter, config), key=str),
        plan_objective(recipe.objective, config, recipe.data.length),
        recipe.optimizer,
        steps=1000,
        seed=0,
        dtype=jnp.dtype(recipe.optimizer.compute or "bfloat16"),
        mesh=mesh,
        verifier=online,
    )
    state, frozen = programs.abstract_arguments(verifier, online)
    shape = (recipe.optimizer.accumulation, recipe.data.rows, recipe.data.length)

    def part(dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows(mesh, 1))

    batch = Batch(*(part(dtype) for dtype in (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)))  # pyright: ignore[reportArgumentType]
    lowered = programs.step.lower(state, frozen, batch, None)
    if compiles:
        lowered.compile(QUICK)

    def gigabytes(tree: object) -> str:
        held = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )
        return f"{held / 1e9:.1f} GB"

    done = "compiled" if compiles else "lowered"
    return (
        f"{recipe_file.stem}: {done} in {time.monotonic() - begun:.0f} s; a device holds {gigabytes(frozen)} of frozen weights and "
        f"{gigabytes(state)} of trained ones with their optimizer"
    )


if __name__ == "__main__":
    sys.exit(main())

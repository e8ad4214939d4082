"""The mesh of a recipe, and whether its batches fit it. What lies where on it: `jaxspec.sharding`."""

from dataclasses import asdict

from jax.sharding import Mesh

from jaxspec import sharding
from jaxspec.errors import InputError
from jaxspec.training.recipe import DataRecipe, MeshRecipe


def make_mesh(sizes: MeshRecipe | None) -> Mesh:
    """The mesh of a recipe; without one, all devices along `data`. Raises InputError as `sharding.make_mesh`."""
    return sharding.make_mesh(None if sizes is None else asdict(sizes))


def check_rows(recipe: DataRecipe, mesh: Mesh) -> None:
    """Raises InputError where a batch's rows cannot be split over the mesh."""
    if recipe.rows % mesh.shape["data"]:
        raise InputError(f"data.rows is {recipe.rows}; it must be a multiple of mesh.data, {mesh.shape['data']}")

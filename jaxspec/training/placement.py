"""The mesh of a recipe, whether its batches fit it, and a process's part of them. What lies where on it: `jaxspec.sharding`."""

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


def own_rows(mesh: Mesh, count: int) -> list[int]:
    """Which of `count` rows along `data` this process's devices hold."""
    parts = sharding.rows(mesh).addressable_devices_indices_map((count,)).values()
    return sorted({row for part in parts if part is not None for row in range(*part[0].indices(count))})

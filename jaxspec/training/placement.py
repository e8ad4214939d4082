"""The devices of a run, and what lies where: rows along `data`, matrices by their logical axes along `tensor` and `expert`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import InputError
from jaxspec.training.recipe import DataRecipe, MeshRecipe

T = TypeVar("T")

AXES = ("data", "tensor", "expert")
RULES: Mapping[str, str] = {
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
"""The mesh axis of each logical axis that is split; the others lie whole on every device."""


def make_mesh(sizes: MeshRecipe | None) -> Mesh:
    """The mesh of a recipe; without one, all devices along `data`.

    Raises InputError where the product of the axes is not the number of devices.
    """
    devices = jax.device_count()
    shape = (devices, 1, 1) if sizes is None else (sizes.data, sizes.tensor, sizes.expert)
    needed = shape[0] * shape[1] * shape[2]
    if needed != devices:
        asked = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True) if size > 1) or "1"
        raise InputError(f"mesh: {asked} are {needed} devices; there are {devices}")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_rows(recipe: DataRecipe, mesh: Mesh) -> None:
    """Raises InputError where a batch's rows cannot be split over the mesh."""
    if recipe.rows % mesh.shape["data"]:
        raise InputError(f"data.rows is {recipe.rows}; it must be a multiple of mesh.data, {mesh.shape['data']}")


def split(mesh: Mesh | AbstractMesh, axes: Sequence[str], shape: Sequence[int], name: str) -> NamedSharding:
    """Where an array with these logical axes lies. Raises InputError for a dimension that its mesh axis does not divide."""
    parts: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        along = RULES.get(axis)
        if along is not None and size % mesh.shape[along]:
            fitting = [count for count in range(1, size + 1) if size % count == 0]
            raise InputError(
                f"mesh.{along} is {mesh.shape[along]}, which does not divide the {size} {axis} of {name}; what does: "
                f"{', '.join(map(str, fitting))}"
            )
        parts.append(along)
    return NamedSharding(mesh, PartitionSpec(*parts))


def by_rows(function: Callable[[Any, Any], T], mesh: Mesh) -> Callable[[Any, Any], T]:
    """`function(weights, batch)`, whose rows have nothing to do with one another, run on each device for its own rows.

    Left to itself XLA would gather all rows where a computation sorts or groups tokens across them (mixture of experts).
    """
    if mesh.shape["data"] == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
        check_vma=False,
    )


def whole(mesh: Mesh) -> NamedSharding:
    """On every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows [B, ...] along `data`, behind `leading` other axes."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, "data"))

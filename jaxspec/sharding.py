"""What lies where on several devices: one table from logical axes to the axes of the mesh, for decoding and training alike.

Rows (a batch's prompts, a training batch's documents) are split along `data`, matrices along `tensor` and `expert`. A program runs on each
device of `data` for its own rows (`by_rows`), which have nothing to do with one another; within them the compiler splits the work along
`tensor` by where the matrices lie.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.config import LayerConfig
from jaxspec.errors import InputError
from jaxspec_kernels.devices import unsplit_axes


class Layered(Protocol):
    """A config of a verifier or a drafter."""

    @property
    def layers(self) -> tuple[LayerConfig, ...]: ...


Config = TypeVar("Config", bound=Layered)

AXES = ("data", "tensor", "expert")
RULES: Mapping[str, str] = {
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
"""The mesh axis of each logical axis that is split; the others lie whole on every device."""

ShapesAndAxes = Mapping[Any, tuple[Sequence[int], Sequence[str]]]
"""Shape and logical axes of parameters by path."""

ROWS = PartitionSpec("data")
WHOLE = PartitionSpec()


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,tensor=4` -> the size of every axis, 1 where it is not named.

    Raises InputError for an unknown axis, one given twice, and a size that is no whole number above 0.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        where = f"--mesh {text}"
        if axis not in AXES:
            raise InputError(f"{where}: {axis!r} is no axis; there are {', '.join(AXES)}, as in data=1,tensor=2")
        if axis in sizes:
            raise InputError(f"{where}: {axis} is given twice")
        if not (size.isascii() and size.isdigit() and int(size) > 0):
            raise InputError(f"{where}: the size of {axis} is {size!r}; a whole number from 1 on is wanted")
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def make_mesh(sizes: Mapping[str, int] | None) -> Mesh:
    """The mesh of these sizes, 1 where an axis is missing; None: all devices along `data`.

    A mesh of one process may leave devices out; one of several processes takes them all, as no process may be without work. Raises
    InputError where there are fewer devices, or others than the processes'.
    """
    devices = jax.devices()
    shape = (len(devices), 1, 1) if sizes is None else tuple(sizes.get(axis, 1) for axis in AXES)
    needed = shape[0] * shape[1] * shape[2]
    if needed > len(devices) or (needed < len(devices) and jax.process_count() > 1):
        asked = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True) if size > 1) or "1"
        across = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        raise InputError(f"mesh: {asked} are {needed} devices; there are {len(devices)}{across}")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])


def mesh_of(asked: str | Mesh | None) -> Mesh | None:
    """What a user asked for -> the mesh; None where that is a single device, which needs none.

    Raises InputError as `parse_mesh` and `make_mesh`, and for a `Mesh` with other axes or types than `make_mesh`'s.
    """
    if isinstance(asked, Mesh):
        if asked.axis_names != AXES or set(asked.axis_types) != {AxisType.Auto}:
            raise InputError(f"mesh has the axes {asked.axis_names}; they must be {AXES}, of type Auto")
        return asked
    if asked is None and jax.process_count() == 1:
        return None
    mesh = make_mesh(None if asked is None else parse_mesh(asked))
    return mesh if mesh.size > 1 else None


def split(mesh: Mesh | AbstractMesh, axes: Sequence[str], shape: Sequence[int], name: str) -> NamedSharding:
    """Where an array with these logical axes lies. Key/value heads of which there are fewer than devices lie whole on each.

    Raises InputError for a dimension that its mesh axis does not divide.
    """
    parts: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        along = RULES.get(axis)
        if along is not None and size % mesh.shape[along]:
            if axis == "kv_heads" and mesh.shape[along] % size == 0:
                along = None
            else:
                fitting = ", ".join(str(count) for count in range(1, size + 1) if _fits(axis, size, count))
                raise InputError(
                    f"mesh.{along} is {mesh.shape[along]}, which does not divide the {size} {axis} of {name}; what does: "
                    f"{fitting}"
                )
        parts.append(along)
    return NamedSharding(mesh, PartitionSpec(*parts))


def spread(placed: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """What lies like this, split along `data` too: by its first dimension that is whole and that `data` divides, if there is one."""
    data = placed.mesh.shape["data"]
    parts = [*placed.spec, *(None,) * (len(shape) - len(placed.spec))]
    for dimension, size in enumerate(shape):
        if parts[dimension] is None and size % data == 0:
            parts[dimension] = "data"
            break
    return NamedSharding(placed.mesh, PartitionSpec(*parts))


def whole(mesh: Mesh) -> NamedSharding:
    """On every device."""
    return NamedSharding(mesh, WHOLE)


def rows(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows [B, ...] along `data`, behind `leading` other axes."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, "data"))


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays, of equal values in every process, placed; those that already lie so are taken as they are."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def one(value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value if value.sharding == sharding else jax.device_put(value, sharding)
        host = np.asarray(value)  # device_put would have the processes compare their values first
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def by_rows(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any = (WHOLE, ROWS),
    out_specs: Any = ROWS,
) -> Callable[..., Any]:
    """`function`, whose rows have nothing to do with one another, run on each device of `data` for its own rows.

    Left to itself XLA would gather all rows where a computation sorts, gathers or scatters along them. `in_specs`: WHOLE or ROWS for
    each argument, as in `jax.shard_map`; the default is that of `function(weights, batch)`.
    """
    if mesh.shape["data"] == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False
    )


def everywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run whole by every device of `tensor` and `expert`, on arguments and weights that lie whole on each."""
    axes = unsplit_axes("tensor", "expert")
    if not axes:
        return function
    return jax.shard_map(function, in_specs=WHOLE, out_specs=WHOLE, axis_names=set(axes), check_vma=False)


def first_row(count: int) -> jax.Array:
    """Within `by_rows`: the number of this device's first row, of `count` on each; elsewhere 0. int32 scalar."""
    if "data" in jax.sharding.get_abstract_mesh().manual_axes:
        return lax.axis_index("data").astype(jnp.int32) * count
    return jnp.int32(0)


def gathered(x: jax.Array) -> jax.Array:
    """Made whole along `tensor`: what is decided from it, each device decides by itself and alike. Elsewhere the array itself."""
    return lax.with_sharding_constraint(x, WHOLE) if unsplit_axes("tensor") else x


@dataclass(frozen=True)
class Layout:
    """How one model lies on a mesh.

    Fields:
        mesh: with the axes AXES.
        replicated: every parameter lies whole on every device.
    """

    mesh: Mesh
    replicated: bool = False

    def fitted(self, config: Config) -> Config:
        """The model as it runs: of key/value heads of which there are fewer than devices of `tensor`, each is there several times, one a
        device; so they split like everything else."""
        if self.replicated:
            return config
        return replace(cast(Any, config), layers=tuple(map(self._fitted_layer, config.layers)))

    def _fitted_layer(self, layer: LayerConfig) -> LayerConfig:
        times = self._times(layer.attention.kv_heads)
        return replace(layer, attention=replace(layer.attention, kv_heads=times * layer.attention.kv_heads))

    def _times(self, kv_heads: int) -> int:
        tensor = self.mesh.shape["tensor"]
        return tensor // kv_heads if kv_heads < tensor and tensor % kv_heads == 0 else 1

    def place(self, value: Any, path: Sequence[Any], axes: Sequence[str]) -> jax.Array:
        """The `checkpoint.fill.Place` of this layout: a parameter as stored -> the parameter of the model as it runs."""
        for dimension, axis in enumerate(axes):
            if axis == "kv_heads" and not self.replicated and (times := self._times(value.shape[dimension])) > 1:
                value = np.repeat(value, times, axis=dimension)
        return put(value, self.where(value.shape, path, axes))

    def where(self, shape: Sequence[int], path: Sequence[Any], axes: Sequence[str]) -> NamedSharding:
        """Where a parameter of the model as it runs lies."""
        return whole(self.mesh) if self.replicated else split(self.mesh, axes, shape, ".".join(map(str, path)))


def verifier_layout(mesh: Mesh, config: Layered, parameters: ShapesAndAxes) -> Layout:
    """How a verifier lies on a mesh: split. A warning says what that costs: key/value heads kept several times, idle axes.

    Raises InputError, for the mesh, where a dimension does not divide.
    """
    problem = misfit(mesh, parameters)
    if problem is not None:
        raise InputError(f"mesh: {problem}")
    _warn_of_repeated_heads(mesh, config, "verifier")
    if mesh.shape["expert"] > 1 and all(layer.moe is None for layer in config.layers):
        warnings.warn(
            f"mesh: the model has no experts: the {mesh.shape['expert']} devices along expert do the same work",
            stacklevel=4,
        )
    return Layout(mesh)


def drafter_layout(mesh: Mesh, config: Layered, parameters: ShapesAndAxes) -> Layout:
    """How a drafter lies on a mesh: split as its verifier is where every dimension divides, else whole on every device, what it borrows
    from the verifier included, which a warning says."""
    problem = misfit(mesh, parameters)
    if problem is None:
        _warn_of_repeated_heads(mesh, config, "drafter")
        return Layout(mesh)
    warnings.warn(f"mesh: the drafter lies whole on every device: {problem}", stacklevel=4)
    return Layout(mesh, replicated=True)


def _warn_of_repeated_heads(mesh: Mesh, config: Layered, name: str) -> None:
    tensor = mesh.shape["tensor"]
    fewer = sorted({layer.attention.kv_heads for layer in config.layers if layer.attention.kv_heads < tensor})
    if fewer:
        heads = " and ".join(map(str, fewer))
        warnings.warn(
            f"mesh: tensor={tensor} are more devices than the {name} has key/value heads ({heads}): several keep the same one",
            stacklevel=5,
        )


def misfit(mesh: Mesh, parameters: ShapesAndAxes) -> str | None:
    """What keeps parameters from lying on the mesh, and what would fit; None if nothing does."""
    for along in AXES[1:]:
        number = mesh.shape[along]
        dimensions = {
            (axis, size): path
            for path, (shape, axes) in parameters.items()
            for axis, size in zip(axes, shape, strict=True)
            if RULES.get(axis) == along
        }
        wrong = [(axis, size) for axis, size in dimensions if not _fits(axis, size, number)]
        if wrong:
            axis, size = wrong[0]
            most = min(size for other, size in dimensions if other != "kv_heads")
            fitting = [n for n in range(1, most + 1) if all(_fits(*dimension, n) for dimension in dimensions)]
            name = ".".join(map(str, dimensions[axis, size]))
            return (
                f"{along}={number} does not divide the {size} {axis} of {name}; {along} may be "
                f"{', '.join(map(str, fitting))}"
            )
    return None


def _fits(axis: str, size: int, number: int) -> bool:
    return size % number == 0 or (axis == "kv_heads" and number % size == 0)

"""Kernels on several devices: the compiler cannot split a kernel, so each device runs it on its own rows and heads."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

ROWS, HEADS = "data", "tensor"  # the mesh axes that a batch's rows and attention heads are split along


def unsplit_axes(*names: str) -> tuple[str, ...]:
    """Which of these mesh axes the compiler splits where this is traced: those of several devices that no `shard_map` has taken yet.
    None where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in names if kinds.get(name) == AxisType.Auto and mesh.shape[name] > 1)


def each_device(function: Callable[..., Any], in_axes: Any, out_axes: Any, kv_heads: int) -> Callable[..., Any]:
    """`function`, run by each device on the rows and heads that it holds; the function itself on a single device.

    in_axes: for each argument the axes among ROWS and HEADS that its dimensions are split along, such as (ROWS, HEADS) for
    [B, K, S, H]; out_axes: likewise, of the result or of each. kv_heads: K; where the devices do not divide it, heads are left to the
    compiler.
    """
    axes = unsplit_axes(ROWS, HEADS)
    if HEADS in axes and kv_heads % jax.sharding.get_abstract_mesh().shape[HEADS]:
        axes = tuple(axis for axis in axes if axis != HEADS)
    if not axes:
        return function

    def specs(of: Any) -> Any:
        if any(isinstance(part, tuple) for part in of):
            return tuple(map(specs, of))
        return PartitionSpec(*(axis if axis in axes else None for axis in of))

    return jax.shard_map(
        function, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=set(axes), check_vma=False
    )

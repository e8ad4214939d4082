"""A described GPU, and compilation for it.

XLA's CUDA plugin compiles to machine code without a device when it is told what the device is like (its GpuTargetConfig). That shows that
a program compiles, with what registers, shared memory, device memory and collectives; not that its numbers are right, nor its speed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, use_abstract_mesh

from jaxspec.forecast.programs import lies, on
from jaxspec.sharding import AXES, whole
from jaxspec_kernels.implementation import use

TARGETS = Path(__file__).parent / "targets"
NAMES = tuple(sorted(file.stem for file in TARGETS.glob("*.txtpb")))


def missing() -> str | None:
    """Why nothing can be compiled here, None if it can."""
    if find_spec("jax_plugins") is not None and find_spec("jax_plugins.xla_cuda12") is not None:
        return None
    version = jax.__version__
    return (
        "the wheels that compile for CUDA are not here: "
        f"pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
    )


@dataclass(frozen=True)
class Target:
    """Described GPUs of one kind.

    Fields:
        name: of the description's file.
        kind: as JAX names the device.
        mesh: of them.
    """

    name: str
    kind: str
    mesh: Mesh

    @classmethod
    def load(cls, name: str, sizes: Mapping[str, int] | None = None) -> "Target":
        """As many GPUs of the description targets/NAME.txtpb as a mesh of these sizes has, by default one; all in one process."""
        description = (TARGETS / f"{name}.txtpb").read_text()
        shape = tuple((sizes or {}).get(axis, 1) for axis in AXES)
        # Slices x hosts x devices. Collectives compile without NVIDIA's library for them, which they call when they run.
        devices = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{math.prod(shape)}", target_config=description
        ).devices
        return cls(name, devices[0].device_kind, Mesh(np.array(devices).reshape(shape), AXES))

    def abstract(self, tree: Any) -> Any:
        """Arrays or shapes -> shapes that lie on the devices, whole where they say nothing else."""
        return jax.tree.map(lambda leaf: on(lies(leaf) or whole(self.mesh), leaf), tree)

    def lower(self, jitted: jax.stages.Wrapped, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
        """Traced with the Triton kernels, for these GPUs."""
        with use("triton"), use_abstract_mesh(self.mesh.abstract_mesh):
            return jitted.lower(*self.abstract(arguments))

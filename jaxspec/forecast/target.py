"""A described GPU, and compilation for it.

XLA's CUDA plugin compiles to machine code without a device when it is told what the device is like (its GpuTargetConfig). That shows that
a program compiles, with what registers, shared memory, device memory and collectives; not that its numbers are right, nor its speed.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

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
    """A described GPU.

    Fields:
        name: of its file.
        kind: as JAX names the device.
        mesh: of one such device.
    """

    name: str
    kind: str
    mesh: Mesh

    @classmethod
    def load(cls, name: str) -> "Target":
        """The description targets/NAME.txtpb."""
        description = (TARGETS / f"{name}.txtpb").read_text()
        topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=description)
        device = topology.devices[0]
        return cls(name, device.device_kind, Mesh(np.array([device]), ("tensor",)))

    def abstract(self, tree: Any) -> Any:
        """Arrays or shapes -> shapes that lie on the device."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def lower(self, jitted: jax.stages.Wrapped, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
        """Traced with the Triton kernels, for this GPU."""
        with use("triton"), use_abstract_mesh(self.mesh.abstract_mesh):
            return jitted.lower(*self.abstract(arguments))

"""A model on a mesh, as a plan sees it: shapes and where they lie, by the rules that loading follows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxspec.checkpoint.fill import flat_parameters, shapes_and_axes
from jaxspec.config import LayerConfig, VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.forecast.programs import AbstractPrograms, Lower
from jaxspec.layers.cache import cache_owners
from jaxspec.sharding import AXES, drafter_layout, split, verifier_layout


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Fields:
        path: where it is in its module.
        axes: its logical axes.
        size: elements on one device.
        nbytes: bytes on one device.
    """

    path: tuple[str | int, ...]
    axes: tuple[str, ...]
    size: int
    nbytes: int

    @property
    def is_expert(self) -> bool:
        """Whether it holds one matrix for each expert."""
        return self.axes[0] == "expert"


class Setup:
    """What is planned.

    Attributes:
        verifier, drafter: as they run on the mesh; the drafter may be None.
        plan: what a cycle does.
        dtype: of weights and caches.
        sizes: of the mesh's axes.
        programs: on shapes, not split.
        verifier_weights, drafter_weights: on one device; of the drafter's those that are no weights of the verifier.
    """

    def __init__(
        self,
        verifier: VerifierConfig,
        drafter: DrafterConfig | None,
        plan: Plan,
        dtype: np.dtype,
        sizes: Mapping[str, int],
    ):
        """Raises InputError where the model does not divide among the devices of the mesh."""
        self.plan, self.dtype, self.sizes = plan, dtype, dict(sizes)
        # Of an abstract mesh the rules read the same things.
        mesh = cast(
            Mesh, AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        )
        whole = AbstractPrograms(verifier, drafter, plan, dtype)
        parameters = flat_parameters(nnx.state(whole.decoder))
        self.verifier = verifier_layout(mesh, verifier, shapes_and_axes(parameters)).fitted(verifier)
        self.drafter, self.drafter_replicated = drafter, False
        if drafter is not None:
            parameters = flat_parameters(nnx.state(whole.drafter))
            layout = drafter_layout(mesh, drafter, shapes_and_axes(parameters))
            self.drafter, self.drafter_replicated = layout.fitted(drafter), layout.replicated
        as_whole = (self.verifier, self.drafter) == (verifier, drafter)
        self.programs = whole if as_whole else AbstractPrograms(self.verifier, self.drafter, plan, dtype)
        self._mesh = mesh
        self.verifier_weights = tuple(self._weights(self.programs.decoder, replicated=False))
        self.drafter_weights = tuple(
            weight for weight in self._weights(self.programs.drafter, self.drafter_replicated) if not self._lent(weight)
        )

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return prod(self.sizes.values())

    @property
    def tensor(self) -> int:
        """Devices that heads and widths are split among."""
        return self.sizes["tensor"]

    def rows(self, batch: int) -> int:
        """Rows on one device, of `batch` in all."""
        return -(-batch // self.sizes["data"])

    def placed(self, lower: Lower, mesh: Mesh | None = None) -> AbstractPrograms:
        """Programs whose weights and caches lie on a mesh of these sizes, as those of an engine do; one device needs none."""
        assert self.devices == (1 if mesh is None else mesh.size)
        models = self.verifier, self.drafter, self.plan, self.dtype
        return AbstractPrograms(*models, lower, mesh if self.devices > 1 else None, self.drafter_replicated)

    def head_bytes(self) -> int:
        """Of the verifier's output head, on one device."""
        path = ("embed", "weight") if self.verifier.tied else ("head", "weight")
        return next(weight.nbytes for weight in self.verifier_weights if weight.path == path)

    def slot_bytes(self, layers: Sequence[LayerConfig], replicated: bool = False) -> int:
        """Of the keys and values of one position, of all layers, on one device."""
        attention = [layer.attention for layer in layers]
        split_by = 1 if replicated else self.tensor
        heads = (attention[i].kv_heads // split_by * attention[i].head_dim for i in cache_owners(attention))
        return 2 * self.dtype.itemsize * sum(heads)

    def _weights(self, module: nnx.Module | None, replicated: bool) -> Iterator[Weight]:
        for path, leaf in flat_parameters(nnx.state(module)).items() if module is not None else ():
            axes, shape = leaf.get_metadata()["axes"], tuple(leaf.shape)
            parts = 1
            if not replicated:
                spec = split(self._mesh, axes, shape, ".".join(map(str, path))).spec
                parts = prod(self.sizes[axis] for axis in spec if axis is not None)
            size = prod(shape) // parts
            yield Weight(path, tuple(axes), size, size * leaf.dtype.itemsize)

    def _lent(self, weight: Weight) -> bool:
        """Whether a parameter of the drafter is the verifier's own array. Rows of a reduced head are a copy, and so is everything of a
        drafter that lies whole beside a verifier that is split."""
        assert self.drafter is not None
        if self.drafter_replicated:
            return False
        if weight.path == ("vocabulary", "embed", "weight"):
            return not self.drafter.own_embed
        return weight.path == ("vocabulary", "head", "weight") and not (
            self.drafter.own_head or self.drafter.reduced_vocab
        )


def check_room(setup: Setup, context: int) -> None:
    """Raises InputError for a context longer than the model's longest sequence."""
    longest = setup.verifier.max_positions
    if not 1 <= context <= longest:
        raise InputError(f"--context {context} must be from 1 to {longest}, the model's longest sequence")

"""Which implementation of the kernels runs: by argument, by `use`, or by platform."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import jax

# xla: plain jax.numpy. triton: Pallas kernels, compiled by Triton for NVIDIA GPUs. interpret: the same kernels run step by step on any
# platform, to test them; slow.
Implementation = Literal["xla", "triton", "interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_used: ContextVar[Implementation | None] = ContextVar("jaxspec_kernels_implementation", default=None)


@contextmanager
def use(implementation: Implementation | None) -> Iterator[None]:
    """What is traced meanwhile takes this implementation where no argument says otherwise; None: the platform's.

    The choice is made when a function is traced: a program that is already compiled keeps what it has.
    """
    token = _used.set(None if implementation is None else _known(implementation))
    try:
        yield
    finally:
        _used.reset(token)


def resolve(implementation: Implementation | None = None) -> Implementation:
    """The argument if there is one, else that of `use`, else triton on NVIDIA GPUs and xla elsewhere."""
    if implementation is not None:
        return _known(implementation)
    return _used.get() or default()


def default() -> Implementation:
    """The platform's: triton on NVIDIA GPUs, xla elsewhere."""
    return "triton" if has_gpu() else "xla"


def has_gpu() -> bool:
    """Whether the default device is an NVIDIA GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and "NVIDIA" in device.device_kind


def _known(implementation: Implementation) -> Implementation:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return implementation

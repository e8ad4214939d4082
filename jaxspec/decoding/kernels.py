"""Which implementation of the kernels a program is compiled with, and what happens where it does not compile."""

from collections.abc import Callable

import jax

from jaxspec.errors import InputError
from jaxspec_kernels.implementation import IMPLEMENTATIONS, Implementation, has_gpu, resolve, use


def check_kernels(kernels: Implementation | None) -> None:
    """None takes the platform's.

    Raises:
        InputError: an implementation that there is not, or that does not run here.
    """
    if kernels is not None and kernels not in IMPLEMENTATIONS:
        raise InputError(f"kernels is {kernels!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
    if kernels == "triton" and not has_gpu():
        platform = jax.devices()[0].platform
        raise InputError(
            f"--kernels triton needs an NVIDIA GPU, and the device here is a {platform}; leave it out or give xla"
        )


def compile_program(
    build: Callable[[], jax.stages.Wrapped],
    arguments: tuple[object, ...],
    kernels: Implementation | None,
    on_failure: Callable[[str], None],
) -> jax.stages.Compiled:
    """Compile with the kernels asked for; with XLA's own operations where Triton fails.

    Args:
        build: a new jitted function at each call, since a function is traced once only.
        arguments: what it is compiled for.
        kernels: None takes the platform's.
        on_failure: called with the reason before XLA is taken instead.
    """
    chosen = resolve(kernels)
    try:
        with use(chosen):
            return build().lower(*arguments).compile()
    except (
        Exception
    ) as error:  # of many kinds: too much shared memory, an operation that Triton lacks, a Pallas without Triton
        if chosen != "triton":
            raise
        on_failure(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    with use("xla"):
        return build().lower(*arguments).compile()

"""Time on a device, and the time that there is."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROUNDS = 7


class Budget:
    """Seconds for everything together; parts that would not end within them are left out.

    Attributes:
        skipped: the parts left out, in order.
    """

    def __init__(self, seconds: float):
        self.skipped: list[str] = []
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def allows(self, part: str, needs: float) -> bool:
        """Whether a part that takes about `needs` seconds may begin; one that may not is noted."""
        fits = self.left >= needs
        if not fits:
            self.leave_out(part, f"it takes about {needs:.0f} s, and {max(self.left, 0):.0f} s are left")
        return fits

    def leave_out(self, part: str, why: str) -> None:
        """Note a part that there is no time for."""
        self.skipped.append(part)
        print(f"left out: {part}: {why}", flush=True)


def median_seconds(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Of one call, its results ready; one call before warms up."""
    jax.block_until_ready(run())
    seen = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seen.append(time.perf_counter() - start)
    return statistics.median(seen)


def copy_bandwidth(nbytes: int, times: int, rounds: int) -> float:
    """Bytes/s, read and written, of a copy of `nbytes` bytes done `times` times in one program."""

    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: lax.optimization_barrier(x + jnp.float32(1)), x)

    copy = jax.jit(run)
    x = jnp.arange(nbytes // 4, dtype=jnp.float32)
    return 2 * nbytes * times / median_seconds(lambda: copy(x), rounds)

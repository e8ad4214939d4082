"""How a run is told to stop: signals, heeded by all of its processes at the same step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import distributed
from jaxspec.sharding import AXES


class Stop:
    """SIGTERM and Ctrl-C end the loop after the step under way; a second Ctrl-C ends it at once.

    Several processes end it at the same step: what each has got goes into every step, and the loop heeds what comes back with its report.

    Attributes:
        agreed: the number of the signal that the loop heeds; 0 for none.
    """

    def __init__(self, mesh: Mesh):
        self.agreed = self._got = 0
        self._lies = NamedSharding(mesh, PartitionSpec(AXES))
        self._size = mesh.size

    def asked(self) -> tuple[jax.Array, ...]:
        """The number of the signal that each process has got so far, int32 [devices]; alone nothing."""
        if not distributed.running():
            return ()
        mine = np.full(self._size, self._got, np.int32)
        return (jax.make_array_from_callback(mine.shape, self._lies, lambda index: mine[index]),)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Heeds the signals that come within."""

        def stop(number: int, frame: object) -> None:
            del frame
            if self._got == signal.SIGINT == number:
                raise KeyboardInterrupt
            self._got = number
            if not distributed.running():
                self.agreed = number

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

"""The kinds of devices that plans are made for, by their makers' figures."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One device.

    Fields:
        name: as `--device` takes it.
        memory: bytes of its own.
        reserved: of those, what programs cannot have: the driver's context, libraries, fragments.
        bandwidth: bytes/s that its memory gives.
        flops: dense matrix products a second, by dtype.
        link: bytes/s to its neighbours in each direction.
        sources: where the figures are from.
    """

    name: str
    memory: int
    reserved: int
    bandwidth: float
    flops: dict[str, float]
    link: float
    sources: str

    @property
    def usable(self) -> int:
        """Bytes for weights, caches and temporaries."""
        return self.memory - self.reserved


_AMPERE = "NVIDIA A100 datasheet: SXM, NVLink 600 GB/s both ways"
_HOPPER = "NVIDIA H100 datasheet: SXM, NVLink 900 GB/s both ways"
_A100 = {"bfloat16": 312e12, "float32": 19.5e12}  # float32 without TF32, as this project computes it
GPUS = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GIB, 2 * GIB, 1.555e12, _A100, 300e9, _AMPERE),
        Device("a100-80gb", 80 * GIB, 2 * GIB, 2.039e12, _A100, 300e9, _AMPERE),
        Device("h100-80gb", 80 * GIB, 2 * GIB, 3.35e12, {"bfloat16": 989e12, "float32": 67e12}, 450e9, _HOPPER),
    )
}


def find(name: str) -> Device:
    """One of GPUS, or "cpu": this machine's, measured now."""
    return this_cpu() if name == "cpu" else GPUS[name]


def this_cpu() -> Device:
    """Half a second of reading and multiplying tells the speeds."""
    data = np.ones(1 << 25, np.float32)  # 128 MiB: more than caches hold
    square = np.ones((1024, 1024), np.float32)
    bandwidth = data.nbytes / _seconds(data.sum)
    flops = 2 * 1024**3 / _seconds(lambda: square @ square)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rates = {"float32": flops, "bfloat16": flops}
    # Several that JAX is told to pretend exchange through the memory that they share.
    return Device("cpu", memory, 2 * GIB, bandwidth, rates, bandwidth, "measured with NumPy just now")


def _seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best

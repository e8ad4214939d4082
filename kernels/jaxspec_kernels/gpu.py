"""What the kernels' block sizes depend on."""

from dataclasses import dataclass

import jax

from jaxspec_kernels.implementation import has_gpu

# Bytes of shared memory that one program may use, by compute capability (CUDA C++ programming guide, technical specifications).
SHARED_MEMORY = {"8.0": 166_912, "8.6": 101_376, "8.7": 166_912, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448}

MIN_ROWS = 16  # of a tensor core's product
MAX_TILE = 16_384  # float32 sums that one program keeps in registers
MAX_TILE_FLOAT32 = 8_192  # products without tensor cores keep their operands there too


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. The defaults are an A100's.

    Fields:
        multiprocessors: programs that run at the same time, at the least.
        shared_memory: bytes that one program may use, the buffers of its pipelined loads included.
    """

    multiprocessors: int = 108
    shared_memory: int = SHARED_MEMORY["8.0"]


def current() -> Gpu:
    """The default device; where it is no GPU, an A100. A kind that is not known is taken to have the least shared memory."""
    if not has_gpu():
        return Gpu()
    device = jax.devices()[0]
    return Gpu(device.core_count, SHARED_MEMORY.get(device.compute_capability, min(SHARED_MEMORY.values())))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()

"""Loads a verifier on a mesh of eight pretended devices, in a process of its own, and prints what that took in host memory as JSON:
`python load_run.py DIR MESH`. On CPUs the shards themselves are host memory, so what counts is what there was beside them.
"""

import json
import sys
from pathlib import Path


def memory(name: str) -> int:
    """A line of this process's /proc status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(directory: str, mesh: str) -> dict[str, int]:
    import jax
    from flax import nnx

    from jaxspec.checkpoint.fill import flat_parameters
    from jaxspec.checkpoint.load import load_verifier
    from jaxspec.sharding import mesh_of

    devices = mesh_of(mesh)
    load_verifier(
        Path(__file__).parent / "goldens" / "llama", mesh=devices
    )  # what JAX itself takes is there from here on
    begun = before = memory("VmRSS")
    growth = 0

    def read(done: int, total: int) -> None:
        """Between two tensors: how far memory has risen since the last one was read."""
        nonlocal before, growth
        growth = max(growth, memory("VmHWM") - before)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew

    Path("/proc/self/clear_refs").write_text("5")
    module = load_verifier(directory, mesh=devices, progress=read).module
    leaves = [leaf[...] for leaf in flat_parameters(nnx.state(module)).values()]
    jax.block_until_ready(leaves)
    read(0, 0)
    return {
        "shards": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
        "largest": max(leaf.nbytes for leaf in leaves),
        "risen": before - begun,
        "growth": growth,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

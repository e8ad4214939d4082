"""What a compiled program asks of each device: memory and collectives, as XLA tells them."""

import re
from dataclasses import dataclass
from math import prod

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(?:-done)?\(")  # of two halves, the one that has the result
ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")  # as bf16[8,4096]


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. In place: arguments whose buffers outputs take over."""

    arguments: int
    outputs: int
    in_place: int
    temporary: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.in_place + self.temporary


def memory(compiled: jax.stages.Compiled) -> Memory:
    found = compiled.memory_analysis()
    assert found is not None
    return Memory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )


@dataclass(frozen=True)
class Exchanged:
    """Exchanges of one kind: how many, and the bytes of their results on each device, all together."""

    count: int = 0
    nbytes: int = 0


def collectives(compiled: jax.stages.Compiled) -> dict[str, Exchanged]:
    """Those of each kind in the program text; one in a loop counts once."""
    return collectives_in(compiled.as_text() or "")


def collectives_in(text: str) -> dict[str, Exchanged]:
    """Those of each kind in a program's HLO."""
    found: dict[str, Exchanged] = {}
    for result, kind in COLLECTIVE.findall(text):
        before = found.get(kind, Exchanged())
        found[kind] = Exchanged(before.count + 1, before.nbytes + _bytes(result))
    return found


def _bytes(result: str) -> int:
    """Of an array or a tuple of arrays, as HLO writes its type."""
    return sum(
        prod(map(int, filter(None, dims.split(",")))) * max(int(bits or 8) // 8, 1)  # pred has no bits
        for _, bits, dims in ARRAY.findall(result)
    )

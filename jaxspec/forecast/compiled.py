"""What a compiled program asks of each device: memory and collectives, as XLA tells them."""

import re
from collections import Counter
from dataclasses import dataclass

import jax

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


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


def collectives(compiled: jax.stages.Compiled) -> Counter[str]:
    """How many of each kind the program text holds; one in a loop counts once."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text() or "")
    return Counter(found)

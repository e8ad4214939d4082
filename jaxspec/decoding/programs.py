"""The compiled programs of a model, each compiled ahead of time for one bucket of shapes and kept.

Shapes are rounded up to buckets, so that the number of programs is bounded and nothing compiles once a bucket is warm; compile time is
measured here and nowhere mixed with run time.
"""

import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import VerifierConfig
from jaxspec.decoding.plain import MAX_STEPS, decode, prefill
from jaxspec.decoding.state import DecodeState, Dispatch, Requests
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder

MIN_PREFILL = 16  # T of a prefill call: a power of two from here ...
MAX_PREFILL = 512  # ... to here; longer prompts take several calls
MIN_CAPACITY = 256  # S of a cache: a power of two from here on, at most the model's longest sequence
CAPACITY_STEP = 128
MIN_STOP_IDS = 4


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and at least `least` (itself a power of two)."""
    return max(least, 1 << max(number - 1, 0).bit_length())


class Programs:
    """Runs a model's programs, compiling each the first time its shapes come up.

    Attributes:
        compile_s: seconds spent compiling so far.
        keys: one tuple for each compiled program: its name and the sizes it was compiled for.
    """

    def __init__(
        self, config: VerifierConfig, decoder: Decoder, on_compile: Callable[[str | None], None] | None = None
    ):
        """`on_compile` is called with a program's description before it compiles, and with None behind it."""
        self.config = config
        self.compile_s = 0.0
        graphdef, state = nnx.split(decoder)
        # A flat list costs a tenth of a millisecond a dispatch; a module as an argument costs many (298 arrays: flat 0.4 ms, module 9 ms).
        self._graphdef = graphdef
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._on_compile = on_compile
        self._compiled: dict[tuple[str | int | bool, ...], jax.stages.Compiled] = {}

    @property
    def keys(self) -> tuple[tuple[str | int | bool, ...], ...]:
        return tuple(self._compiled)

    def capacity(self, tokens: int) -> int:
        """S for rows of at most `tokens` tokens: a power of two, but no further than the model's longest sequence."""
        longest = -(-self.config.max_positions // CAPACITY_STEP) * CAPACITY_STEP
        return min(power_of_two(tokens, MIN_CAPACITY), longest)

    def empty_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """A cache of B rows and S slots with nothing in it."""
        layers = [layer.attention for layer in self.config.layers]
        program = self._program(
            ("empty cache", batch, capacity), lambda: jax.jit(lambda: KVCache.empty(layers, batch, capacity, dtype)), ()
        )
        return program()

    def prefill(self, cache: KVCache, tokens: np.ndarray, count: np.ndarray) -> KVCache:
        """`plain.prefill` on tokens int32 [B, T] of bucket size; the cache is donated."""

        def build() -> jax.stages.Wrapped:
            def run(leaves: list[jax.Array], cache: KVCache, tokens: jax.Array, count: jax.Array) -> KVCache:
                return prefill(self._decoder(leaves), cache, tokens, count)

            return jax.jit(run, donate_argnums=1)

        arguments = (self._leaves, cache, tokens, count)
        return self._program(("prefill", *tokens.shape, cache.capacity), build, arguments)(*arguments)

    def decode(self, state: DecodeState, requests: Requests, steps: int) -> tuple[DecodeState, Dispatch]:
        """`plain.decode` of at most `steps` <= MAX_STEPS tokens; the state is donated."""
        assert 1 <= steps <= MAX_STEPS

        def build() -> jax.stages.Wrapped:
            def run(
                leaves: list[jax.Array], state: DecodeState, requests: Requests, steps: jax.Array
            ) -> tuple[DecodeState, Dispatch]:
                return decode(self._decoder(leaves), state, requests, steps)

            return jax.jit(run, donate_argnums=1)

        batch, stop_ids = requests.stop_ids.shape
        key = ("decode", batch, state.cache.capacity, stop_ids, state.counts is not None)
        arguments = (self._leaves, state, requests, np.int32(steps))
        return self._program(key, build, arguments)(*arguments)

    def _decoder(self, leaves: list[jax.Array]) -> Decoder:
        return nnx.merge(self._graphdef, self._treedef.unflatten(leaves))

    def _program(
        self, key: tuple[str | int | bool, ...], build: Callable[[], jax.stages.Wrapped], arguments: tuple[object, ...]
    ) -> jax.stages.Compiled:
        program = self._compiled.get(key)
        if program is None:
            if self._on_compile is not None:
                self._on_compile(" ".join(map(str, key)))
            start = time.perf_counter()
            program = build().lower(*arguments).compile()
            self.compile_s += time.perf_counter() - start
            self._compiled[key] = program
            if self._on_compile is not None:
                self._on_compile(None)
        return program


class RunTimer:
    """Adds up the seconds of its `with` blocks, without what was spent compiling in them.

    Attributes:
        seconds: so far.
    """

    def __init__(self, programs: Programs):
        self.seconds = 0.0
        self._programs = programs
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter() - self._programs.compile_s

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._programs.compile_s - self._start

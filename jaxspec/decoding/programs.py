"""The compiled programs of a model, each compiled ahead of time for one bucket of shapes and kept.

Shapes are rounded up to buckets, so that the number of programs is bounded and nothing compiles once a bucket is warm; compile time is
measured here and nowhere mixed with run time.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.kernels import compile_program
from jaxspec.decoding.loop import MAX_CYCLES, decode, empty_context, prefill
from jaxspec.decoding.state import DecodeState, Dispatch, DraftState, Requests
from jaxspec.drafters.base import Drafter, attention_layers
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder
from jaxspec_kernels.implementation import Implementation

Key = tuple[str | int | bool | None, ...]  # a program's name and the sizes and variants it is compiled for

# What `Programs.repeat` repeats; it leaves the shapes as they are.
Step = Callable[[Decoder, Drafter | None, DecodeState, Requests, Plan], DecodeState]

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
        self,
        config: VerifierConfig,
        decoder: Decoder,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
        on_compile: Callable[[str | None], None] | None = None,
        kernels: Implementation | None = None,
    ):
        """A verifier's programs, with a drafter's inside.

        Args:
            config: what the decoder is.
            decoder: with its weights.
            drafter: with its weights, or None.
            plan: what a cycle does; None decodes plainly.
            on_compile: called with a program's description before it compiles, and with None behind it.
            kernels: the kernels' implementation; None takes the platform's. Where Triton fails to compile a program, XLA's own
                operations are taken instead, and one warning says so.
        """
        self.config = config
        self.plan = plan or Plan()
        self.drafter_config = None if drafter is None else drafter.config
        self.compile_s = 0.0
        # A flat list costs a tenth of a millisecond a dispatch; a module as an argument costs many (298 arrays: flat 0.4 ms, module 9 ms).
        self._graphdef, state = nnx.split((decoder, drafter))
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._dtype = decoder.embed.weight.dtype
        self._on_compile = on_compile
        self._kernels: Implementation | None = kernels
        self._warned = False
        self._compiled: dict[Key, jax.stages.Compiled] = {}

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self._compiled)

    def capacity(self, tokens: int) -> int:
        """S for rows of at most `tokens` tokens: a power of two, but no further than the model's longest sequence and the scratch slots
        of a block behind it."""
        block = self.drafter_config.block.size if self.drafter_config and self.drafter_config.block else 0
        scratch = max(self.plan.drafts, block)
        longest = -(-(self.config.max_positions + scratch) // CAPACITY_STEP) * CAPACITY_STEP
        return min(power_of_two(tokens + scratch, MIN_CAPACITY), longest)

    def empty(self, anchor: np.ndarray, capacity: int) -> tuple[KVCache, DraftState | None]:
        """Caches of B rows and S slots with nothing in them; anchor int32 [B]."""
        layers = [layer.attention for layer in self.config.layers]
        batch, drafter, drafts = anchor.shape[0], self.drafter_config, self.plan.drafts

        def build() -> jax.stages.Wrapped:
            def run(anchor: jax.Array) -> tuple[KVCache, DraftState | None]:
                cache = KVCache.empty(layers, batch, capacity, self._dtype)
                if drafter is None:
                    return cache, None
                draft_cache = KVCache.empty(attention_layers(drafter), batch, capacity, self._dtype)
                context = empty_context(anchor, drafts, drafter.feature_width, self._dtype)
                return cache, DraftState(draft_cache, context)

            return jax.jit(run)

        return self._program(("empty", batch, capacity), build, (anchor,))(anchor)

    def prefill(
        self, cache: KVCache, draft: DraftState | None, tokens: np.ndarray, count: np.ndarray
    ) -> tuple[KVCache, DraftState | None]:
        """`loop.prefill` on tokens int32 [B, T + 1], T of bucket size; cache and draft are donated."""

        def build() -> jax.stages.Wrapped:
            def run(
                leaves: list[jax.Array],
                cache: KVCache,
                draft: DraftState | None,
                tokens: jax.Array,
                count: jax.Array,
            ) -> tuple[KVCache, DraftState | None]:
                return prefill(*self._models(leaves), cache, draft, tokens, count)

            return jax.jit(run, donate_argnums=(1, 2))

        arguments = (self._leaves, cache, draft, tokens, count)
        return self._program(("prefill", *tokens.shape, cache.capacity), build, arguments)(*arguments)

    def decode(
        self, state: DecodeState, requests: Requests, cycles: int, logprobs: int | None = None
    ) -> tuple[DecodeState, Dispatch]:
        """`loop.decode` of at most `cycles` <= MAX_CYCLES cycles, reporting the `logprobs` likeliest tokens; the state is donated."""
        assert 1 <= cycles <= MAX_CYCLES
        plan = replace(self.plan, logprobs=logprobs)

        def build() -> jax.stages.Wrapped:
            def run(
                leaves: list[jax.Array], state: DecodeState, requests: Requests, cycles: jax.Array
            ) -> tuple[DecodeState, Dispatch]:
                return decode(*self._models(leaves), state, requests, cycles, plan)

            return jax.jit(run, donate_argnums=1)

        batch, stop_ids = requests.stop_ids.shape
        variant = (state.counts is not None, requests.bias is not None, logprobs)
        key = ("decode", batch, state.cache.capacity, stop_ids, *variant)
        arguments = (self._leaves, state, requests, np.int32(cycles))
        return self._program(key, build, arguments)(*arguments)

    def repeat(self, name: str, step: Step, state: DecodeState, requests: Requests, times: int) -> DecodeState:
        """`step` done `times` times in one program of this name, for measurements; the state is donated."""

        def build() -> jax.stages.Wrapped:
            def run(leaves: list[jax.Array], state: DecodeState, requests: Requests, times: jax.Array) -> DecodeState:
                models = self._models(leaves)
                return jax.lax.fori_loop(0, times, lambda _, state: step(*models, state, requests, self.plan), state)

            return jax.jit(run, donate_argnums=1)

        batch, stop_ids = requests.stop_ids.shape
        arguments = (self._leaves, state, requests, np.int32(times))
        return self._program((name, batch, state.cache.capacity, stop_ids), build, arguments)(*arguments)

    def set_drafter(self, drafter: Drafter) -> None:
        """Replace the drafter by one that differs in the values of its arrays only; what is compiled stays."""
        graphdef, state = nnx.split((self._models(self._leaves)[0], drafter))
        leaves, treedef = jax.tree.flatten(state)
        if graphdef != self._graphdef or treedef != self._treedef:
            raise ValueError("the new drafter must be built like the one it replaces")
        self._leaves = leaves

    def _models(self, leaves: list[jax.Array]) -> tuple[Decoder, Drafter | None]:
        return nnx.merge(self._graphdef, self._treedef.unflatten(leaves))

    def _program(
        self, key: Key, build: Callable[[], jax.stages.Wrapped], arguments: tuple[object, ...]
    ) -> jax.stages.Compiled:
        program = self._compiled.get(key)
        if program is None:
            if self._on_compile is not None:
                self._on_compile(" ".join(map(str, key)))
            start = time.perf_counter()
            program = compile_program(build, arguments, self._kernels, self._warn)
            self.compile_s += time.perf_counter() - start
            self._compiled[key] = program
            if self._on_compile is not None:
                self._on_compile(None)
        return program

    def _warn(self, reason: str) -> None:
        if not self._warned:
            warnings.warn(
                f"the Triton kernels do not compile here ({reason}); XLA's own operations do their work, more slowly",
                stacklevel=2,
            )
        self._warned = True


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

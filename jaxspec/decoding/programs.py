"""The compiled programs of a model, each compiled ahead of time for one bucket of shapes and kept.

Shapes are rounded up to buckets, so that the number of programs is bounded and nothing compiles once a bucket is warm; compile time is
measured here and nowhere mixed with run time.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.kernels import compile_program
from jaxspec.decoding.loop import MAX_CYCLES, decode, empty_context, prefill
from jaxspec.decoding.state import DecodeState, Dispatch, DraftState, Requests
from jaxspec.drafters.base import Drafter, WholeDrafter, attention_layers
from jaxspec.layers.cache import KVCache
from jaxspec.sharding import ROWS, WHOLE, by_rows, put, whole
from jaxspec.sharding import rows as row_sharding
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

# Records have a cycle axis in front of the rows.
DISPATCH: Any = Dispatch(PartitionSpec(None, "data"), PartitionSpec("data"))  # pyright: ignore[reportArgumentType]
CACHE = PartitionSpec("data", "tensor")  # [B, K, S, H]


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and at least `least` (itself a power of two)."""
    return max(least, 1 << max(number - 1, 0).bit_length())


class Programs:
    """Runs a model's programs, compiling each the first time its shapes come up.

    Attributes:
        compile_s: seconds spent compiling so far.
        compiled: the compiled programs by name and the sizes they were compiled for.
    """

    def __init__(
        self,
        config: VerifierConfig,
        decoder: Decoder,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
        on_compile: Callable[[str | None], None] | None = None,
        kernels: Implementation | None = None,
        mesh: Mesh | None = None,
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
            mesh: where the weights lie; None: on one device.
        """
        self.config = config
        self.plan = plan or Plan()
        self.drafter_config = None if drafter is None else drafter.config
        self.compile_s = 0.0
        self.mesh = mesh
        # A flat list costs a tenth of a millisecond a dispatch; a module as an argument costs many (298 arrays: flat 0.4 ms, module 9 ms).
        self._graphdef, state = nnx.split((decoder, drafter))
        leaves, self._treedef = jax.tree.flatten(state)
        self._leaves = self._placed(leaves)
        self._drafter_whole = mesh is not None and drafter is not None and lies_whole(drafter, mesh)
        self._dtype = decoder.embed.weight.dtype
        self._on_compile = on_compile
        self._kernels: Implementation | None = kernels
        self._warned = False
        self.compiled: dict[Key, jax.stages.Compiled] = {}

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

        def run(anchor: jax.Array) -> tuple[KVCache, DraftState | None]:
            cache = KVCache.empty(layers, batch, capacity, self._dtype)
            if drafter is None:
                return cache, None
            draft_cache = KVCache.empty(attention_layers(drafter), batch, capacity, self._dtype)
            context = empty_context(anchor, drafts, drafter.feature_width, self._dtype)
            return cache, DraftState(draft_cache, context)

        def build() -> jax.stages.Wrapped:
            return jax.jit(run, out_shardings=self._lies(jax.eval_shape(run, anchor)))

        (anchor,) = arguments = (self.place(anchor),)
        return self._program(("empty", batch, capacity), build, arguments)(anchor)

    def place(self, rows: Any) -> Any:
        """Arrays of B rows in front, put where the rows of a batch lie; without a mesh as they are."""
        return rows if self.mesh is None else put(rows, row_sharding(self.mesh))

    def settled(self, state: Any) -> Any:
        """A state, or a tree with states in it, that came out of another program, back where it lies."""
        return state if self.mesh is None else jax.device_put(state, self._lies(state))

    def rows(self, number: int) -> int:
        """B for `number` rows: a multiple of the devices that share the rows."""
        return number if self.mesh is None else -(-number // self.mesh.shape["data"]) * self.mesh.shape["data"]

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

            return self._jit(run, (1, 2), (WHOLE, *(ROWS,) * 4), ROWS, (cache, draft))

        arguments = (self._leaves, cache, draft, *self.place((tokens, count)))
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

            # The host of every process reads what happened in every row.
            return self._jit(run, (1,), (WHOLE, ROWS, ROWS, WHOLE), (ROWS, DISPATCH), state, whole)

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

            return self._jit(run, (1,), (WHOLE, ROWS, ROWS, WHOLE), ROWS, state)

        batch, stop_ids = requests.stop_ids.shape
        arguments = (self._leaves, state, requests, np.int32(times))
        return self._program((name, batch, state.cache.capacity, stop_ids), build, arguments)(*arguments)

    def set_drafter(self, drafter: Drafter) -> None:
        """Replace the drafter by one that differs in the values of its arrays only; what is compiled stays."""
        graphdef, state = nnx.split((self._models(self._leaves)[0], drafter))
        leaves, treedef = jax.tree.flatten(state)
        if graphdef != self._graphdef or treedef != self._treedef:
            raise ValueError("the new drafter must be built like the one it replaces")
        self._leaves = self._placed(leaves)

    def _jit(
        self,
        run: Callable[..., Any],
        donate: tuple[int, ...],
        in_axes: tuple[Any, ...],
        out_axes: Any,
        state: Any,
        *beside: Callable[[Mesh], Any],
    ) -> jax.stages.Wrapped:
        """`run` jitted; on a mesh by each device on its own rows, its first result lying like `state` and the others as `beside` says."""
        mesh = self.mesh
        if mesh is None:
            return jax.jit(run, donate_argnums=donate)
        lies = self._lies(state)
        where = (lies, *(other(mesh) for other in beside)) if beside else lies
        return jax.jit(by_rows(run, mesh, in_axes, out_axes), donate_argnums=donate, out_shardings=where)

    def _lies(self, state: Any) -> Any:
        """Where what has B rows in front lies, caches in it included: the same tree; None without a mesh."""
        mesh = self.mesh
        if mesh is None:
            return None
        rows, heads = row_sharding(mesh), NamedSharding(mesh, CACHE)

        def of(part: Any) -> Any:
            if isinstance(part, DraftState) and self._drafter_whole:
                return jax.tree.map(lambda _: rows, part)
            if isinstance(part, DraftState):
                return DraftState(of(part.cache), jax.tree.map(lambda _: rows, part.context))
            if isinstance(part, KVCache):
                cache: Any = tuple(heads for _ in part.k)
                return KVCache(cache, cache, rows)  # pyright: ignore[reportArgumentType]
            return rows

        return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, DraftState | KVCache))

    def _placed(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Weights that lie on another device, such as a scripted drafter's, put whole on every device of the mesh."""
        mesh = self.mesh
        if mesh is None:
            return leaves
        return [
            leaf if leaf.sharding.device_set == set(mesh.devices.flat) else put(leaf, whole(mesh)) for leaf in leaves
        ]

    def _models(self, leaves: list[jax.Array]) -> tuple[Decoder, Drafter | None]:
        decoder, drafter = nnx.merge(self._graphdef, self._treedef.unflatten(leaves))
        return decoder, drafter if drafter is None or not self._drafter_whole else WholeDrafter(drafter)

    def _program(
        self, key: Key, build: Callable[[], jax.stages.Wrapped], arguments: tuple[object, ...]
    ) -> jax.stages.Compiled:
        program = self.compiled.get(key)
        if program is None:
            if self._on_compile is not None:
                self._on_compile(" ".join(map(str, key)))
            start = time.perf_counter()
            with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
                program = compile_program(build, arguments, self._kernels, self._warn)
            self.compile_s += time.perf_counter() - start
            self.compiled[key] = program
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


def lies_whole(module: Any, mesh: Mesh) -> bool:
    """Whether every array of a module lies whole on every device, or on one that is none of the mesh's."""
    devices = set(mesh.devices.flat)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(module))]
    return all(one.is_fully_replicated for one in shardings if one.device_set == devices)


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

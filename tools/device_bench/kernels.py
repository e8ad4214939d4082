"""The kernels: against the float32 reference on fresh random inputs, and timed beside XLA's own fusion of the plain version.

Slots and outputs that nothing has written hold NaN. Timed runs go round several sets of caches or weights, more than the device's own
caches hold, in one program, so that what is measured is the device's memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from aot_gate.programs import PAIRS, attention_shapes
from jax import lax

from device_bench.timing import median_seconds
from jaxspec.config import AttentionConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.layers.rope import inverse_frequencies
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.implementation import Implementation
from jaxspec_kernels.kv_injection import LayerKV, inject_kv

TOLERANCE = 2e-2  # ||kernel - reference|| / ||reference|| in bfloat16, which rounds at 2^-8 in several places
CHECKED_ROWS = 3
AIM = {
    "attention": "at least 60 % of copy bandwidth at 8k context",
    "injection": "1.5 times XLA's path, or 70 % of copy bandwidth",
}


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Fields:
        capacity: slots a row, S.
        queries: T.
        batches: B of the timed runs.
        rotated: bytes that the sets of a timed run hold together.
        repeats: times that a timed run goes round its sets.
        rounds: runs of which the median counts.
    """

    capacity: int
    queries: tuple[int, ...]
    batches: tuple[int, ...]
    rotated: int
    repeats: int
    rounds: int


FULL = Scale(capacity=8192, queries=(8, 16), batches=(1, 8), rotated=1 << 28, repeats=8, rounds=7)
TOY = Scale(capacity=40, queries=(4,), batches=(1,), rotated=1, repeats=1, rounds=1)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Fields:
        kernel: which.
        name: with its shape.
        floor: bytes that a timed call has to move.
        inputs: a key, rows, and whether they are ragged, to the arguments. Unwritten slots are NaN.
        call: the arguments after an implementation; gives what it computes.
        again: arguments and what a call gave to the arguments of the next call, which has to wait for it.
        rows: of the timed runs.
    """

    kernel: Literal["attention", "injection"]
    name: str
    floor: int
    inputs: Callable[[jax.Array, int, bool], Any]
    call: Callable[..., Any]
    again: Callable[[Any, Any], Any]
    rows: int


def cases(toy: bool) -> list[Case]:
    """Every shape of the three published pairs, or two toy ones."""
    scale = TOY if toy else FULL
    shapes, drafters = attention_shapes(), [pair.configs()[1] for pair in PAIRS]
    drafters = [drafter for drafter in drafters if drafter.block is not None]
    if toy:
        shapes, drafters = [_small(shapes[0])], [_small_drafter(drafters[0])]
    found = []
    for attention in shapes:
        for batch in scale.batches:
            for queries in scale.queries if batch == 1 else scale.queries[:1]:
                found.append(attention_case(attention, queries, batch, scale.capacity))
    for drafter in drafters:
        for batch in scale.batches:
            found.append(injection_case(drafter, scale.queries[0], batch, scale.capacity))
    return found


def attention_case(attention: AttentionConfig, queries: int, batch: int, capacity: int) -> Case:
    """Block attention of `queries` tokens a row over full caches."""
    n, k, h = attention.heads, attention.kv_heads, attention.head_dim
    run = partial(
        block_attention,
        scale=attention.scale,
        causal=attention.causal,
        window=attention.window,
        window_from_block=attention.window_from_block,
        softcap=attention.softcap,
    )

    def inputs(key: jax.Array, rows: int, ragged: bool) -> Any:
        keys = jax.random.split(key, 4)
        length = _lengths(keys[0], rows, capacity - queries, ragged)
        written = jnp.arange(capacity, dtype=jnp.int32)[None] < length[:, None] + queries
        q = jax.random.normal(keys[1], (rows, queries, n, h), jnp.bfloat16)
        caches = [
            jnp.where(written[:, None, :, None], jax.random.normal(one, (rows, k, capacity, h), jnp.bfloat16), jnp.nan)
            for one in keys[2:]
        ]
        return q, *caches, length

    def call(arguments: Any, implementation: Implementation) -> Any:
        return run(*arguments, implementation=implementation)

    def again(arguments: Any, out: Any) -> Any:
        return out.astype(arguments[0].dtype), *arguments[1:]

    seen = min(capacity, capacity if attention.window is None else attention.window + queries)
    sight = ("causal" if attention.causal else "both ways") + (
        f", window {attention.window}" if attention.window else ""
    )
    name = f"attention N {n} K {k} H {h}, B {batch} T {queries} S {capacity}, {sight}"
    floor = 2 * (2 * batch * k * seen * h + 2 * batch * queries * n * h)
    return Case("attention", name, floor, inputs, call, again, batch)


def injection_case(drafter: DrafterConfig, rows_of_features: int, batch: int, capacity: int) -> Case:
    """KV injection of one cycle's features into every layer's caches."""
    attention, layers = drafter.layers[0].attention, len(drafter.layers)
    k, h, d, block = attention.kv_heads, attention.head_dim, drafter.width, rows_of_features
    turns = [inverse_frequencies(layer.attention.rope) for layer in drafter.layers]

    def inputs(key: jax.Array, rows: int, ragged: bool) -> Any:
        keys = iter(jax.random.split(key, 3 + 3 * layers))

        def array(*shape: int, deviation: float = 1.0) -> jax.Array:
            return deviation * jax.random.normal(next(keys), shape, jnp.bfloat16)

        weights = [
            (
                array(k, h, d, deviation=d**-0.5),
                None if attention.v_from_k else array(k, h, d, deviation=d**-0.5),
                array(h) if attention.qk_norm else None,
            )
            for _ in range(layers)
        ]
        count = _lengths(next(keys), rows, block, ragged)
        start = _lengths(next(keys), rows, capacity - block, ragged)
        empty = tuple(jnp.full((rows, k, capacity, h), jnp.nan, jnp.bfloat16) for _ in range(layers))
        return array(rows, block, d), weights, empty, empty, start, count

    def call(arguments: Any, implementation: Implementation) -> Any:
        x, weights, k_caches, v_caches, start, count = arguments
        made = [
            LayerKV(key, value, None, None, norm, 0.0, attention.v_norm, *turn)
            for (key, value, norm), turn in zip(weights, turns, strict=True)
        ]
        return inject_kv(x, made, k_caches, v_caches, start, count, eps=drafter.norm_eps, implementation=implementation)

    def again(arguments: Any, out: Any) -> Any:
        x, weights, _, _, start, count = arguments
        # The features wait for what was written: otherwise XLA computes their projections once for all calls.
        waiting = x + 0 * jnp.nan_to_num(out[0][0][:, :1, 0, :1])
        return waiting, weights, *out, start, count

    written = 2 * batch * block * k * h * layers
    floor = 2 * (layers * k * h * d * (1 if attention.v_from_k else 2) + batch * block * d + written)
    name = f"injection L {layers} K {k} H {h} D {d}, B {batch} T {block}"
    return Case("injection", name, floor, inputs, call, again, batch)


def check(case: Case, key: jax.Array, implementation: Implementation) -> float:
    """The error of a ragged batch against the plain version in float32 on the same inputs."""
    inputs = jax.jit(case.inputs, static_argnums=(1, 2))(key, CHECKED_ROWS, True)
    upcast = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, inputs)
    want = jax.jit(lambda arguments: case.call(arguments, "xla"))(upcast)
    run = jax.jit(lambda arguments: case.call(arguments, implementation)).lower(inputs).compile()
    # Memory just given back is what the allocator hands out next: outputs begin as NaN.
    for poison in jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(run.out_info)]):
        poison.delete()
    got = jax.block_until_ready(run(inputs))
    return max(map(relative_error, jax.tree.leaves(got), jax.tree.leaves(want)))


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """The largest ||got - want|| / ||want|| of a row of arrays [B, ...] with NaN in the same places; infinite where one has it and the
    other not: NaN has come out, or a slot is written that nothing should write."""
    return float(_relative_error(got, want))


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    one, wanted = (x.astype(jnp.float32).reshape(x.shape[0], -1) for x in (got, want))
    differ = jnp.any(jnp.isnan(one) != jnp.isnan(wanted))
    one, wanted = jnp.nan_to_num(one), jnp.nan_to_num(wanted)
    # Row by row: what a long row attends to is small beside a short one's, and would not show.
    norms = jnp.linalg.norm(wanted, axis=1)
    errors = jnp.linalg.norm(one - wanted, axis=1) / jnp.where(norms > 0, norms, 1.0)
    return jnp.where(differ, jnp.inf, jnp.max(errors))


def seconds(case: Case, key: jax.Array, implementation: Implementation, scale: Scale) -> float:
    """Of one call over full rows."""
    number = -(-scale.rotated // case.floor)
    make = jax.jit(case.inputs, static_argnums=(1, 2))
    sets = [make(one, case.rows, False) for one in jax.random.split(key, number)]

    def run(sets: list[Any]) -> Any:
        def once(_: jax.Array, sets: list[Any]) -> list[Any]:
            done = []
            for at, arguments in enumerate(sets):
                if at:  # each call waits for the one before it
                    arguments = lax.optimization_barrier((arguments, done[-1]))[0]
                done.append(case.again(arguments, case.call(arguments, implementation)))
            return done

        return lax.fori_loop(0, scale.repeats, once, sets)

    compiled = jax.jit(run, donate_argnums=0).lower(sets).compile()

    def timed() -> Any:
        sets[:] = compiled(sets)
        return sets

    return median_seconds(timed, scale.rounds) / (scale.repeats * number)


def measure(case: Case, key: jax.Array, implementation: Implementation, bandwidth: float, toy: bool) -> dict[str, Any]:
    """One line of the table."""
    scale = TOY if toy else FULL
    ours, plain = (seconds(case, key, one, scale) for one in (implementation, "xla"))
    floor = case.floor / bandwidth
    return {
        "name": case.name,
        "kernel_us": 1e6 * ours,
        "xla_us": 1e6 * plain,
        "floor_us": 1e6 * floor,
        "times_xla": plain / ours,
        "share_of_copy_bandwidth": floor / ours,
        "aim": AIM[case.kernel],
    }


def line(row: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{row['name']}: kernel {row['kernel_us']:.1f} us, XLA {row['xla_us']:.1f} us ({row['times_xla']:.2f} x), floor "
        f"{row['floor_us']:.1f} us, {row['share_of_copy_bandwidth']:.0%} of copy bandwidth (aim: {row['aim']})"
    )


def _lengths(key: jax.Array, rows: int, most: int, ragged: bool) -> jax.Array:
    """int32 [rows]: `most`, or where ragged anything up to it, the first row 0 and the last one full."""
    if not ragged:
        return jnp.full(rows, most, jnp.int32)
    drawn = jax.random.randint(key, (rows,), 0, most + 1, jnp.int32)
    return drawn.at[0].set(0).at[-1].set(most)


def _small(attention: AttentionConfig) -> AttentionConfig:
    rope = replace(attention.rope, head_dim=16)
    return replace(attention, heads=4, kv_heads=2, head_dim=16, rope=rope, window=None)


def _small_drafter(drafter: DrafterConfig) -> DrafterConfig:
    layers = tuple(replace(layer, attention=_small(layer.attention)) for layer in drafter.layers[:1])
    return replace(drafter, width=32, layers=layers)

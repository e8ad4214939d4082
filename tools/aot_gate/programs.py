"""What the gate compiles: the kernels at the shapes of three published pairs, and those pairs' whole programs.

Sizes come from the published configs under tests/data; no weight is allocated.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.checkpoint.drafters.formats import detect_format
from jaxspec.config import AttentionConfig, VerifierConfig
from jaxspec.decoding.planning import make_plan
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.forecast.setup import Setup
from jaxspec.forecast.target import Target
from jaxspec.layers.rope import inverse_frequencies
from jaxspec.verifiers.families import parse_config
from jaxspec.verifiers.hf import Fields
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.kv_injection import LayerKV, inject_kv

DATA = Path(__file__).parents[2] / "tests" / "data"
CAPACITY = 8192  # S
PREFILL = 512  # T of the prefill program

# One program to compile: its name, and what lowers it.
Case = tuple[str, Callable[[], jax.stages.Lowered]]


@dataclass(frozen=True)
class Pair:
    """A published verifier and drafter, by the names of their files under tests/data."""

    verifier: str
    drafter: str

    @property
    def name(self) -> str:
        return self.drafter.split("_", 1)[1]  # without the publisher

    def configs(self) -> tuple[VerifierConfig, DrafterConfig]:
        verifier = parse_config(json.loads((DATA / f"{self.verifier}.json").read_text()), self.verifier)[0]
        data = json.loads((DATA / "drafters" / f"{self.drafter}.json").read_text())
        fields, names = Fields(data["config"], data["checkpoint"]), data["tensors"].keys()
        return verifier, detect_format(fields, names).read(fields, names, None).config


PAIRS = (
    Pair("qwen3_8b", "redhat_qwen3_8b_peagle"),
    Pair("qwen3_30b_a3b", "redhat_qwen3_30b_a3b_dflash"),
    Pair("gemma4_31b_it", "redhat_gemma4_31b_it_dspark"),
)


def kernel_cases(target: Target, dtypes: tuple[str, ...] = ("bfloat16",)) -> Iterator[Case]:
    """Block attention of each kind of layer, at 8 and 16 queries and at a prefill's; KV injection of each block drafter."""
    for dtype in dtypes:
        for attention in attention_shapes():
            for block in (8, 16, PREFILL):
                yield attention_case(target, attention, batch=1, block=block, dtype=dtype)
        for pair in PAIRS:
            drafter = pair.configs()[1]
            if drafter.block is None:
                continue
            for batch, block in ((1, 8), (1, 16), (8, 8), (1, PREFILL + 1)):
                yield injection_case(target, pair.name, drafter, batch, block, dtype)


def attention_shapes() -> list[AttentionConfig]:
    """One attention of each shape in the pairs' verifiers and drafters."""
    found = {}
    for pair in PAIRS:
        for layer in (layer for config in pair.configs() for layer in config.layers):
            one = layer.attention
            key = one.heads, one.kv_heads, one.head_dim, one.window, one.causal, one.window_from_block
            found.setdefault(key, one)
    return list(found.values())


def attention_case(target: Target, attention: AttentionConfig, batch: int, block: int, dtype: str) -> Case:
    n, k, h = attention.heads, attention.kv_heads, attention.head_dim
    q = shape(target, dtype, (batch, block, n, h), "data", None, "tensor")
    cache = shape(target, dtype, (batch, k, CAPACITY, h), "data", "tensor")
    run = partial(
        block_attention,
        scale=attention.scale,
        causal=attention.causal,
        window=attention.window,
        window_from_block=attention.window_from_block,
        softcap=attention.softcap,
    )
    sight = (
        "causal" if attention.causal else "both ways",
        *([f"window {attention.window}"] if attention.window else []),
    )
    name = f"attention N {n} K {k} H {h} B {batch} T {block} {' '.join(sight)} {dtype}"
    length = shape(target, "int32", (batch,), "data")
    return name, partial(target.lower, jax.jit(run), (q, cache, cache, length))


def injection_case(target: Target, name: str, drafter: DrafterConfig, batch: int, block: int, dtype: str) -> Case:
    attention, number = drafter.layers[0].attention, len(drafter.layers)
    k, h, d = attention.kv_heads, attention.head_dim, drafter.width
    weight = shape(target, dtype, (k, h, d), "tensor")
    norm = shape(target, dtype, (h,)) if attention.qk_norm else None
    weights = [(weight, None if attention.v_from_k else weight, norm) for _ in range(number)]
    turns = [inverse_frequencies(layer.attention.rope) for layer in drafter.layers]

    def run(x: jax.Array, weights: list[Any], k: Any, v: Any, start: jax.Array, count: jax.Array) -> Any:
        layers = [
            LayerKV(k, v, None, None, norm, 0.0, attention.v_norm, frequencies, scaling)
            for (k, v, norm), (frequencies, scaling) in zip(weights, turns, strict=True)
        ]
        return inject_kv(x, layers, k, v, start, count, eps=drafter.norm_eps)

    x = shape(target, dtype, (batch, block, d), "data")
    caches = tuple(shape(target, dtype, (batch, k, CAPACITY, h), "data", "tensor") for _ in range(number))
    rows = shape(target, "int32", (batch,), "data")
    jitted = jax.jit(run, donate_argnums=(2, 3))
    label = f"injection {name} L {number} K {k} H {h} D {d} B {batch} T {block} {dtype}"
    return label, partial(target.lower, jitted, (x, weights, caches, caches, rows, rows))


def shape(target: Target, dtype: str, sizes: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    """Of an array whose dimensions are split along these mesh axes."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=NamedSharding(target.mesh, PartitionSpec(*axes)))


def pair_cases(target: Target, pair: Pair, batch: int = 1) -> Iterator[Case]:
    """What the engine compiles to answer: prefill of PREFILL tokens, and the decode loop round the cycle, at CAPACITY slots."""
    verifier, drafter = pair.configs()
    plan = make_plan(SpeculativeConfig(), drafter)
    setup = Setup(verifier, drafter, plan, jnp.dtype("bfloat16"), target.mesh.shape)
    programs = setup.placed(target.lower, target.mesh)
    for name, lowered in programs.lower_all(batch, CAPACITY, PREFILL).items():
        yield f"{pair.name} {name} B {batch}", lambda lowered=lowered: lowered

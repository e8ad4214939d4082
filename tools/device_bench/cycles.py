"""Whole draft-then-verify cycles at Qwen3-8B's shape: random bfloat16 weights, acceptance by a coin.

A cycle costs the same whatever the weights are; how many drafts hold is given (`synthetic`), so that tokens/s mean something.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from aot_gate.programs import DATA, Pair
from flax import nnx

from device_bench.timing import median_seconds
from jaxspec.config import VerifierConfig
from jaxspec.decoding.accept import Rule
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.loop import MAX_CYCLES
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import MIN_STOP_IDS, Programs
from jaxspec.decoding.sampling import SamplingRows
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.decoding.state import DecodeState, Requests, pad_stop_ids
from jaxspec.drafters.build import build_drafter
from jaxspec.drafters.config import DrafterConfig, Method
from jaxspec.evaluation import split
from jaxspec.forecast.devices import Device
from jaxspec.forecast.floor import draft, verify
from jaxspec.forecast.setup import Setup
from jaxspec.verifiers.decoder import Decoder
from jaxspec.verifiers.families import parse_config

METHODS: tuple[Method, ...] = ("eagle3", "peagle", "dflash", "dspark")
DRAFTS = (7, 3, 15)  # K, in the order of what is wanted most
TOY_DRAFTS = (3, 2)
ACCEPTANCE_LENGTH = 3.0
PARALLEL = METHODS[1:]
CYCLE_AIM, DRAFT_AIM = 1.25, 1.2


@dataclass(frozen=True)
class Shape:
    """What is run.

    Fields:
        verifier: its config.
        drafters: a config a method, that can do the largest K.
        context: tokens in the cache when a measurement begins.
        repeats: drafting passes in one program.
        rounds: measurements of which the median counts.
    """

    verifier: VerifierConfig
    drafters: dict[Method, DrafterConfig]
    context: int
    repeats: int
    rounds: int


def full_shape() -> Shape:
    """Qwen3-8B, and its published drafters with blocks of 16; EAGLE-3 is one layer of P-EAGLE's."""
    pairs: dict[Method, str] = {
        "peagle": "redhat_qwen3_8b_peagle",
        "dflash": "zlab_qwen3_8b_dflash",
        "dspark": "deepspec_qwen3_8b_dspark",
    }
    drafters: dict[Method, DrafterConfig] = {}
    for method, name in pairs.items():
        drafters[method] = _with_block(Pair("qwen3_8b", name).configs()[1], 16)
    eagle = replace(drafters["peagle"], method="eagle3", layers=drafters["peagle"].layers[:1], mask_token=None)
    eagle = replace(eagle, taps=eagle.taps[::2])  # three, as EAGLE-3 has them
    drafters["eagle3"] = eagle
    verifier = Pair("qwen3_8b", pairs["peagle"]).configs()[0]
    return Shape(verifier, drafters, context=1024, repeats=8, rounds=5)


def toy_shape() -> Shape:
    """The same drafters, for a model of two tiny layers."""
    full = full_shape()
    data = json.loads((DATA / "qwen3_8b.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    verifier = parse_config({**data, **sizes, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 256}, "toy")[0]
    drafters = dict(full.drafters)
    for method, drafter in full.drafters.items():
        drafters[method] = _shrunk(drafter, verifier)
    return Shape(verifier, drafters, context=16, repeats=1, rounds=1)


def _with_block(drafter: DrafterConfig, size: int) -> DrafterConfig:
    return drafter if drafter.block is None else replace(drafter, block=replace(drafter.block, size=size))


def _shrunk(drafter: DrafterConfig, verifier: VerifierConfig) -> DrafterConfig:
    layers = []
    for index, layer in enumerate(drafter.layers[:2]):
        attention = layer.attention
        small = replace(
            verifier.layers[0].attention,
            kv_source=index,
            causal=attention.causal,
            qk_norm=attention.qk_norm,
            in_width=2 * verifier.width if attention.in_width else None,
        )
        layers.append(replace(layer, attention=small, mlp_width=48))
    vocab = verifier.vocab_size
    return replace(
        _with_block(drafter, 4),
        vocab_size=vocab,
        draft_vocab_size=vocab // 2 if drafter.reduced_vocab else vocab,
        width=verifier.width,
        taps=(0, 1),
        layers=tuple(layers),
        mask_token=None if drafter.mask_token is None else vocab - 1,
    )


class Bench:
    """Runs cycles of one shape on one device."""

    def __init__(self, shape: Shape, bandwidth: float):
        """`bandwidth`: of the device's memory, bytes/s."""
        self.shape = shape
        rates = {"bfloat16": float("inf")}  # bytes alone make this floor
        self._drafters: dict[Method, Any] = {}
        self._device = Device("here", 0, 0, bandwidth, rates, 0.0, "measured")
        self._decoder = _random(nnx.eval_shape(lambda: Decoder(shape.verifier, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))

    def draft(self, method: Method, drafts: int) -> dict[str, Any]:
        """Drafting alone: K = `drafts` drafts, the last cycle's features taken in first."""
        programs = self._programs(method, drafts)
        state, requests = self._start(programs)

        def run() -> DecodeState:
            nonlocal state
            state = programs.repeat("draft", split._draft, state, requests, self.shape.repeats)
            return state

        ms = 1000 * median_seconds(run, self.shape.rounds) / self.shape.repeats
        return {"method": method, "K": drafts, "draft_ms": ms}

    def cycle(self, method: Method, drafts: int) -> dict[str, Any]:
        """Dispatches of whole cycles, as the engine runs them."""
        programs = self._programs(method, drafts)
        state, requests = self._start(programs)
        tokens = []

        def run() -> None:
            nonlocal state
            state, dispatch = programs.decode(self._again(state), requests, MAX_CYCLES)
            tokens.append(int((np.asarray(dispatch.records.tokens) >= 0).sum()))

        cycle_s = median_seconds(run, self.shape.rounds) / MAX_CYCLES
        committed, floor = float(np.mean(tokens)) / MAX_CYCLES, self._floor(method, programs.plan)
        return {
            "method": method,
            "K": drafts,
            "cycle_ms": 1000 * cycle_s,
            "floor_ms": 1000 * floor,
            "times_floor": cycle_s / floor,
            "tokens_per_cycle": committed,
            "tokens_per_s": committed / cycle_s,
            "aim": f"at most {CYCLE_AIM} times its byte floor",
        }

    def _floor(self, method: Method, plan: Plan) -> float:
        """Seconds that the bytes of a cycle take."""
        one_device = {"data": 1, "tensor": 1, "expert": 1}
        setup = Setup(self.shape.verifier, self.shape.drafters[method], plan, np.dtype(jnp.bfloat16), one_device)
        passes = (*draft(setup, 1, self.shape.context), verify(setup, 1, self.shape.context, plan.drafts))
        return sum(one.seconds(setup, self._device) for one in passes)

    def _programs(self, method: Method, drafts: int) -> Programs:
        length = min(ACCEPTANCE_LENGTH, drafts + 1)
        asked = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=length)
        rates = asked.conditional_rates(drafts)
        plan = Plan(drafts=drafts, rule=Rule.SYNTHETIC, synthetic_rates=rates, widths=(drafts,))
        return Programs(self.shape.verifier, self._decoder, self._drafter(method), plan)

    def _drafter(self, method: Method) -> Any:
        """Made once; what the verifier lends is the verifier's."""
        if method not in self._drafters:
            config = self.shape.drafters[method]
            drafter = _random(nnx.eval_shape(lambda: build_drafter(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
            if not config.own_embed:
                drafter.vocabulary.embed.weight = self._decoder.embed.weight
            if not config.own_head and not config.reduced_vocab and self._decoder.head is not None:
                drafter.vocabulary.head.weight = self._decoder.head.weight
            self._drafters[method] = drafter
        return self._drafters[method]

    def _start(self, programs: Programs) -> tuple[DecodeState, Requests]:
        """One row whose caches hold the context, as zeros."""
        row = np.ones(1, np.int32)
        capacity = programs.capacity(self.shape.context + (programs.plan.drafts + 1) * (MAX_CYCLES + 1))
        cache, draft_state = programs.empty(row, capacity)
        assert draft_state is not None
        zeros = np.zeros(1, np.int32)
        state = self._again(DecodeState(cache, row, zeros, zeros, None, draft_state))
        sampling = SamplingRows.of([SamplingParams()], [0])
        return state, Requests(sampling, jnp.full(1, 1 << 30, jnp.int32), pad_stop_ids([()], MIN_STOP_IDS))

    def _again(self, state: DecodeState) -> DecodeState:
        """At the context's end: the verifier has it, and the drafter all of it but the last token's features, which wait."""
        assert state.draft is not None
        held = self.shape.context
        cache = replace(state.draft.cache, length=jnp.full(1, held - 1, jnp.int32))
        context = replace(state.draft.context, count=jnp.ones(1, jnp.int32))
        return replace(
            state,
            cache=replace(state.cache, length=jnp.full(1, held, jnp.int32)),
            draft=replace(state.draft, cache=cache, context=context),
        )


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draft time at the largest K over that at the smallest, of the parallel drafters measured at both."""
    found = []
    for method in PARALLEL:
        ms = {row["K"]: row["draft_ms"] for row in rows if row["method"] == method}
        if len(ms) > 1:
            few, many = min(ms), max(ms)
            aim = f"at most {DRAFT_AIM} from K = 3 to 15"
            found.append({"method": method, "from": few, "to": many, "ratio": ms[many] / ms[few], "aim": aim})
    return found


def draft_line(row: dict[str, Any]) -> str:
    """For people."""
    return f"{row['method']:6} K = {row['K']:2}: draft {row['draft_ms']:.2f} ms"


def cycle_line(row: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{row['method']:6} K = {row['K']:2}: cycle {row['cycle_ms']:.2f} ms, floor {row['floor_ms']:.2f} ms, "
        f"{row['times_floor']:.2f} times (aim: {row['aim']}); "
        f"{row['tokens_per_s']:.0f} tokens/s at {row['tokens_per_cycle']:.2f} a cycle"
    )


def _random(module: Any) -> Any:
    """Shapes -> random weights on the device, made by a few small programs: one a shape. Norms stay ones, as they begin."""
    graph, state = nnx.split(module)

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.arange(shape[0], dtype=dtype)  # the draft vocabulary's map
        return jnp.ones(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape, dtype)

    drawn = jax.jit(draw, static_argnums=(1, 2))
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [drawn(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return nnx.merge(graph, treedef.unflatten(filled))

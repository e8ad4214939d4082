"""The cost curve of the prefix scheduler: engine steps a second by tokens in a verify pass, measured on the running device."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec import distributed
from jaxspec.config import VerifierConfig
from jaxspec.decoding.kernels import compile_program
from jaxspec.decoding.programs import lies_whole
from jaxspec.drafters.base import Context, Drafter, WholeDrafter, attention_layers, greedy
from jaxspec.layers.cache import KVCache
from jaxspec.sharding import WHOLE, by_rows
from jaxspec.verifiers.decoder import Decoder
from jaxspec_kernels.implementation import Implementation

CONTEXT = 256  # tokens a row holds while it is measured
REPEATS = 5


def measure_steps_per_s(
    config: VerifierConfig,
    decoder: Decoder,
    drafter: Drafter,
    drafts: int,
    widths: Sequence[int],
    batch: int,
    kernels: Implementation | None = None,
    mesh: Mesh | None = None,
) -> tuple[float, ...]:
    """Steps a second at n = 1 .. batch * (K + 1) tokens a verify pass.

    A step is one draft and one verify pass of `batch` rows; the pass is timed at each compiled width and taken as linear in between, and
    as constant below the narrowest: fewer rows cost no less on the devices this is for.

    Args:
        config: what the decoder is.
        decoder: the verifier.
        drafter: with a confidence head.
        drafts: K.
        widths: drafts a verify pass is compiled for, increasing.
        batch: B.
        kernels: the kernels' implementation, as in `Programs`, which also warns where Triton fails.
        mesh: where the weights lie. Each device of its `data` axis is measured with its own share of the rows, and schedules those.
    """
    if mesh is not None:
        batch = -(-batch // mesh.shape["data"])
    layers = [layer.attention for layer in config.layers]
    dtype = decoder.embed.weight[...].dtype
    graphdef, state = nnx.split((decoder, drafter))
    leaves, treedef = jax.tree.flatten(state)
    drafter_whole = mesh is not None and lies_whole(drafter, mesh)

    def models(leaves: list[jax.Array]) -> tuple[Decoder, Drafter]:
        decoder, drafter = nnx.merge(graphdef, treedef.unflatten(leaves))
        return decoder, WholeDrafter(drafter) if drafter_whole else drafter

    def verify(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        model, _ = models(leaves)
        cache = KVCache.empty(layers, batch, CONTEXT + drafts + 1, dtype).advance(jnp.full(batch, CONTEXT, jnp.int32))
        hidden, _, _ = model(tokens, cache, drafter.config.taps)
        return jnp.max(model.logits(hidden))

    def draft(leaves: list[jax.Array], context: Context) -> jax.Array:
        _, model = models(leaves)
        block = drafter.config.block.size if drafter.config.block else 0
        cache = KVCache.empty(attention_layers(drafter.config), batch, CONTEXT + drafts + 1 + block, dtype)
        cache = cache.advance(jnp.full(batch, CONTEXT, jnp.int32))
        return model.draft(context, cache, drafts, greedy)[0].tokens

    ones = jnp.ones((batch, drafts + 1), jnp.int32)
    features = jnp.zeros((*ones.shape, drafter.config.feature_width), dtype)

    def seconds(function: Callable[..., jax.Array], *arguments: object) -> float:
        def build() -> jax.stages.Wrapped:
            here = function if mesh is None else by_rows(function, mesh, WHOLE, WHOLE)
            return jax.jit(lambda *arguments: here(*arguments))

        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            program = compile_program(build, arguments, kernels, lambda reason: None)
        return _seconds(program, *arguments)

    draft_s = seconds(draft, leaves, Context(features, ones, jnp.ones(batch, jnp.int32)))
    verify_s = [seconds(verify, leaves, ones[:, : width + 1]) for width in widths]
    tokens = np.arange(1, batch * (drafts + 1) + 1)
    step_s = draft_s + np.interp(tokens, [batch * (width + 1) for width in widths], verify_s)
    return tuple(distributed.same(1.0 / step_s).tolist())  # every process must compile the same program


def _seconds(program: Callable[..., jax.Array], *arguments: object) -> float:
    """Median run time."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)

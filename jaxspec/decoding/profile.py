"""The cost curve of the prefix scheduler: engine steps a second by tokens in a verify pass, measured on the running device."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import VerifierConfig
from jaxspec.decoding.kernels import compile_program
from jaxspec.drafters.base import Context, Drafter, attention_layers, greedy
from jaxspec.layers.cache import KVCache
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
    """
    layers = [layer.attention for layer in config.layers]
    dtype = decoder.embed.weight[...].dtype
    graphdef, state = nnx.split((decoder, drafter))
    leaves, treedef = jax.tree.flatten(state)

    def models(leaves: list[jax.Array]) -> tuple[Decoder, Drafter]:
        return nnx.merge(graphdef, treedef.unflatten(leaves))

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
            return jax.jit(lambda *arguments: function(*arguments))

        return _seconds(compile_program(build, arguments, kernels, lambda reason: None), *arguments)

    draft_s = seconds(draft, leaves, Context(features, ones, jnp.ones(batch, jnp.int32)))
    verify_s = [seconds(verify, leaves, ones[:, : width + 1]) for width in widths]
    tokens = np.arange(1, batch * (drafts + 1) + 1)
    step_s = draft_s + np.interp(tokens, [batch * (width + 1) for width in widths], verify_s)
    return tuple((1.0 / step_s).tolist())


def _seconds(program: Callable[..., jax.Array], *arguments: object) -> float:
    """Median run time."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)

"""The gated feed-forward layer."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import Activation
from jaxspec.layers.linear import Linear


def activation(name: Activation) -> Callable[[jax.Array], jax.Array]:
    """The function behind a config's activation name."""
    match name:
        case "silu":
            return jax.nn.silu
        case "gelu_pytorch_tanh":
            return lambda x: jax.nn.gelu(x, approximate=True)


class GatedMlp(nnx.Module):
    """down(act(gate(x)) * up(x)) with inner width F (arXiv 2002.05202)."""

    def __init__(
        self, width: int, inner: int, act: Activation, *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        self.act: Activation = act
        self.gate = Linear((width,), (inner,), ("embed",), ("mlp",), bias=bias, rngs=rngs, dtype=dtype)
        self.up = Linear((width,), (inner,), ("embed",), ("mlp",), bias=bias, rngs=rngs, dtype=dtype)
        self.down = Linear((inner,), (width,), ("mlp",), ("embed",), bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        return self.down(activation(self.act)(self.gate(x)) * self.up(x))

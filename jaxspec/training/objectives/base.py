"""What the objectives share: the protocol, the verifier's side, metrics."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from jaxspec.layers.argmax import argmax
from jaxspec.layers.linear import project
from jaxspec.layers.norm import rms_normalize
from jaxspec.training.batch import Batch, Features

# "verifier": a slot learns the verifier's distribution, its cross-entropy the most likely token. "data": cross-entropy on the
# data's token; slots behind one that is no answer token don't count (DeepSpec).
Labels = Literal["verifier", "data"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """The frozen verifier's last step, over the draft vocabulary.

    Fields:
        norm: [D], weight of the final norm.
        head: [Vd, D], the head's rows of the draft vocabulary.
        draft_ids: int32 [V], the draft id of each verifier id, -1 outside the draft vocabulary; None: the same ids.
        eps, offset, softcap: of the verifier's final norm and logits.
    """

    norm: jax.Array
    head: jax.Array
    draft_ids: jax.Array | None
    eps: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})

    def logits(self, last: jax.Array) -> jax.Array:
        """last [..., D], the stream before the final norm -> float32 [..., Vd]; carries no gradient."""
        normed = rms_normalize(last, self.eps)
        weight = self.norm.astype(jnp.float32) + self.offset
        normed = normed * weight.reshape((1,) * (last.ndim - 1) + weight.shape)
        logits = project(normed.astype(self.head.dtype), self.head).astype(jnp.float32)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return jax.lax.stop_gradient(logits)

    def labels(self, tokens: jax.Array) -> jax.Array:
        """Verifier ids int32 [...] -> draft ids, -1 for those outside."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Sums over anchors, which add up over batches.

    Fields:
        anchors: float32 scalar, anchors whose first draft counts.
        accepted: float32 [K], anchors whose drafts 1 .. k all were the expected token.
    """

    anchors: jax.Array
    accepted: jax.Array

    def __add__(self, other: "Metrics") -> "Metrics":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def of(cls, right: jax.Array, counts: jax.Array) -> "Metrics":
        """right bool [..., K], whether a draft was the expected token; counts bool [..., K], whether it counts."""
        prefix = jnp.cumprod((right & counts).astype(jnp.float32), axis=-1)
        axes = tuple(range(prefix.ndim - 1))
        return cls(jnp.sum(counts[..., 0].astype(jnp.float32)), jnp.sum(prefix, axis=axes))

    def acceptance_length(self) -> float:
        """Accepted drafts and the bonus token a cycle, at anchors as they were chosen; nan without any."""
        return float(1 + jnp.sum(self.accepted) / self.anchors) if self.anchors else float("nan")


class Objective(Protocol):
    """What the trainer needs of a method's objective.

    Its loss is sum_i sums_i / weights_i over the terms named in `terms`. The weights come from the masks alone, so that they can be
    added up over the micro-batches of a step before any gradient is taken: accumulation then equals one large batch.
    """

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        ...

    def choose(self, key: jax.Array, batch: Batch) -> Any:
        """Every random choice of a step, a pytree."""
        ...

    def weights(self, batch: Batch, choices: Any) -> jax.Array:
        """float32 [terms]."""
        ...

    def sums(
        self, drafter: Any, target: Target, batch: Batch, features: Features, choices: Any
    ) -> tuple[jax.Array, Metrics]:
        """float32 [terms], each already times its coefficient; and the metrics."""
        ...

    def accepts(self, drafter: Any, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        """anchors int32 [B, A], indices in the row -> bool [B, A, K]: whether the greedy draft k + 1 behind the anchor is the data's
        token, given the data's tokens before it. False where the document ends first."""
        ...


def terms_of(sums: jax.Array, weights: jax.Array) -> jax.Array:
    """The terms [n] of the loss from their sums and weights [n]; one without any weight counts nothing."""
    return sums / jnp.maximum(weights, 1e-6)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, T, ...], index int32 [B, ...I] in 0 .. T - 1 -> [B, ...I, ...]. Indices outside are clipped: mask them."""
    rows = jnp.arange(x.shape[0]).reshape(-1, *(1,) * (index.ndim - 1))
    return x[rows, jnp.clip(index, 0, x.shape[1] - 1)]


def same_document(batch: Batch, a: jax.Array, b: jax.Array) -> jax.Array:
    """Indices int32 [B, ...I], any -> bool: both inside the row and in one document."""
    length = batch.tokens.shape[1]
    inside = (a >= 0) & (a < length) & (b >= 0) & (b < length)
    document = take(batch.documents, a)
    return inside & (document >= 0) & (document == take(batch.documents, b))


def document_start(batch: Batch, index: jax.Array) -> jax.Array:
    """Index of the first token of the document that `index` int32 [B, ...I] lies in."""
    return index - take(batch.positions, index)


def expected(target: Target, tokens: jax.Array, logits: jax.Array | None, labels: Labels) -> jax.Array:
    """Draft ids int32 [...] that count as right: of the data's tokens, or the most likely by the verifier's logits [..., Vd]."""
    if labels == "data" or logits is None:
        return target.labels(tokens)
    return argmax(logits)

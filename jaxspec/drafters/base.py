"""The protocol of all drafters, and what they share.

A drafter follows the verifier through its features. `prefill` commits the features of a prompt, `draft` commits those of the rows that
the last cycle accepted and proposes K tokens. What a rejected row left behind is overwritten before it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jax.typing import DTypeLike

from jaxspec.config import AttentionConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.layers.argmax import argmax
from jaxspec.layers.cache import KVCache
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear
from jaxspec.sharding import everywhere, gathered

# Chooses drafts of neighbouring slots, each on its own: (logits float32 [B, K, Vd], the first slot int32 scalar) -> (draft ids int32
# [B, K], log-probabilities float32 [B, K, Vd] that they were drawn from, None for point masses). One that needs arrays is a
# `jax.tree_util.Partial` of them.
Choose = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]


class VocabMap(nnx.Variable):
    """Verifier ids of the draft ids, int32 [Vd]; not trained."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What the verifier has just committed: `count` rows of T, right-padded.

    Row t holds the features of the token at position length + t, length being what the drafter had committed before, and the token
    that *follows* it. So the last counted row's token is the new anchor.
    """

    features: jax.Array  # [B, T, feature_width]
    tokens: jax.Array  # int32 [B, T]
    count: jax.Array  # int32 [B]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """K drafts after the anchor.

    `log_q` are the log-probabilities, over the draft vocabulary, of the distributions that the tokens were drawn from; None where each
    is a point mass. `confidence` is the probability that a draft is accepted if those before it are; None for drafters without that
    head.
    """

    tokens: jax.Array  # int32 [B, K], verifier ids
    ids: jax.Array  # int32 [B, K], the same in the draft vocabulary
    log_q: jax.Array | None  # float32 [B, K, Vd]
    confidence: jax.Array | None  # float32 [B, K]


class Drafter(Protocol):
    """What `decoding` needs of a drafter."""

    config: DrafterConfig
    vocabulary: "DraftVocabulary"

    def prefill(self, context: Context, cache: KVCache) -> KVCache:
        """Commit the context; draft nothing. Contexts of one row follow one another without a gap."""
        ...

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """Commit the context, then propose `drafts` = K tokens after its last counted token. A row that counts none (it has ended, or
        nothing came before its anchor) has its anchor in the first place; its drafts may be poor."""
        ...


class WholeDrafter:
    """A drafter that lies whole on every device of `tensor` and `expert`: each runs all of it, without an exchange between them."""

    def __init__(self, drafter: Drafter):
        self.config, self.vocabulary = drafter.config, drafter.vocabulary
        # What runs everywhere takes its arrays as arguments: arrays from outside belong to another kind of mesh.
        self._graph, self._state = nnx.split(drafter)

    def prefill(self, context: Context, cache: KVCache) -> KVCache:
        """See `Drafter`."""

        def run(state: nnx.State, context: Context, cache: KVCache) -> KVCache:
            return nnx.merge(self._graph, state).prefill(context, cache)

        return everywhere(run)(self._state, context, cache)

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """See `Drafter`."""

        def run(state: nnx.State, context: Context, cache: KVCache, choose: Choose) -> tuple[Proposal, KVCache]:
            return nnx.merge(self._graph, state).draft(context, cache, drafts, choose)

        carried = choose if isinstance(choose, Partial) else Partial(choose)
        return everywhere(run)(self._state, context, cache, carried)


def greedy(logits: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
    """The `Choose` of greedy drafting: the most likely tokens, point masses."""
    del first
    return argmax(logits), None


class DraftVocabulary(nnx.Module):
    """Embedding and head of a drafter, its own or the verifier's, and the map from draft ids to verifier ids."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        self.embed = Embedding(
            config.vocab_size, (config.width,), ("embed",), scale=config.embed_scale, rngs=rngs, dtype=dtype
        )
        self.head = Linear((config.width,), (config.draft_vocab_size,), ("embed",), ("vocab",), rngs=rngs, dtype=dtype)
        self.target_ids = (
            VocabMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), axes=("draft_id",))
            if config.reduced_vocab
            else None
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] after the drafter's final norm -> float32 [..., Vd]."""
        logits = gathered(self.head(hidden)).astype(jnp.float32) * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def proposal(self, ids: jax.Array, log_q: jax.Array | None, confidence: jax.Array | None = None) -> Proposal:
        """ids int32 [B, K] and log_q [B, K, Vd] as chosen -> the proposal."""
        return Proposal(self.to_verifier(ids), ids, log_q, confidence)

    def to_verifier(self, ids: jax.Array) -> jax.Array:
        """Draft ids int32 [...] -> verifier ids int32 [...]."""
        return ids if self.target_ids is None else self.target_ids[...][ids]


def attention_layers(config: DrafterConfig) -> list[AttentionConfig]:
    """For `KVCache.empty`."""
    return [layer.attention for layer in config.layers]


def join_slots(chosen: Sequence[tuple[jax.Array, jax.Array | None]]) -> tuple[jax.Array, jax.Array | None]:
    """What was chosen in turn for neighbouring slots, as one."""
    return jax.tree.map(lambda *slots: jnp.concatenate(slots, axis=1), *chosen)


def last_counted(context: Context) -> jax.Array:
    """Index int32 [B] of the row with the anchor."""
    return jnp.maximum(context.count - 1, 0)


def take_rows(x: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """x [B, T, ...], first int32 [B] -> the `count` rows from `first` on of each, [B, count, ...]. They must lie within T."""
    index = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=None)

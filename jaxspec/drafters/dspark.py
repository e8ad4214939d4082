"""DSpark (arXiv 2607.05147): DFlash's backbone, a light sequential head over its slots, and a confidence for every draft."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.drafters.base import Choose, Proposal, join_slots
from jaxspec.drafters.config import ConfidenceConfig, DrafterConfig, MarkovConfig
from jaxspec.drafters.dflash import DFlash
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear
from jaxspec_kernels.projection import project


class DSpark(DFlash):
    """The drafter. Rank 0 (no sequential head) drafts like DFlash."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        super().__init__(config, rngs=rngs, dtype=dtype)
        markov, confidence = self.block.markov, self.block.confidence
        self.markov = None if markov is None else MarkovHead(markov, config, rngs=rngs, dtype=dtype)
        self.confidence = None if confidence is None else ConfidenceHead(confidence, config, rngs=rngs, dtype=dtype)

    def propose(self, hidden: jax.Array, anchor: jax.Array, drafts: int, choose: Choose) -> Proposal:
        """hidden [B, size, D] of the block, anchor int32 [B] -> K drafts, strictly left to right."""
        base = self.vocabulary.logits(self.drafting_slots(hidden)[:, :drafts])  # [B, K, Vd]
        state = self._first_state(hidden, anchor)
        slots = self.drafting_slots(hidden)
        previous = anchor
        chosen, confidences = [], []
        for slot in range(drafts):
            h = slots[:, slot]
            logits, embedded = base[:, slot], None
            if self.markov is not None:
                embedded = self.markov.embed_token(previous)
                bias, state = self.markov.step(embedded, h, state)
                logits = logits + bias
            ids, log_q = choose(logits[:, None], jnp.int32(slot))
            chosen.append((ids, log_q))
            if self.confidence is not None:
                confidences.append(self.confidence(h, embedded, slot))
            previous = self.vocabulary.to_verifier(ids)[:, 0]
        confidence = jax.nn.sigmoid(jnp.stack(confidences, axis=1)) if confidences else None
        return self.vocabulary.proposal(*join_slots(chosen), confidence)

    def logits(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """As in `DFlash`, with the true tokens before each slot in place of drafted ones. A slot 0 that drafts nothing has the
        anchor before it, as in training."""
        return self.heads(features, tokens)[0]

    def heads(self, features: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """`logits`, and the confidence head's logits float32 [B, size] (None without one)."""
        return self.teacher_forced(self.block_hidden(features, tokens[:, 0]), tokens)

    def teacher_forced(self, hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """hidden [B, size, D] of a block and its true tokens int32 [B, size], the anchor first -> logits float32 [B, size, Vd] and the
        confidence head's float32 [B, size]: what each slot gives when all tokens before it are as in `tokens`."""
        logits, embedded = self.vocabulary.logits(hidden), None
        if self.markov is not None:
            anchor_first = self.block.sample_from_anchor
            previous = tokens if anchor_first else jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
            embedded = self.markov.embed_token(previous)  # [B, size, r]
            logits = logits + self.markov.biases(embedded, hidden, self._empty_state(hidden))
        return logits, None if self.confidence is None else self.confidence(hidden, embedded, None)

    def _empty_state(self, hidden: jax.Array) -> jax.Array:
        rank = 0 if self.markov is None else self.markov.config.rank
        return jnp.zeros((hidden.shape[0], rank), hidden.dtype)

    def _first_state(self, hidden: jax.Array, anchor: jax.Array) -> jax.Array:
        """The recurrent state before the first drafting slot. Where the anchor's slot drafts nothing, the state has still passed
        through it, with the anchor as the token before it (speculators' training forward)."""
        state = self._empty_state(hidden)
        if self.markov is None or self.block.sample_from_anchor:
            return state
        return self.markov.step(self.markov.embed_token(anchor), hidden[:, 0], state)[1]


class MarkovHead(nnx.Module):
    """A bias on the logits of a slot, low-rank in the token before it: vanilla, gated by the hidden state, or recurrent."""

    def __init__(self, markov: MarkovConfig, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = markov
        r, d = markov.rank, config.width
        # Whole on every device: split, each of the K steps would wait for two exchanges that cost more than the bytes they save.
        self.w1 = Embedding(config.vocab_size, (r,), ("markov",), vocab="bias_vocab", rngs=rngs, dtype=dtype)
        self.w2 = Linear((r,), (config.draft_vocab_size,), ("markov",), ("bias_vocab",), rngs=rngs, dtype=dtype)
        self.gate = (
            Linear((d + r,), (r,), ("markov_in",), ("markov",), bias=True, rngs=rngs, dtype=dtype)
            if markov.kind == "gated"
            else None
        )
        self.joint = (
            Linear((2 * r + d,), (3 * r,), ("markov_in",), ("markov",), bias=True, rngs=rngs, dtype=dtype)
            if markov.kind == "rnn"
            else None
        )

    def embed_token(self, token: jax.Array) -> jax.Array:
        """Verifier ids int32 [...] -> [..., r]."""
        return self.w1(token)

    def biases(self, embedded: jax.Array, hidden: jax.Array, state: jax.Array) -> jax.Array:
        """All slots of a block at once: embedded [B, size, r], hidden [B, size, D], state [B, r] -> float32 [B, size, Vd]."""
        if self.joint is None:
            return self.step(embedded, hidden, state)[0]
        biases = []
        for slot in range(hidden.shape[1]):
            bias, state = self.step(embedded[:, slot], hidden[:, slot], state)
            biases.append(bias)
        return jnp.stack(biases, axis=1)

    def step(self, embedded: jax.Array, hidden: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One slot: the previous token's embedding [..., r], hidden [..., D], state [B, r] -> bias float32 [..., Vd], next state."""
        if self.gate is not None:
            gate = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded], axis=-1)))
            return self.w2(gate * embedded).astype(jnp.float32), state
        if self.joint is not None:
            joint = self.joint(jnp.concatenate([state, embedded, hidden], axis=-1))
            gate, candidate, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            return self.w2(jnp.tanh(out)).astype(jnp.float32), state
        return self.w2(embedded).astype(jnp.float32), state


class ConfidenceHead(nnx.Module):
    """The logit of P(this draft is accepted | those before it are), in float32."""

    def __init__(self, confidence: ConfidenceConfig, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = confidence
        markov = block_rank(config) if confidence.with_markov else 0
        self.projection = Linear(
            (config.width + markov,), (1,), ("confidence_in",), ("scalar",), bias=True, rngs=rngs, dtype=dtype
        )

    def __call__(self, hidden: jax.Array, embedded: jax.Array | None, slot: int | None) -> jax.Array:
        """hidden [..., D], the previous token's embedding [..., r] -> float32 [...]. `slot` divides by that slot's calibrated temperature;
        None leaves the raw logit."""
        features = hidden
        if self.config.with_markov:
            if embedded is None:
                raise ValueError("the confidence head sees the sequential head's embedding, and there is none")
            features = jnp.concatenate([hidden, embedded], axis=-1)
        assert self.projection.bias is not None
        weight, bias = self.projection.weight[...].astype(jnp.float32), self.projection.bias[...].astype(jnp.float32)
        logit = project(features.astype(jnp.float32), weight, self.projection.in_dims)[..., 0] + bias[0]
        if slot is None or not self.config.temperatures:
            return logit
        return logit / self.config.temperatures[slot]


def block_rank(config: DrafterConfig) -> int:
    """Rank of the sequential head; 0 without one."""
    return 0 if config.block is None or config.block.markov is None else config.block.markov.rank

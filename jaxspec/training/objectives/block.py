"""Training of DFlash and DSpark: blocks at random anchors, each denoised from the context before it (SPEC 3e, 4e)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

import jax
import jax.numpy as jnp

from jaxspec.config import AttentionConfig
from jaxspec.drafters.base import greedy
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.layers.argmax import argmax
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.training import losses
from jaxspec.training.anchors import choose_anchors
from jaxspec.training.attention import Span, two_part_attention
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import (
    Labels,
    Metrics,
    Target,
    document_start,
    expected,
    same_document,
    take,
)
from jaxspec.training.parts import in_parts, sums_in_parts

Decay = Literal["fixed", "dpace", "none"]


@dataclass(frozen=True)
class BlockObjective:
    """DFlash's and DSpark's objective.

    Fields:
        size: B, slots of a block.
        sample_from_anchor: whether the anchor's slot drafts too.
        anchors: A, blocks a row.
        mixture: losses and their weights; with labels "data", "ce" is on the data's token.
        decay: how slots weigh: exp(-k / gamma) ("fixed"), by D-PACE with `alpha`, or alike ("none").
        labels: what a slot learns.
        normalise: divide by the number of slots, or by the sum of their fixed weights (DeepSpec).
        confidence: weight of the confidence head's cross-entropy; 0 leaves it out.
        chunk, scored: blocks that attend, and whose logits are there, at a time; None: as many as `in_parts` allows.
    """

    size: int
    sample_from_anchor: bool
    anchors: int = 512
    mixture: Mapping[str, float] | None = None
    decay: Decay = "dpace"
    gamma: float = 4.0
    alpha: float = 0.5
    labels: Labels = "verifier"
    normalise: Literal["slots", "weights"] = "slots"
    confidence: float = 0.0
    chunk: int | None = None
    scored: int | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        return ("loss", "confidence") if self.confidence else ("loss",)

    @property
    def first(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    def choose(self, key: jax.Array, batch: Batch) -> jax.Array:
        """Anchors int32 [B, A], -1 for none."""
        return choose_anchors(key, batch, self.anchors)

    def weights(self, batch: Batch, choices: jax.Array) -> jax.Array:
        """See `Objective`."""
        counts = self.counts(batch, choices).astype(jnp.float32)
        if self.normalise == "weights":
            counts = counts * losses.fixed_decay(self.size, self.gamma, self.first)[None, None]
        return jnp.broadcast_to(jnp.sum(counts), (len(self.terms),))

    def counts(self, batch: Batch, anchors: jax.Array) -> jax.Array:
        """anchors int32 [B, A] -> bool [B, A, size]: slots that count. All of a slot's block up to it lies in the anchor's document."""
        source, label = self.indices(anchors)
        drafting = jnp.arange(self.size)[None, None] >= self.first
        # speculators masks by the slot's own index, which with sample_from_anchor is the token it starts from; DeepSpec by the label.
        masked = label if self.labels == "data" else self.slots(anchors)
        here = jnp.broadcast_to(anchors[..., None], source.shape)
        good = same_document(batch, here, masked) & same_document(batch, here, source) & take(batch.loss_mask, masked)
        if self.labels == "data":
            good = jnp.cumprod(good | ~drafting, axis=-1).astype(bool)
        return good & drafting & (anchors[..., None] >= 0)

    def slots(self, anchors: jax.Array) -> jax.Array:
        """anchors int32 [B, A] -> index of every slot, int32 [B, A, size]."""
        return anchors[..., None] + jnp.arange(self.size, dtype=jnp.int32)[None, None]

    def indices(self, anchors: jax.Array) -> tuple[jax.Array, jax.Array]:
        """anchors int32 [B, A] -> for every slot the index whose verifier logits it learns, and that of its token, int32 [B, A, size]."""
        slot = self.slots(anchors)
        return (slot, slot + 1) if self.sample_from_anchor else (slot - 1, slot)

    def sums(
        self, drafter: DFlash, target: Target, batch: Batch, features: Features, choices: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """See `Objective`."""
        counts = self.counts(batch, choices)[..., self.first :]
        hidden = self.denoise(drafter, batch, features, choices)

        def score(hidden: jax.Array, anchors: jax.Array, counts: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            return self.score(drafter, target, batch, features, hidden, anchors, counts)

        sums, right = sums_in_parts(score, (hidden, choices, counts), self.scored, self._logits(drafter, batch))
        return jnp.stack(sums), Metrics.of(right, counts)

    def score(
        self,
        drafter: DFlash,
        target: Target,
        batch: Batch,
        features: Features,
        hidden: jax.Array,
        anchors: jax.Array,
        counts: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Of blocks at anchors int32 [B, A] with hidden [B, A, size, D] and slots that count bool [B, A, S]: what each adds to the sum of
        each term, float32 [B, A], and which of its drafts are right, bool [B, A, S]."""
        source, label = (index[..., self.first :] for index in self.indices(anchors))
        logits, confidence = self.heads(drafter, batch, hidden, anchors)
        wanted = target.logits(take(features.last, source))  # [B, A, S, Vd]
        tokens = take(batch.tokens, label)
        weight = (
            counts.astype(jnp.float32) * losses.fixed_decay(self.size, self.gamma, self.first)[None, None, self.first :]
        )
        labels = target.labels(tokens)

        @cache
        def element(name: str) -> jax.Array:
            if name == "ce" and self.labels == "data":
                return jnp.where(labels >= 0, losses.ce_on_labels(logits, labels), 0.0)
            return losses.position_loss(name, logits, wanted)

        share = {"fixed": weight, "none": counts.astype(jnp.float32)}.get(self.decay)
        if (
            share is None
        ):  # D-PACE is of the cross-entropy, whatever the losses; a token outside the vocabulary is never drafted
            never = (labels < 0) & (self.labels == "data")
            share = losses.dpace(jnp.where(never, jnp.inf, element("ce")), counts, self.alpha)
        total = jnp.zeros(anchors.shape, jnp.float32)
        for name, coefficient in (self.mixture or {"ce": 1.0}).items():
            total = total + coefficient * jnp.sum(jnp.where(counts, element(name) * share, 0.0), axis=-1)
        sums = [total]
        if self.confidence:
            assert confidence is not None, "this drafter has no confidence head"
            accept = jax.lax.stop_gradient(losses.acceptance(logits, wanted))
            unsure = -accept * jax.nn.log_sigmoid(confidence) - (1 - accept) * jax.nn.log_sigmoid(-confidence)
            sums.append(self.confidence * jnp.sum(jnp.where(counts, unsure * weight, 0.0), axis=-1))
        right = argmax(logits) == expected(target, tokens, wanted, self.labels)
        return tuple(sums), right

    def accepts(self, drafter: DFlash, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        """See `Objective`."""
        _, label = (index[..., self.first :] for index in self.indices(anchors))

        def drafted(hidden: jax.Array, anchors: jax.Array) -> jax.Array:
            return argmax(self.heads(drafter, batch, hidden, anchors)[0])

        hidden = self.denoise(drafter, batch, features, anchors)
        drafts = in_parts(drafted, (hidden, anchors), self.scored, self._logits(drafter, batch))
        drafts = drafter.vocabulary.to_verifier(drafts)
        here = jnp.broadcast_to(anchors[..., None], label.shape)
        return (drafts == take(batch.tokens, label)) & same_document(batch, here, label)

    def confidences(
        self, drafter: DSpark, batch: Batch, features: Features, anchors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a cycle of greedy drafting would have at anchors int32 [B, A]: the confidence head's logits float32 [B, A, K], not divided
        by temperatures, each behind the drafts before it; and whether each draft is the data's token, bool [B, A, K], as `accepts`."""
        _, label = (index[..., self.first :] for index in self.indices(anchors))

        def draft(hidden: jax.Array, anchors: jax.Array) -> tuple[jax.Array, jax.Array]:
            flat, anchor = hidden.reshape(-1, *hidden.shape[2:]), take(batch.tokens, anchors).reshape(-1)
            drafts = drafter.propose(flat, anchor, label.shape[-1], greedy).tokens  # [B * A, K]
            _, confidence = drafter.teacher_forced(
                flat, jnp.concatenate([anchor[:, None], drafts], axis=1)[:, : self.size]
            )
            assert confidence is not None, "this drafter has no confidence head"
            shape = (*anchors.shape, -1)
            return confidence.reshape(shape)[..., self.first :], drafts.reshape(shape)

        hidden = self.denoise(drafter, batch, features, anchors)
        confidence, drafts = in_parts(draft, (hidden, anchors), self.scored, self._logits(drafter, batch))
        here = jnp.broadcast_to(anchors[..., None], label.shape)
        return confidence, (drafts == take(batch.tokens, label)) & same_document(batch, here, label)

    def heads(
        self, drafter: DFlash, batch: Batch, hidden: jax.Array, anchors: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Logits float32 [B, A, S, Vd] and confidence logits [B, A, S] of the slots that draft, the data's tokens before them, from
        hidden [B, A, size, D]."""
        if not isinstance(drafter, DSpark):
            return drafter.vocabulary.logits(hidden[:, :, self.first :]), None
        tokens = take(batch.tokens, self.slots(anchors))
        flat = (hidden.reshape(-1, *hidden.shape[2:]), tokens.reshape(-1, self.size))
        logits, confidence = drafter.teacher_forced(*flat)
        logits = logits.reshape(*hidden.shape[:3], -1)[:, :, self.first :]
        if confidence is not None:
            confidence = confidence.reshape(hidden.shape[:3])[:, :, self.first :]
        return logits, confidence

    def _logits(self, drafter: DFlash, batch: Batch) -> int:
        """How many logits one block in every row has."""
        return batch.tokens.shape[0] * self.size * drafter.config.draft_vocab_size

    def denoise(self, drafter: DFlash, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        """Hidden [B, A, size, D] after the final norm, of blocks at anchors int32 [B, A]. A block sees its document's context strictly
        before its anchor, and itself."""
        rows, blocks = anchors.shape
        size = self.size
        here = jnp.maximum(anchors, 0)
        anchor = take(batch.tokens, here)
        masks = jnp.full((rows, blocks, size - 1), drafter.mask_token, jnp.int32)
        tokens = jnp.concatenate([anchor[..., None], masks], axis=-1)
        slot = jnp.arange(size, dtype=jnp.int32)[None, None]
        positions = (take(batch.positions, here)[..., None] + slot).reshape(rows, -1)
        context = drafter.hidden_norm(drafter.fc(features.taps))  # [B, T, D]
        x = drafter.vocabulary.embed(tokens.reshape(rows, -1)).astype(context.dtype)  # [B, A * size, D]

        def blocked(y: jax.Array) -> jax.Array:
            return y.reshape(rows, blocks, size, *y.shape[2:])

        for each in drafter.layers:
            layer = cast(DecoderLayer, each)
            attention = layer.attention
            y = layer.input_norm(x)
            k, v = attention.keys_values(y, positions)
            attended = two_part_attention(
                blocked(attention.queries(y, positions)),
                attention.keys_values(context, batch.positions),
                context_span(batch, here, anchors >= 0, size, attention.config),
                (blocked(k), blocked(v)),
                block_mask(size, attention.config),
                scale=attention.config.scale,
                softcap=attention.config.softcap,
                chunk=self.chunk,
            )
            x = layer.finish(x, attention.o(attended.reshape(rows, blocks * size, *attended.shape[3:])))
        return blocked(drafter.norm(x))


def context_span(batch: Batch, anchors: jax.Array, valid: jax.Array, size: int, config: AttentionConfig) -> Span:
    """What the slots of blocks at anchors int32 [B, A] see of the context: their document before the anchor, within the window."""
    first = jnp.broadcast_to(document_start(batch, anchors)[..., None], (*anchors.shape, size))
    if config.window is not None:
        if config.window_from_block:
            reach = (anchors - config.window)[..., None]
        else:
            reach = anchors[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None] - config.window + 1
        first = jnp.maximum(first, reach)
    return Span(first, jnp.where(valid, anchors, 0)[..., None])


def block_mask(size: int, config: AttentionConfig) -> jax.Array:
    """bool [size, size]: which slots of its own block a slot sees, as `block_attention` has it."""
    query, key = jnp.arange(size)[:, None], jnp.arange(size)[None]
    seen = key <= query if config.causal else jnp.ones((size, size), jnp.bool_)
    if config.window is not None and not config.window_from_block:
        seen = seen & (query - key < config.window) & (key - query < config.window)
    return seen

"""Training of EAGLE-3: training-time test, the drafter run on its own features for several steps (arXiv 2503.01840; SPEC 1e)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from jaxspec.config import AttentionConfig
from jaxspec.drafters.eagle3 import Eagle3, FirstLayer
from jaxspec.layers.argmax import argmax
from jaxspec.layers.decoder_layer import DecoderLayer
from jaxspec.training import losses
from jaxspec.training.attention import Span, two_part_attention
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Metrics, Target, document_start, same_document, take
from jaxspec.training.parts import in_parts, sums_in_parts

# Keys and values [B, T, K, H] of one pass, for each layer.
Pass = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Eagle3Objective:
    """EAGLE-3's objective. Row t of a pass is the pair (features of t, token t + 1).

    Fields:
        steps: passes; pass s predicts token t + 2 + s of row t, from its own features where s > 0.
        step_decay: pass s weighs step_decay^s.
        mixture: losses and their weights.
        chunk, scored: rows that attend, and whose logits are there, at a time; None: as many as `in_parts` allows.
    """

    steps: int = 3
    step_decay: float = 1.0
    mixture: Mapping[str, float] | None = None
    chunk: int | None = None
    scored: int | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        return tuple(f"step {step}" for step in range(self.steps))

    def choose(self, key: jax.Array, batch: Batch) -> None:
        """Nothing is random."""
        del key, batch

    def weights(self, batch: Batch, choices: None) -> jax.Array:
        """See `Objective`."""
        del choices
        return jnp.stack([jnp.sum(self.counts(batch, step).astype(jnp.float32)) for step in range(self.steps)])

    def counts(self, batch: Batch, step: int) -> jax.Array:
        """bool [B, T]: rows that count in pass `step`. The pass's own token is an answer's, in the row's document."""
        row = _rows(batch)
        return same_document(batch, row, row + 1 + step) & take(batch.loss_mask, row + 1 + step)

    def sums(
        self, drafter: Eagle3, target: Target, batch: Batch, features: Features, choices: None
    ) -> tuple[jax.Array, Metrics]:
        """See `Objective`."""
        del choices
        wanted = target.logits(features.last)  # [B, T, Vd], of the token after each
        sums, right, counted = [], [], []

        def score(stream: jax.Array, counts: jax.Array, wanted: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            logits = drafter.logits_of(stream)
            element = losses.mixture_loss(self.mixture or {"kl": 1.0}, logits, wanted)
            return (jnp.where(counts, element, 0.0),), argmax(logits) == argmax(wanted)

        for step, stream in enumerate(self.passes(drafter, batch, features, self.steps)):
            counts = self.counts(batch, step)
            wanted = jnp.roll(
                wanted, -1, axis=1
            )  # of the token behind the predicted one; what comes round doesn't count
            (total,), same = sums_in_parts(
                score, (stream, counts), self.scored, _logits(drafter, batch), constants=(wanted,)
            )
            sums.append(self.step_decay**step * total)
            right.append(same)
            counted.append(counts)
        return jnp.stack(sums), Metrics.of(jnp.stack(right, axis=-1), jnp.stack(counted, axis=-1))

    def accepts(self, drafter: Eagle3, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        """See `Objective`."""
        row = _rows(batch)

        def greedy(stream: jax.Array) -> jax.Array:
            return argmax(drafter.logits_of(stream))

        right = []
        for step, stream in enumerate(self.passes(drafter, batch, features, self.steps)):
            drafts = drafter.vocabulary.to_verifier(in_parts(greedy, (stream,), self.scored, _logits(drafter, batch)))
            label = row + 2 + step
            right.append((drafts == take(batch.tokens, label)) & same_document(batch, row, label))
        # The first token of a document has no pair before it: nothing is drafted there.
        paired = (take(batch.positions, anchors) > 0)[..., None]
        return take(jnp.stack(right, axis=-1), anchors - 1) & paired

    def passes(self, drafter: Eagle3, batch: Batch, features: Features, steps: int) -> list[jax.Array]:
        """The stream [B, T, D] behind the last layer of each pass, every token before the predicted one as in the data."""
        stream, out = drafter.fuse(features.taps), []
        done: list[Pass] = []
        for step in range(steps):
            tokens = jnp.roll(batch.tokens, -1 - step, axis=1)
            stream, made = self.run(drafter, batch, tokens, stream, done)
            done.append(made)
            out.append(stream)
            stream = drafter.recycled(stream)
        return out

    def run(
        self, drafter: Eagle3, batch: Batch, tokens: jax.Array, fused: jax.Array, done: list[Pass]
    ) -> tuple[jax.Array, Pass]:
        """One pass: tokens int32 [B, T] paired with fused features [B, T, D] -> the stream after the last layer, and the pass's keys and
        values. Row t sees the first pass's rows up to t in its document, and row t of every later pass."""
        step = len(done)
        positions = batch.positions + step
        embedded = drafter.vocabulary.embed(tokens).astype(fused.dtype)
        x, made = fused, []
        for i, each in enumerate(drafter.layers):
            first = isinstance(each, FirstLayer)
            layer = cast(FirstLayer, each) if first else cast(DecoderLayer, each)
            if isinstance(layer, FirstLayer):
                x, y = layer.pair(embedded, x)
            else:
                y = layer.input_norm(x)
            attention = layer.attention
            made.append(attention.keys_values(y, positions))
            passes = [earlier[i] for earlier in done] + [made[i]]
            own = None if step == 0 else stack_own(passes[1:])
            attended = two_part_attention(
                attention.queries(y, positions)[:, :, None],
                passes[0],
                pair_span(batch, _rows(batch), step, attention.config),
                own,
                scale=attention.config.scale,
                softcap=attention.config.softcap,
                chunk=self.chunk,
            )
            x = layer.finish(x, attention.o(attended[:, :, 0]))
        return x, made


def pair_span(batch: Batch, rows: jax.Array, depth: int, config: AttentionConfig) -> Span:
    """What the pairs `depth` passes behind rows int32 [B, A] see of the first pass: their document up to the row, within the window."""
    first = document_start(batch, rows)
    if config.window is not None:
        first = jnp.maximum(first, rows + depth - config.window + 1)
    return Span(first[..., None], rows[..., None] + 1)


def stack_own(passes: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, A, K, H] of passes 1 .. J -> [B, A, J, K, H]."""
    return jnp.stack([k for k, _ in passes], axis=2), jnp.stack([v for _, v in passes], axis=2)


def _rows(batch: Batch) -> jax.Array:
    """int32 [B, T]: every index."""
    return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.tokens.shape)


def _logits(drafter: Eagle3, batch: Batch) -> int:
    """How many logits one pair in every row has."""
    return batch.tokens.shape[0] * drafter.config.draft_vocab_size

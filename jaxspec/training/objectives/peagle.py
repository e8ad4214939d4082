"""Training of P-EAGLE: chains of mask pairs behind ever fewer anchors, all in one pass (arXiv 2602.01469; SPEC 2e)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.drafters.eagle3 import FirstLayer
from jaxspec.drafters.peagle import PEagle
from jaxspec.layers.argmax import argmax
from jaxspec.training import losses
from jaxspec.training.anchors import Chains, chains_at, choose_chains
from jaxspec.training.attention import two_part_attention
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Metrics, Target, same_document, take
from jaxspec.training.objectives.eagle3 import pair_span, stack_own
from jaxspec.training.parts import sums_in_parts


@dataclass(frozen=True)
class PEagleObjective:
    """P-EAGLE's objective. Row t of depth 0 is the pair (features of t, token t + 1); all rows of depth 0 are there.

    Fields:
        depths: K, depth 0 included.
        ratio, floor: of the sparsification (`choose_chains`).
        seeds: most chains a row starts with.
        mixture: losses and their weights.
        chunk, scored: pairs that attend, and whose logits are there, at a time; None: as many as `in_parts` allows.
    """

    depths: int = 8
    ratio: float = 0.7
    floor: float = 0.2
    seeds: int = 512
    mixture: Mapping[str, float] | None = None
    chunk: int | None = None
    scored: int | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        return ("loss",)

    def choose(self, key: jax.Array, batch: Batch) -> Chains:
        """See `Objective`."""
        return choose_chains(key, batch, self.depths, self.ratio, self.floor, self.seeds)

    def weights(self, batch: Batch, choices: Chains) -> jax.Array:
        """See `Objective`."""
        groups = self.groups(batch, choices)
        return jnp.stack([_number(counts) for _, counts in groups]).sum(keepdims=True)

    def groups(self, batch: Batch, chains: Chains) -> list[tuple[jax.Array, jax.Array]]:
        """For each depth the row index int32 [B, n] that its pairs stand at, and bool [B, n], whether they count: n = T at depth 0, then
        the number of chains that may reach the depth."""
        every = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
        rows = jnp.broadcast_to(every, batch.tokens.shape)
        groups = [(rows, same_document(batch, rows, rows + 1) & take(batch.loss_mask, rows + 1))]
        sizes = chains_at(chains.anchors.shape[1], self.depths, self.ratio, self.floor)
        for depth, size in enumerate(sizes, start=1):
            row = chains.anchors[:, :size] + depth
            there = (chains.lengths[:, :size] >= depth) & same_document(batch, chains.anchors[:, :size], row + 1)
            groups.append((row, there & take(batch.loss_mask, row + 1)))
        return groups

    def sums(
        self, drafter: PEagle, target: Target, batch: Batch, features: Features, choices: Chains
    ) -> tuple[jax.Array, Metrics]:
        """See `Objective`."""
        groups = self.groups(batch, choices)
        rows = jnp.concatenate([row for row, _ in groups], axis=1)
        counts = jnp.concatenate([counted for _, counted in groups], axis=1)
        streams = self.streams(drafter, batch, features, choices.anchors, [r for r, _ in groups])

        def score(streams: jax.Array, rows: jax.Array, counts: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            logits = drafter.logits_of(streams)
            wanted = target.logits(take(features.last, rows + 1))
            element = losses.mixture_loss(self.mixture or {"kl": 1.0}, logits, wanted)
            return (jnp.where(counts, element, 0.0),), argmax(logits) == argmax(wanted)

        logits = batch.tokens.shape[0] * drafter.config.draft_vocab_size  # of one pair in every row
        sums, right = sums_in_parts(score, (streams, rows, counts), self.scored, logits)
        return jnp.stack(sums), self._metrics(groups, right & counts, choices)

    def _metrics(self, groups: list[tuple[jax.Array, jax.Array]], right: jax.Array, chains: Chains) -> Metrics:
        """Acceptance of draft k + 1 at chance level of its depth: each depth has its own chains, so the prefix of a chain is looked up
        depth by depth and weighed by how many chains reach it."""
        sizes = [row.shape[1] for row, _ in groups]
        parts = jnp.split(right, _ends(sizes), axis=1)
        anchors = _number(groups[0][1])
        prefix = take(parts[0], chains.anchors)  # of each chain: its depth 0 right
        accepted = [_number(parts[0])]
        share = accepted[0] / jnp.maximum(anchors, 1)
        for (_, counts), part in zip(groups[1:], parts[1:], strict=True):
            size = part.shape[1]
            reached = prefix[:, :size] & counts
            prefix = reached & part
            share = share * _number(prefix) / jnp.maximum(_number(reached), 1)
            accepted.append(share * anchors)
        missing = self.depths - len(accepted)
        return Metrics(anchors, jnp.pad(jnp.stack(accepted), (0, missing)))

    def accepts(self, drafter: PEagle, batch: Batch, features: Features, anchors: jax.Array) -> jax.Array:
        """See `Objective`."""
        first = anchors - 1  # the row whose pair holds the anchor
        every = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.tokens.shape)
        rows = [every] + [first + depth for depth in range(1, self.depths)]
        streams = self.streams(drafter, batch, features, first, rows)
        parts = jnp.split(streams, _ends([row.shape[1] for row in rows]), axis=1)
        parts[0] = take(parts[0], first)
        right = []
        for depth, part in enumerate(parts):
            drafts = drafter.vocabulary.to_verifier(argmax(drafter.logits_of(part)))
            label = anchors + depth + 1
            right.append((drafts == take(batch.tokens, label)) & same_document(batch, first, label))
        return jnp.stack(right, axis=-1)

    def streams(
        self, drafter: PEagle, batch: Batch, features: Features, anchors: jax.Array, rows: list[jax.Array]
    ) -> jax.Array:
        """The stream after the last layer of every depth's pairs, one depth behind the other: [B, T + n_1 + n_2 + ..., D].

        anchors int32 [B, C]; rows: the row index int32 [B, n_d] of each depth's pairs, which belong to the first n_d anchors. A pair sees
        the rows of depth 0 up to its anchor in its document, and its own chain up to itself.
        """
        fused = drafter.fuse(features.taps)
        masked = drafter.fuse(drafter.mask_hidden[...].astype(fused.dtype)[None, None])
        batch_size = batch.tokens.shape[0]
        ends = _ends([row.shape[1] for row in rows])
        extra = sum(row.shape[1] for row in rows[1:])
        x = jnp.concatenate([fused, jnp.broadcast_to(masked, (batch_size, extra, fused.shape[-1]))], axis=1)
        tokens = jnp.concatenate(
            [jnp.roll(batch.tokens, -1, axis=1), jnp.full((batch_size, extra), drafter.mask_token, jnp.int32)], axis=1
        )
        embedded = drafter.vocabulary.embed(tokens).astype(fused.dtype)
        deeper = [take(batch.positions, anchors[:, : row.shape[1]]) + d for d, row in enumerate(rows[1:], start=1)]
        positions = jnp.concatenate([batch.positions, *deeper], axis=1)
        for layer in drafter.layers:
            if isinstance(layer, FirstLayer):
                x, y = layer.pair(embedded, x)
            else:
                y = layer.input_norm(x)
            attention = layer.attention
            queries = jnp.split(attention.queries(y, positions), ends, axis=1)
            keys, values = (jnp.split(part, ends, axis=1) for part in attention.keys_values(y, positions))
            out = []
            for depth, q in enumerate(queries):
                size = q.shape[1]
                chain = [(keys[d][:, :size], values[d][:, :size]) for d in range(1, depth + 1)]
                out.append(
                    two_part_attention(
                        q[:, :, None],
                        (keys[0], values[0]),
                        pair_span(batch, rows[0] if depth == 0 else anchors[:, :size], depth, attention.config),
                        stack_own(chain) if chain else None,
                        scale=attention.config.scale,
                        softcap=attention.config.softcap,
                        chunk=self.chunk,
                    )[:, :, 0]
                )
            x = layer.finish(x, attention.o(jnp.concatenate(out, axis=1)))
        return x


def _number(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.float32))


def _ends(sizes: list[int]) -> list[int]:
    """Where parts of these sizes end, but the last."""
    ends, end = [], 0
    for size in sizes[:-1]:
        end += size
        ends.append(end)
    return ends

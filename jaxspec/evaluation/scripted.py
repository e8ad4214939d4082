"""Drafters that draft what a table says: oracle, junk and constant. They stand in for a real one where the cycle is under test."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import AttentionConfig, LayerConfig, RopeConfig, VerifierConfig
from jaxspec.drafters.base import Choose, Context, DraftVocabulary, Proposal
from jaxspec.drafters.config import DrafterConfig
from jaxspec.layers.cache import KVCache
from jaxspec.sharding import first_row


class Scripted(nnx.Module):
    """Row b with its anchor at position s drafts `table[b, s]`, whatever the features."""

    def __init__(self, verifier: VerifierConfig, table: np.ndarray):
        """table: verifier ids int32 [B, S, K]; batches of up to B rows and K drafts run with it."""
        self.config = scripted_config(verifier)
        self.table = nnx.Variable(jnp.asarray(table, jnp.int32))
        # Never used, so of one token; it says that draft ids are verifier ids.
        one = replace(self.config, vocab_size=1, draft_vocab_size=1, width=1)
        self.vocabulary = DraftVocabulary(one, rngs=nnx.Rngs(0), dtype=jnp.float32)

    def prefill(self, context: Context, cache: KVCache) -> KVCache:
        """See `Drafter`."""
        return cache.advance(context.count)

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """See `Drafter`. The drafts are a point mass each."""
        del choose
        cache = cache.advance(context.count)
        table = self.table[...]
        count = cache.length.shape[0]
        rows = first_row(count) + jnp.arange(count, dtype=jnp.int32)
        ids = table[rows, jnp.minimum(cache.length, table.shape[1] - 1)][:, :drafts]
        return Proposal(ids, ids, None, None), cache


def scripted_config(verifier: VerifierConfig) -> DrafterConfig:
    """The least that decoding asks of a drafter: one tap, and a cache to keep lengths in."""
    attention = AttentionConfig(1, 1, 2, RopeConfig(theta=1e4, head_dim=2), 1.0, 0)
    return DrafterConfig(
        method="dflash",
        vocab_size=verifier.vocab_size,
        draft_vocab_size=verifier.vocab_size,
        width=verifier.width,
        taps=(0,),
        layers=(LayerConfig(attention, mlp_width=1, activation="silu"),),
        norm_eps=verifier.norm_eps,
        max_positions=verifier.max_positions,
        own_embed=True,
        own_head=True,
    )


def oracle_table(sequences: Sequence[Sequence[int]], shape: tuple[int, int, int]) -> np.ndarray:
    """What comes next in each row's sequence (prompt and answer); 0 behind its end and in rows without one. int32 of shape [B, S, K]."""
    rows, positions, drafts = shape
    table = np.zeros(shape, np.int32)
    for row, sequence in enumerate(sequences[:rows]):
        padded = np.zeros(positions + drafts, np.int32)
        padded[: len(sequence)] = sequence
        for slot in range(drafts):
            table[row, :, slot] = padded[slot + 1 : slot + 1 + positions]
    return table


def junk_table(vocab_size: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Random tokens, int32 of shape [B, S, K]."""
    return np.random.default_rng(seed).integers(0, vocab_size, shape, np.int32)


def constant_table(token: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Always the same token, int32 of shape [B, S, K]."""
    return np.full(shape, token, np.int32)

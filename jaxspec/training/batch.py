"""What a training step reads: packed tokens, and the verifier's features of them."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, each row documents one after the other, padding behind them.

    Fields:
        tokens: int32 [B, T].
        documents: int32 [B, T], differs between the documents of a row; -1 for padding.
        positions: int32 [B, T], counted from 0 in each document.
        loss_mask: bool [B, T], whether the token is one that the drafter shall learn to predict (an answer's token).
    """

    tokens: jax.Array
    documents: jax.Array
    positions: jax.Array
    loss_mask: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """The verifier's residual streams over a batch.

    Fields:
        taps: [B, T, n * D], the drafter's tapped streams, in increasing id.
        last: [B, T, D], after the last layer and before the final norm (aux id L, SPEC 0.1).
    """

    taps: jax.Array
    last: jax.Array

"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, all K drafts in one causal pass."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.drafters.base import Choose, Context, Proposal, last_counted, take_rows
from jaxspec.drafters.config import DrafterConfig
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.layers.cache import KVCache
from jaxspec.layers.param import normal_param


class PEagle(Eagle3):
    """The pairs that aren't known yet are a mask token with a learned feature, the same at every depth."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        super().__init__(config, rngs=rngs, dtype=dtype)
        if config.mask_token is None:
            raise ValueError("P-EAGLE needs a mask token")
        self.mask_token = config.mask_token
        self.mask_hidden = normal_param(rngs, (config.feature_width,), ("feature",), dtype)

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose) -> tuple[Proposal, KVCache]:
        """See `Drafter`. One pass over [counted rows, then K - 1 mask rows]; what follows them is padding that nobody sees."""
        rows = context.tokens.shape[1] + drafts - 1
        known = jnp.arange(rows, dtype=jnp.int32)[None] < context.count[:, None]  # [B, rows]
        pad = ((0, 0), (0, drafts - 1))
        tokens = jnp.where(known, jnp.pad(context.tokens, pad), jnp.int32(self.mask_token))
        with jax.named_scope("inject"):  # its keys and values come out of the one pass, with the drafts
            fused = jnp.pad(self.fuse(context.features), (*pad, (0, 0)))
        masked = self.fuse(self.mask_hidden[...].astype(fused.dtype)[None, None])  # [1, 1, D]
        stream, cache = self.run(tokens, jnp.where(known[..., None], fused, masked), cache)
        logits = self.logits_of(take_rows(stream, last_counted(context), drafts))  # [B, K, Vd]
        return self.vocabulary.proposal(*choose(logits, jnp.int32(0))), cache.advance(context.count)

"""What a drafter is, as data. `jaxspec.checkpoint.drafters` builds it from a checkpoint of any format."""

from dataclasses import dataclass
from typing import Literal

from jaxspec.config import LayerConfig

Method = Literal["eagle3", "peagle", "dflash", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class EagleConfig:
    """What EAGLE-3 and P-EAGLE have beside their layers (SPEC 1a).

    `norm_before_residual`: the first layer's residual is the normed feature. `norm_before_fc`: one norm over the concatenated
    features; `fc_norm`: one norm a tapped layer; never both. `norm_output`: the feature passed to the next draft is normed.
    """

    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark's sequential head: a low-rank bias on slot k's logits by the token before it (arXiv 2607.05147)."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True)
class ConfidenceConfig:
    """DSpark's confidence head. `with_markov`: it sees the embedding of the previous token beside the hidden state.

    `temperatures`: one for each slot, dividing its logit (sequential temperature scaling); empty for none.
    """

    with_markov: bool
    temperatures: tuple[float, ...] = ()


@dataclass(frozen=True)
class BlockConfig:
    """What DFlash and DSpark have beside their layers (SPEC 3a, 4a).

    `size` is the block B: anchor and mask slots. `sample_from_anchor`: slot j predicts the token after slot j, so that the anchor's
    slot drafts too; otherwise slot j predicts its own token and the anchor's slot is unused.
    """

    size: int
    sample_from_anchor: bool
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None

    @property
    def max_drafts(self) -> int:
        """Most drafts K a block gives."""
        return self.size if self.sample_from_anchor else self.size - 1


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter.

    `width` D is the verifier's model width, `vocab_size` V its vocabulary; `taps` are increasing aux ids (SPEC 0.1) of the features.
    `own_embed`, `own_head`: the checkpoint holds its own; otherwise the verifier's are borrowed. `embed_scale` multiplies the
    embeddings as in training, whatever the verifier does with its own. `logit_scale` multiplies the logits, then `logit_softcap` c
    caps them. `speculative_tokens`: the K that the checkpoint recommends. `max_positions`: the longest sequence it was made for.
    """

    method: Method
    vocab_size: int
    draft_vocab_size: int
    width: int
    taps: tuple[int, ...]
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    own_embed: bool
    own_head: bool
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    mask_token: int | None = None
    eagle: EagleConfig | None = None
    block: BlockConfig | None = None
    speculative_tokens: int | None = None

    @property
    def feature_width(self) -> int:
        """Width of one position's features: every tapped layer's D."""
        return len(self.taps) * self.width

    @property
    def reduced_vocab(self) -> bool:
        """Whether drafts come from a part of the verifier's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def max_drafts(self) -> int | None:
        """Most drafts K a cycle; None where the drafter sets no bound."""
        return None if self.block is None else self.block.max_drafts

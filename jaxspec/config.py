"""What a verifier is, as data: frozen dataclasses, parsed and validated once at the edge.

A `VerifierConfig` describes every layer on its own, so one decoder (`jaxspec.verifiers.decoder`) serves all families; the differences
between families are values here. `jaxspec.verifiers.families` builds it from a Hugging Face `config.json`.

Array letters used throughout: B batch, T query tokens, S cache length, L layers, D model width, N query heads, K key/value heads
(G = N / K), H head width, F MLP width, E experts, V vocabulary, P per-layer-embedding width.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "yarn", "llama3", "proportional"]
Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one layer.

    `head_dim` is H. `partial` is the rotated share of H: with kind "proportional" the frequencies keep H in their exponent and the rest
    are zero (Gemma-4); with every other kind the first `partial * H` entries rotate and the rest pass through. The remaining fields are
    the parameters of their kind, named as in transformers' `rope_parameters`; None where the kind has no use for them.
    """

    theta: float
    head_dim: int
    kind: RopeKind = "default"
    partial: float = 1.0
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    `scale` multiplies the scores; `window` W lets query position p see keys p-W+1..p (None: all up to p). `kv_source` is the index of
    the layer whose cached keys and values are read: the layer itself, or an earlier one (Gemma-4 E2B/E4B), in which case this layer
    has no key or value weights. `v_from_k` takes the values from the key projection, before k-norm and rope (Gemma-4's
    "attention_k_eq_v"). `causal` False: the tokens of one call see one another both ways (block drafters). `window_from_block`: the
    window counts from the call's first token for all its tokens. `in_width`: width of the input of q, k and v where it isn't D
    (EAGLE-3's first layer: 2D).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    kv_source: int
    window: int | None = None
    qk_norm: bool = False
    v_norm: bool = False  # RMS norm without a weight
    v_from_k: bool = False
    bias: bool = False  # on q, k and v
    out_bias: bool = False
    softcap: float | None = None
    causal: bool = True
    window_from_block: bool = False
    in_width: int | None = None


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: softmax over E in float32, top-k, then renormalised only if `normalize`.

    `gemma_router`: the router sees rms_norm(x) * scale / sqrt(D) and its weights are multiplied by a learned scale per expert.
    """

    experts: int
    top_k: int
    width: int
    normalize: bool
    gemma_router: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer.

    `mlp_width` F of the dense MLP, None where `moe` replaces it. Both set (Gemma-4 26B-A4B): the two run side by side, each with norms
    of its own, and are added. `sandwich`: norms after attention and after the MLP, before the residual addition (Gemma).
    `scalar`: the layer's output is multiplied by a stored scalar (Gemma-4). `per_layer_width` P: width of the per-layer embedding added
    at the layer's end (Gemma-4 E2B/E4B), 0 for none.
    """

    attention: AttentionConfig
    mlp_width: int | None
    activation: Activation
    moe: MoeConfig | None = None
    mlp_bias: bool = False
    sandwich: bool = False
    scalar: bool = False
    per_layer_width: int = 0


@dataclass(frozen=True)
class VerifierConfig:
    """A causal decoder-only language model.

    `norm_offset` is added to every norm weight (1.0 for Gemma-3, which stores w - 1). `embed_scale` multiplies the token embeddings.
    `tied`: the head is the embedding. `logit_softcap` c: logits become c * tanh(logits / c). `max_positions`: the longest sequence the
    model is made for, prompt and answer together. `per_layer_vocab_size`: rows of the per-layer embedding table, 0 for none.
    """

    family: str
    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    tied: bool
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer_vocab_size: int = 0

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def per_layer_width(self) -> int:
        """P, the same in every layer; 0 for none."""
        return self.layers[0].per_layer_width

"""DeepSpec's format: DSpark on Qwen3 and Gemma-4 layers, DFlash (DSpark without heads), EAGLE-3 on a Qwen3 layer (SPEC 1a, 4a)."""

from collections.abc import Set
from typing import Any

from jaxspec.checkpoint.drafters.parsed import (
    Parsed,
    VerifierFacts,
    extras,
    heads,
    mask_token,
    own_embed_and_head,
    speculative_tokens,
    taps,
)
from jaxspec.checkpoint.drafters.transformer import (
    QWEN3_DEFAULTS,
    Sight,
    read_layers,
    refuse_unsupported,
    with_defaults,
    write_flat_rope,
    write_layers,
    write_rope,
)
from jaxspec.config import AttentionConfig, LayerConfig
from jaxspec.drafters.config import BlockConfig, DrafterConfig, EagleConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.gemma4 import ROPE_DEFAULTS
from jaxspec.verifiers.hf import FULL, Fields, activation, check_groups, layer_types, rope_by_layer_type

NAME = "deepspec"
_GEMMA_NORM = "layers.0.pre_feedforward_layernorm.weight"
_WITHOUT_TTT_LENGTH = 7  # DeepSpec's own recipe


def read(fields: Fields, names: Set[str], num_layers: int | None) -> Parsed:
    """Arguments as in `speculators.read`."""
    gemma = _GEMMA_NORM in names or str(fields.get("model_type")).startswith("gemma4")
    eagle = "layers.0.hidden_norm.weight" in names
    if gemma and eagle:
        raise InputError(f"{fields.where}: EAGLE-3 on Gemma-4 layers (Gemma4Eagle3Model) is not supported")
    fields = with_defaults(fields, {} if gemma else {"head_dim": QWEN3_DEFAULTS["head_dim"]})
    refuse_unsupported(fields)
    count = fields.integer("num_hidden_layers")
    if set(layer_types(fields, [FULL] * count)) != {FULL}:
        raise fields.error("layer_types", f"has another type than {FULL}, which DeepSpec's drafters do not have")
    if eagle and count > 1:
        # every layer of DeepSpec's sees the embedding again; one layer is what its recipes train
        raise fields.error("num_hidden_layers", f"is {count}; DeepSpec's EAGLE-3 is supported with one layer")
    vocab_size = fields.integer("vocab_size")
    if fields.get("draft_vocab_size") not in (None, vocab_size):
        raise fields.error("draft_vocab_size", "is set, but DeepSpec's drafters have the whole vocabulary")
    if fields.get("num_target_layers") is not None:
        num_layers = fields.integer("num_target_layers")
    own_embed, own_head = own_embed_and_head(names)
    sights = [Sight(causal=eagle)] * count
    block = None if eagle else _block(fields, names)
    implied = fields.integer("ttt_length", _WITHOUT_TTT_LENGTH) if block is None else block.max_drafts
    config = DrafterConfig(
        method="eagle3" if block is None else "dspark" if block.markov or block.confidence else "dflash",
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        width=fields.integer("hidden_size"),
        taps=taps(fields, "target_layer_ids", "output", num_layers),
        layers=_gemma_layers(fields) if gemma else read_layers(fields, sights, qk_norm=True, wide_first=eagle),
        norm_eps=fields.positive("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
        own_embed=own_embed,
        own_head=own_head,
        embed_scale=fields.integer("hidden_size") ** 0.5 if gemma else 1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping") if gemma else None,
        mask_token=None if block is None else mask_token(fields, ("mask_token_id",), vocab_size),
        eagle=EagleConfig(norm_before_residual=False) if eagle else None,
        block=block,
        speculative_tokens=speculative_tokens(fields, implied),
    )
    name = fields.get("target_model_name_or_path")
    return Parsed(config, VerifierFacts(name=name, num_layers=num_layers))


def write(config: DrafterConfig, verifier: VerifierFacts) -> dict[str, Any]:
    """The config.json of DeepSpec's models."""
    if verifier.num_layers is None:
        raise InputError(f"{NAME} names the verifier's number of layers, which the source does not: give --verifier")
    first = config.layers[0]
    rope = first.attention.rope
    data = {
        **write_layers(config, NAME),
        "num_target_layers": verifier.num_layers,
        "target_layer_ids": [aux - 1 for aux in config.taps],
    }
    if first.sandwich:
        for name in ("sliding_window", "use_sliding_window", "max_window_layers", "mlp_bias"):  # not Gemma's
            del data[name]
        data |= {
            "architectures": ["Gemma4DSparkModel"],
            "model_type": "gemma4_text",
            "attention_k_eq_v": first.attention.v_from_k,
            "enable_moe_block": False,
            "final_logit_softcapping": config.logit_softcap,
            "global_head_dim": first.attention.head_dim,
            "hidden_activation": data.pop("hidden_act"),
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": first.attention.kv_heads,
            "num_kv_shared_layers": 0,
            "rope_parameters": {FULL: write_rope(rope), "sliding_attention": {**ROPE_DEFAULTS["sliding_attention"]}},
            "use_double_wide_mlp": False,
        }
    else:
        data |= {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], **write_flat_rope(rope)}
    block = config.block
    if block is None:
        tokens = config.speculative_tokens or _WITHOUT_TTT_LENGTH
        data |= {"architectures": ["Qwen3Eagle3Model"], "ttt_length": tokens, "step_loss_decay": 0.8}
        data["draft_num_hidden_layers"] = len(config.layers)
        if verifier.name is not None:
            data["target_model_name_or_path"] = verifier.name
        return data
    data |= {
        "block_size": block.size,
        "mask_token_id": config.mask_token,
        "num_anchors": 512,
        "markov_rank": 0 if block.markov is None else block.markov.rank,
        "enable_confidence_head": block.confidence is not None,
    }
    if block.markov is not None:
        data["markov_head_type"] = block.markov.kind
    if block.confidence is not None:
        data["confidence_head_with_markov"] = block.confidence.with_markov
    return data | extras(config, config.max_drafts)


def _block(fields: Fields, names: Set[str]) -> BlockConfig:
    size = fields.integer("block_size")
    markov, confidence = heads(fields, names, None, size)
    return BlockConfig(size, fields.flag("sample_from_anchor", True), markov, confidence)


def _gemma_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Gemma-4 full-attention layers: the global head width, values from keys, sandwich norms."""
    fields = with_defaults(fields, {"hidden_size_per_layer_input": 0})
    if fields.count("hidden_size_per_layer_input", 0):
        raise fields.error(
            "hidden_size_per_layer_input", "is not 0; per-layer embeddings are not supported in drafters"
        )
    v_from_k = fields.flag("attention_k_eq_v", False)
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_global_key_value_heads" if v_from_k else "num_key_value_heads")
    check_groups(fields, query_heads, kv_heads)
    head_dim = fields.integer("global_head_dim", 512)
    ropes = rope_by_layer_type(
        fields, {FULL: {**ROPE_DEFAULTS[FULL]}}, {FULL: head_dim}, fields.integer("max_position_embeddings")
    )
    bias = fields.flag("attention_bias", False)
    return tuple(
        LayerConfig(
            attention=AttentionConfig(
                heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=ropes[FULL],
                scale=1.0,
                kv_source=index,
                qk_norm=True,
                v_norm=True,
                v_from_k=v_from_k,
                bias=bias,
                out_bias=bias,
                causal=False,
            ),
            mlp_width=fields.integer("intermediate_size"),
            activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            sandwich=True,
            scalar=True,
        )
        for index in range(fields.integer("num_hidden_layers"))
    )

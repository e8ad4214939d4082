"""EAGLE-3, P-EAGLE, DFlash and DSpark by speculators 0.9, and legacy EAGLE-3 files of the same weights under the older names."""

import contextlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3 import core as eagle3_core
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, PretrainedConfig

from drafter_goldens import common
from drafter_goldens.common import BLOCK, DRAFTS, FULL, LENGTH, MASK, SLIDING, Inputs, qwen3_config, sliding
from drafter_goldens.speculators_outputs import block, eagle3, peagle

CLASSES = {
    "eagle3": (Eagle3SpeculatorConfig, eagle3_core.Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, peagle_core.PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, dflash_core.DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, dspark_core.DSparkDraftModel),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A drafter. `legacy`: rewrites the saved directory into the legacy EAGLE-3 format, which P-EAGLE shares."""

    kind: str
    seed: int
    layers: Callable[[], PretrainedConfig]
    taps: list[int]
    reduced: bool
    fields: dict[str, object] = field(default_factory=dict)
    verifier: str = "verifier"
    legacy: Callable[[Path], None] | None = None


def llama_config(**fields: object) -> LlamaConfig:
    return LlamaConfig(
        **(qwen3_config().to_dict() | {"model_type": "llama", "num_hidden_layers": 1, "layer_types": None} | fields)
    )


def nested_rope() -> PretrainedConfig:
    """Two ropes by layer type: speculators takes the sliding one for every layer, whatever its type."""
    config = sliding([FULL, SLIDING], 5)()
    config.rope_parameters = {
        FULL: {"rope_type": "default", "rope_theta": 1000000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config


def legacy_without_embedding(directory: Path) -> None:
    """As SpecForge writes it: a flat Llama config, the vocabulary maps, no embedding, default taps."""
    _legacy(directory, {"draft_vocab_size": common.DRAFT_VOCAB}, drop=("embed_tokens.weight",))


def legacy_with_embedding(directory: Path) -> None:
    """Full vocabulary, an embedding of its own, taps and the norm before fc in `eagle_config`."""
    _legacy(
        directory,
        {
            "draft_vocab_size": common.VOCAB,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
                "norm_before_fc": True,
            },
        },
    )


def legacy_parallel(directory: Path) -> None:
    """P-EAGLE as a flat config with `ptd_token_id` (SPEC 2a); layers keep their names, there being more than one."""
    taps = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    fields = {"draft_vocab_size": common.VOCAB, "num_hidden_layers": 2, "ptd_token_id": MASK, "eagle_config": taps}
    _legacy(directory, fields, first_layer="layers.0.")


def _legacy(
    directory: Path, fields: dict[str, object], drop: tuple[str, ...] = (), first_layer: str = "midlayer."
) -> None:
    """Rename layers.0 (speculators' Eagle3Converter renames midlayer back) and flatten the config."""
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file({name.replace("layers.0.", first_layer): t for name, t in tensors.items()}, path, {"format": "pt"})
    flat = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": common.VOCAB,
        "hidden_size": common.WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(flat | fields, indent=2) + "\n")


CASES = {
    "eagle3_llama": Case("eagle3", 1, lambda: llama_config(head_dim=16), [1, 3, 6], False),
    "eagle3_llama_bias": Case(
        "eagle3",
        2,
        lambda: llama_config(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
        [1, 3, 6],
        True,
        {"norm_before_residual": True},
    ),
    "eagle3_qwen3": Case(
        "eagle3",
        3,
        lambda: qwen3_config(head_dim=16),
        [1, 3, 8],
        True,
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    "eagle3_fc_norm": Case("eagle3", 4, lambda: qwen3_config(num_hidden_layers=1), [0, 5], False, {"fc_norm": True}),
    "eagle3_window": Case(
        "eagle3", 5, sliding([FULL, SLIDING], 5), [1, 3, 6], True, {"norm_before_residual": True, "norm_output": True}
    ),
    "eagle3_legacy": Case(
        "eagle3", 6, lambda: llama_config(rms_norm_eps=1e-6), [2, 4, 5], True, legacy=legacy_without_embedding
    ),
    "eagle3_legacy_embed": Case(
        "eagle3",
        7,
        lambda: llama_config(rms_norm_eps=1e-6),
        [1, 3, 6],
        False,
        {"norm_before_fc": True},
        legacy=legacy_with_embedding,
    ),
    "peagle": Case("peagle", 8, lambda: llama_config(num_hidden_layers=2), [1, 3, 6], True, {"mask_token_id": MASK}),
    "peagle_window": Case(
        "peagle",
        9,
        sliding([FULL, SLIDING], 5),
        [2, 5],
        False,
        {"mask_token_id": MASK, "norm_before_residual": True, "fc_norm": True},
    ),
    "peagle_legacy": Case(
        "peagle",
        22,
        lambda: llama_config(num_hidden_layers=2, rms_norm_eps=1e-6),
        [1, 3, 6],
        False,
        {"mask_token_id": MASK},
        legacy=legacy_parallel,
    ),
    "dflash": Case("dflash", 10, qwen3_config, [1, 3, 6], False),
    "dflash_sliding": Case("dflash", 11, sliding([SLIDING, SLIDING], 5), [1, 6], True),
    "dflash_sliding_both_ways": Case(
        "dflash", 42, sliding([SLIDING, FULL], 4), [1, 6], True, {"sliding_window_non_causal": True}
    ),
    "dflash_from_anchor": Case("dflash", 113, qwen3_config, [1, 6], True, {"sample_from_anchor": True}),
    "dflash_nested_rope": Case("dflash", 21, nested_rope, [1, 6], True),
    "dflash_for_gemma": Case("dflash", 14, qwen3_config, [1, 3], False, verifier="verifier_gemma"),
    "dspark_vanilla": Case("dspark", 15, qwen3_config, [1, 6], True, {"markov_rank": 8}),
    "dspark_gated": Case(
        "dspark",
        16,
        qwen3_config,
        [1, 6],
        False,
        {
            "markov_rank": 8,
            "markov_head_type": "gated",
            "confidence_head_with_markov": False,
            "sample_from_anchor": False,
        },
    ),
    "dspark_rnn": Case(
        "dspark",
        17,
        qwen3_config,
        [1, 6],
        True,
        {"markov_rank": 8, "markov_head_type": "rnn", "sample_from_anchor": False},
    ),
    "dspark_rnn_sliding": Case(
        "dspark", 18, sliding([SLIDING, FULL], 5), [1, 6], False, {"markov_rank": 8, "markov_head_type": "rnn"}
    ),
    "dspark_rank0": Case(
        "dspark", 19, qwen3_config, [1, 6], True, {"markov_rank": 0, "confidence_head_with_markov": False}
    ),
    "dspark_without_confidence": Case(
        "dspark",
        20,
        qwen3_config,
        [1, 6],
        True,
        {"markov_rank": 8, "enable_confidence_head": False, "sample_from_anchor": False},
    ),
}


def make(name: str, case: Case, directory: Path) -> None:
    """Write the case's directory. The verifiers lie beside it, so that the config names its verifier without a path."""
    torch.manual_seed(case.seed)
    with contextlib.chdir(directory.parent):
        model = _save_and_load(case, directory)
        if case.legacy is legacy_without_embedding:
            model._load_verifier_weights(overwrite_embed_tokens=True)
    verifier = common.load_verifier(directory.parent / case.verifier)
    sequence = common.sequence(case.seed)
    inputs = Inputs(sequence, common.aux_features(verifier, sequence[:, :LENGTH], case.taps))
    outputs = {"eagle3": eagle3, "peagle": peagle}.get(case.kind, block)(model, inputs)
    meta = {
        "class": type(model).__name__,
        "attention": "eager",
        "verifier": case.verifier,
        "taps": case.taps,
        "peers": {"speculators": importlib.metadata.version("speculators")},
    }
    if case.legacy is not None:
        case.legacy(directory)
        meta["note"] = "legacy file of a speculators model's weights"
    common.write(directory, name, case.seed, inputs, outputs, meta)


def _save_and_load(case: Case, directory: Path) -> SpeculatorModel:
    config_class, model_class = CLASSES[case.kind]
    layers = case.layers()
    layers._attn_implementation = "eager"
    taps = "aux_hidden_state_layer_ids" if case.kind in ("dflash", "dspark") else "eagle_aux_hidden_state_layer_ids"
    fields: dict[str, object] = {taps: case.taps} | case.fields
    drafts = DRAFTS
    if case.kind in ("dflash", "dspark"):
        fields |= {"block_size": BLOCK, "mask_token_id": MASK}
        drafts = BLOCK if fields.get("sample_from_anchor", case.kind == "dspark") else BLOCK - 1
    config = config_class(
        transformer_layer_config=layers,
        draft_vocab_size=common.DRAFT_VOCAB if case.reduced else common.VOCAB,
        speculators_config=SpeculatorsConfig(
            algorithm=case.kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(case.verifier),
        ),
        **fields,
    )
    model = model_class(config)
    if case.reduced:
        model.load_vocab_mappings(*common.vocabulary_maps(case.seed))
    common.randomise(model, case.seed)
    common.save(model, directory)
    config = config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()

"""DFlash by z-lab's dflash 0.1."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _draft_value,
    _make_cache,
    _raw_input_embeddings,
    extract_context_feature,
)
from transformers import PretrainedConfig, PreTrainedModel

from drafter_goldens import common
from drafter_goldens.common import BLOCK, ENDS, FULL, LENGTH, MASK, SLIDING, Inputs, Outputs, qwen3_config, sliding


@dataclass(frozen=True)
class Case:
    """A drafter. `dflash_config`: the nested keys; `fields`: further ones at the top level."""

    seed: int
    layers: Callable[[], PretrainedConfig]
    dflash_config: dict[str, object]
    fields: dict[str, object] = field(default_factory=dict)
    verifier: str = "verifier"


KEYS = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 5]}
TOP = {"block_size": BLOCK, "num_target_layers": 8}

CASES = {
    "zlab": Case(31, lambda: qwen3_config(head_dim=16), KEYS, TOP),
    "zlab_default_taps": Case(32, qwen3_config, {"mask_token_id": MASK}, TOP),
    "zlab_sliding": Case(33, sliding([SLIDING, FULL], 5), KEYS, TOP),
    "zlab_sliding_both_ways": Case(34, sliding([SLIDING, FULL], 4), KEYS, TOP | {"is_causal": False}),
    "zlab_causal": Case(35, qwen3_config, KEYS, TOP | {"is_causal": True}),
    "zlab_for_gemma": Case(
        36,
        qwen3_config,
        {
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
            "block_size": BLOCK,
            "input_embedding_scale": 32**0.5,
            "output_multiplier": 0.75,
            "final_logit_softcapping": 5.0,
        },
        {"num_target_layers": 4},
        verifier="verifier_gemma",
    ),
}


def make(name: str, case: Case, directory: Path) -> None:
    """Write the case's directory."""
    torch.manual_seed(case.seed)
    config = case.layers()
    config.architectures = ["DFlashDraftModel"]
    config.auto_map = {"AutoModel": "dflash.DFlashDraftModel"}
    config.dflash_config = case.dflash_config
    for key, value in case.fields.items():
        setattr(config, key, value)
    model = DFlashDraftModel(config)
    common.randomise(model, case.seed)
    common.save(model, directory)
    common.edit_config(directory, {"auto_map": config.auto_map})
    model = DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()

    target = common.load_verifier(directory.parent / case.verifier)
    sequence = common.sequence(case.seed)
    states = target(sequence[:, :LENGTH], use_cache=False, output_hidden_states=True).hidden_states
    inputs = Inputs(sequence, extract_context_feature(states, model.target_layer_ids))
    drafts, tokens = draft(model, target, inputs)
    outputs = Outputs(blocks(model, target, inputs), drafts, tokens)
    meta = {
        "class": type(model).__name__,
        "attention": "sdpa",
        "verifier": case.verifier,
        "taps": [layer + 1 for layer in model.target_layer_ids],
        "peers": {"dflash": importlib.metadata.version("dflash")},
    }
    common.write(directory, name, case.seed, inputs, outputs, meta)


def noise(model: DFlashDraftModel, target: PreTrainedModel, anchor: torch.Tensor) -> torch.Tensor:
    """The block's input embeddings [1, B, D]: the anchor int64 [1, 1] and masks."""
    ids = torch.cat([anchor, torch.full((1, BLOCK - 1), model.mask_token_id)], dim=1)
    return _raw_input_embeddings(target, ids, float(_draft_value(model.config, "input_embedding_scale", 1.0)))


def blocks(model: DFlashDraftModel, target: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Every slot's logits [A, B, V] behind ENDS[i] positions, without a cache."""
    logits = []
    for end in ENDS:
        hidden = model(
            target_hidden=inputs.features[:, :end],
            noise_embedding=noise(model, target, inputs.sequence[:, end : end + 1]),
            position_ids=torch.arange(end + BLOCK)[None],
        )
        logits.append(model.compute_logits(hidden, target.lm_head)[0])
    return torch.stack(logits)


def draft(model: DFlashDraftModel, target: PreTrainedModel, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [A, B - 1, V] and greedy drafts [A, B - 1] of the cycles, by dflash_generate's steps: append, draft, crop."""
    cache, logits = _make_cache(model.config), []
    for start, end in common.cycles():
        hidden = model(
            target_hidden=inputs.features[:, start:end],
            noise_embedding=noise(model, target, inputs.sequence[:, end : end + 1]),
            position_ids=torch.arange(start, end + BLOCK)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1:]
        _crop_to(cache, end)
        logits.append(model.compute_logits(hidden, target.lm_head)[0])
    stacked = torch.stack(logits)
    return stacked, stacked.argmax(-1)

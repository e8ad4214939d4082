"""DFlash by z-lab's dflash 0.1."""

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import dflash.model
import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _draft_value,
    _make_cache,
    _raw_input_embeddings,
    dflash_generate,
    extract_context_feature,
)
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from drafter_goldens import common, loops
from drafter_goldens.common import BLOCK, ENDS, FULL, LENGTH, MASK, SLIDING, Inputs, Outputs, qwen3_config, sliding


@dataclass(frozen=True)
class Case:
    """A drafter. `dflash_config`: the nested keys; `fields`: further ones at the top level. `loop`: generate with it too. `fitted`: fit it
    to the verifier's text first, and do nothing but generate."""

    seed: int
    layers: Callable[[], PretrainedConfig]
    dflash_config: dict[str, object]
    fields: dict[str, object] = field(default_factory=dict)
    verifier: str = "verifier"
    loop: bool = False
    fitted: bool = False


KEYS = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 5]}
TOP = {"block_size": BLOCK, "num_target_layers": 8}

CASES = {
    "zlab": Case(31, lambda: qwen3_config(head_dim=16), KEYS, TOP),
    "zlab_default_taps": Case(32, qwen3_config, {"mask_token_id": MASK}, TOP),
    "zlab_sliding": Case(33, sliding([SLIDING, FULL], 5), KEYS, TOP, loop=True),
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
    "zlab_fitted": Case(37, sliding([FULL, FULL], 5), KEYS, TOP, fitted=True),
    "zlab_fitted_for_gemma": Case(
        41,
        sliding([SLIDING, FULL], 5),
        {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        {"num_target_layers": 4, "block_size": BLOCK},
        verifier="verifier_gemma",
        fitted=True,
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
    target = common.load_verifier(directory.parent / case.verifier)
    if case.fitted:
        fit(model, target, case.seed)
    common.save(model, directory)
    common.edit_config(directory, {"auto_map": config.auto_map})
    model = DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()
    peers = {"dflash": importlib.metadata.version("dflash")}
    if case.loop or case.fitted:
        gaps = loops.Gaps()
        loops.write(directory, case.verifier, peers, generate(model, target, case.seed, gaps), gaps)
    if case.fitted:
        return

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
        "peers": peers,
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


def fit(model: DFlashDraftModel, target: PreTrainedModel, seed: int) -> None:
    """Cross-entropy of every slot but the anchor's against the verifier's own continuations."""
    tokens = loops.continuations(target, seed)
    states = target(tokens, use_cache=False, output_hidden_states=True).hidden_states
    features = extract_context_feature(states, model.target_layer_ids)

    def loss(end: int) -> torch.Tensor:
        hidden = model(
            target_hidden=features[:, :end],
            noise_embedding=torch.cat([noise(model, target, row[None, end : end + 1]) for row in tokens]),
            position_ids=torch.arange(end + BLOCK)[None],
        )
        logits = model.compute_logits(hidden, target.lm_head)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, end + 1 : end + BLOCK].flatten())

    loops.fit(model, seed, tokens.shape[1], loss)


def generate(model: DFlashDraftModel, target: PreTrainedModel, seed: int, gaps: loops.Gaps) -> list[loops.Run]:
    """dflash_generate on every prompt; on one of them again, with a token inside an accepted block as a stop."""

    def one(prompt: torch.Tensor, stops: list[int]) -> loops.Run:
        stats = dflash_generate(model, target, prompt, loops.NEW_TOKENS, stops or None, return_stats=True)
        return loops.Run(
            prompt[0].tolist(),
            stops,
            loops.NEW_TOKENS,
            0.0,
            stats.output_ids[0, prompt.shape[1] :].tolist(),
            stats.acceptance_lengths,
        )

    with (
        mock.patch.object(dflash.model, "_cuda_time", time.perf_counter),
        gaps.watch(model, "compute_logits", lambda logits: logits),
        gaps.watch(target, "forward", lambda output: output.logits),
    ):
        runs = [one(prompt, []) for prompt in loops.prompts(seed)]
        stopping = loops.stop_inside_a_block(runs)
        if stopping is not None:
            run, stop = stopping
            runs.append(one(torch.tensor([run.prompt_ids]), [stop]))
    return runs

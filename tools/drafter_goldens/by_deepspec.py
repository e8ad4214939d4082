"""DSpark (Qwen3 and Gemma-4 style), DFlash and EAGLE-3 by a checkout of deepseek-ai/DeepSpec."""

import argparse
import importlib
import math
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from drafter_goldens import common, loops
from drafter_goldens.common import BLOCK, DRAFTS, ENDS, LENGTH, MASK, Inputs, Outputs, gemma4_config, qwen3_config


@dataclass(frozen=True)
class Case:
    """A drafter. `module`: of deepspec.modeling; `args`: as in DeepSpec's training configs. `loop`: generate with it too, drafts
    cut at a confidence threshold. `fitted`: fit it to the verifier's text first, and do nothing but generate."""

    module: str
    seed: int
    target: Callable[[], PretrainedConfig]
    args: dict[str, object]
    verifier: str = "verifier"
    published: dict[str, object] = field(default_factory=dict)
    loop: bool = False
    fitted: bool = False


def full_gemma4_config(**fields: object) -> PretrainedConfig:
    """A target with full attention only: DeepSpec makes every layer of its drafter that, which 5.24 checks against the target's."""
    return gemma4_config(layer_types=["full_attention"] * common.TARGET_LAYERS["verifier_gemma"], **fields)


def dspark_args(**changes: object) -> dict[str, object]:
    args = {
        "block_size": BLOCK,
        "num_draft_layers": 2,
        "target_layer_ids": [0, 5],
        "mask_token_id": MASK,
        "num_anchors": len(ENDS),
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
    }
    return args | changes


GEMMA_TAPS = {"target_layer_ids": [-1, 2]}  # -1: the embeddings

CASES = {
    "deepspec_dspark": Case("dspark.qwen3", 51, qwen3_config, dspark_args()),
    "deepspec_dspark_gated": Case(
        "dspark.qwen3", 52, qwen3_config, dspark_args(markov_head_type="gated", confidence_head_with_markov=False)
    ),
    "deepspec_dspark_rnn": Case("dspark.qwen3", 53, qwen3_config, dspark_args(markov_head_type="rnn"), loop=True),
    "deepspec_fitted": Case("dspark.qwen3", 58, qwen3_config, dspark_args(), fitted=True),
    "deepspec_dflash": Case("dspark.qwen3", 54, qwen3_config, dspark_args(markov_rank=0, confidence_head_alpha=0.0)),
    "deepspec_gemma4": Case(
        "dspark.gemma4",
        55,
        full_gemma4_config,
        dspark_args(**GEMMA_TAPS),
        verifier="verifier_gemma",
        published=common.gemma4_published(16, 1),
    ),
    "deepspec_gemma4_values": Case(  # a value projection of its own, and the recurrent head
        "dspark.gemma4",
        56,
        lambda: full_gemma4_config(attention_k_eq_v=False),
        dspark_args(**GEMMA_TAPS, markov_head_type="rnn"),
        verifier="verifier_gemma",
        published=common.gemma4_published(16, None),
    ),
    "deepspec_eagle3": Case(
        "eagle3.qwen3",
        57,
        qwen3_config,
        {
            "target_layer_ids": [0, 1, 3, 5, 6],
            "ttt_length": DRAFTS,
            "step_loss_decay": 0.8,
            "draft_num_hidden_layers": 1,
            "target_model_name_or_path": "verifier",
        },
    ),
}

THRESHOLDS = (0.4, 0.8)

CLASSES = {
    "dspark.qwen3": "Qwen3DSparkModel",
    "dspark.gemma4": "Gemma4DSparkModel",
    "eagle3.qwen3": "Qwen3Eagle3Model",
}


def admit_published(config: PretrainedConfig, keys: dict[str, object]) -> None:
    """Let the config answer to the keys of published Gemma-4 files, which 5.24 turned into per_layer_config and DeepSpec reads."""
    if keys:
        config.allow_global_per_layer_attribute_access = True
    for key, value in keys.items():
        setattr(config, key, value)


class NamedRotary(Gemma4TextRotaryEmbedding):
    """DeepSpec also names the layer type at construction, which 5.24's class doesn't take; both read it again on every call."""

    def __init__(self, config: PretrainedConfig, layer_type: str):
        del layer_type
        super().__init__(config)


class LengthCache(DynamicCache):
    """DeepSpec crops as transformers did before 5.24: to a length, not by a number of tokens."""

    def crop(self, length: int) -> None:
        super().crop(length - self.get_seq_length())


def unpack(repository: Path, scratch: Path) -> str:
    """Put DeepSpec's package of the repository's HEAD on the import path; returns the commit."""
    git = ["git", "-C", str(repository)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    archive = subprocess.run([*git, "archive", commit, "deepspec"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(scratch, filter="data")
    sys.path.insert(0, str(scratch))
    importlib.import_module("deepspec.modeling.dspark.gemma4.modeling").Gemma4TextRotaryEmbedding = NamedRotary
    return commit


def make(name: str, case: Case, directory: Path, commit: str) -> None:
    """Write the case's directory. `unpack` comes first."""
    torch.manual_seed(case.seed)
    modeling = importlib.import_module(f"deepspec.modeling.{case.module}.modeling")
    model_class = getattr(modeling, CLASSES[case.module])
    target_config = case.target()
    target_config.num_hidden_layers = common.TARGET_LAYERS[case.verifier]
    if "gemma4" in case.module:
        admit_published(target_config, case.published)
        target_config = SimpleNamespace(model_type="gemma4", text_config=target_config)
    build_config = importlib.import_module(f"deepspec.modeling.{case.module}.config").build_draft_config
    config = build_config(target_config=target_config, model_args=argparse.Namespace(**case.args))
    config._attn_implementation = "sdpa"
    model = model_class(config)
    common.randomise(model, case.seed)
    target = common.load_verifier(directory.parent / case.verifier)
    if case.fitted:
        fit(model, modeling, target, case.seed)
    common.save(model, directory)
    common.edit_config(directory, case.published, drop=("per_layer_config", "allow_global_per_layer_attribute_access"))
    config = type(config).from_pretrained(directory)
    admit_published(config, case.published)
    model = model_class.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    extract = importlib.import_module("deepspec.modeling.dspark.common").extract_context_feature
    peers = {"deepseek-ai/DeepSpec": commit}
    if case.loop or case.fitted:
        gaps = loops.Gaps()
        thresholds = THRESHOLDS if case.fitted else THRESHOLDS[:1]
        loops.write(directory, case.verifier, peers, generate(model, target, case.seed, thresholds, gaps), gaps)
    if case.fitted:
        return

    sequence = common.sequence(case.seed)
    states = target(sequence[:, :LENGTH], use_cache=False, output_hidden_states=True).hidden_states
    inputs = Inputs(sequence, extract(states, model.target_layer_ids))
    outputs = eagle3(model, inputs) if case.module.startswith("eagle3") else dspark(model, modeling, inputs)
    meta = {
        "class": type(model).__name__,
        "attention": "sdpa",
        "verifier": case.verifier,
        "taps": [layer + 1 for layer in model.target_layer_ids],
        "peers": peers,
    }
    common.write(directory, name, case.seed, inputs, outputs, meta)


def fit(model: PreTrainedModel, modeling: ModuleType, target: PreTrainedModel, seed: int) -> None:
    """Cross-entropy against the verifier's own continuations, and the confidence head against which drafts were right."""
    extract = importlib.import_module("deepspec.modeling.dspark.common").extract_context_feature
    tokens = loops.continuations(target, seed)
    states = target(tokens, use_cache=False, output_hidden_states=True).hidden_states
    features = extract(states, model.target_layer_ids)

    def loss(end: int) -> torch.Tensor:
        total = torch.zeros(())
        for row in range(0, tokens.shape[0], 2):
            row = (row + end) % tokens.shape[0]
            logits, confidence = trained(model, modeling, tokens[row, None], features[row, None], (end,))
            wanted = tokens[row, end + 1 : end + 1 + BLOCK]
            right = (logits[0].argmax(-1) == wanted).float()
            total = total + F.cross_entropy(logits[0], wanted)
            total = total + F.binary_cross_entropy_with_logits(confidence[0], right)
        return total

    loops.fit(model, seed, tokens.shape[1] - 1, loss)


def generate(
    model: PreTrainedModel, target: PreTrainedModel, seed: int, thresholds: tuple[float, ...], gaps: loops.Gaps
) -> list[loops.Run]:
    """The evaluator's loop on every prompt, the thresholds in turn."""
    evaluation = importlib.import_module("deepspec.eval.dspark.evaluator")
    loop = importlib.import_module("deepspec.eval.base_evaluator")
    evaluator = object.__new__(evaluation.Qwen3DSparkEvaluator)  # its __init__ wants GPUs and data sets
    evaluator.draft_model, evaluator.target_model, evaluator.confidence_head_recorder = model, target, None

    def one(prompt: torch.Tensor, threshold: float) -> loops.Run:
        evaluator.args = argparse.Namespace(
            temperature=0.0, confidence_threshold=threshold, max_new_tokens=loops.NEW_TOKENS
        )
        made = evaluator.generate_one_sample(input_ids=prompt, stop_token_ids=None)
        return loops.Run(
            prompt[0].tolist(),
            [],
            loops.NEW_TOKENS,
            threshold,
            made.output_ids[0, prompt.shape[1] :].tolist(),
            made.acceptance_lengths,
            made.proposal_lengths,
        )

    def distances(logits: torch.Tensor) -> torch.Tensor:
        """Of the confidences' logits from the threshold's, as a pair of logits [..., 2]."""
        distance = (
            logits - math.log(evaluator.args.confidence_threshold / (1 - evaluator.args.confidence_threshold))
        ).abs()
        return torch.stack([distance, torch.zeros_like(distance)], dim=-1)

    with (
        mock.patch.object(evaluation, "DynamicCache", LengthCache),
        mock.patch.object(loop, "DynamicCache", LengthCache),
        gaps.watch(target, "forward", lambda output: output.logits),
        gaps.watch(model, "sample_draft_tokens", lambda drafted: drafted[1]),
        gaps.watch(model, "predict_confidence_step", distances),
    ):
        return [one(prompt, threshold) for threshold in thresholds for prompt in loops.prompts(seed)]


def trained(
    model: PreTrainedModel,
    modeling: ModuleType,
    tokens: torch.Tensor,
    features: torch.Tensor,
    ends: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The training forward with `ends` as anchors: logits [A, B, V], and the confidence head's [A, B]."""
    anchors = torch.tensor([ends])
    with (
        mock.patch.object(
            modeling, "sample_anchor_positions", lambda **_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
        ),
        mock.patch.object(modeling, "create_dspark_attention_mask", dense_mask),
    ):
        outputs = model(tokens, features, torch.ones(tokens.shape))
    confidence = outputs.confidence_pred
    return outputs.draft_logits[0], None if confidence is None else confidence[0]


def dspark(model: PreTrainedModel, modeling: ModuleType, inputs: Inputs) -> Outputs:
    """The training forward with ENDS as anchors, and the evaluation's drafting loop."""
    ops = importlib.import_module("deepspec.eval.dspark.draft_ops")
    blocks, confidence = trained(model, modeling, inputs.sequence[:, :LENGTH], inputs.features, ENDS)
    cache, proposals, logits = LengthCache(), [], []
    for start, end in common.cycles():
        block = torch.cat([inputs.sequence[:, end : end + 1], torch.full((1, BLOCK - 1), model.mask_token_id)], dim=1)
        hidden = ops.forward_dspark_draft_block(
            model,
            draft_input_ids=block,
            position_ids=torch.arange(LENGTH + BLOCK)[None],
            past_key_values_draft=cache,
            target_hidden_states=inputs.features[:, start:end],
            start=end,
            block_size=BLOCK,
        )
        proposals.append(
            ops.build_dspark_proposal(
                model,
                draft_input_ids=block,
                block_hidden=hidden,
                block_size=BLOCK,
                temperature=0.0,
                confidence_threshold=0.0,
            )
        )
        logits.append(
            model.sample_draft_tokens(
                model.compute_logits(hidden), first_prev_token_ids=block[:, 0], hidden_states=hidden
            )[1]
        )
    return Outputs(
        blocks,
        torch.cat(logits),
        torch.cat([proposal.verify_input_ids[:, 1:] for proposal in proposals]),
        confidence,
        None if confidence is None else torch.cat([proposal.confidence_logits for proposal in proposals]),
    )


def dense_mask(
    *, anchor_positions: torch.Tensor, block_keep_mask: torch.Tensor, seq_len: int, block_size: int, device: object
) -> torch.Tensor:
    """create_dspark_attention_mask as a tensor bool [1, 1, Q, KV] in place of flex attention's block mask, which CPUs can't take."""
    del block_keep_mask, device
    owner = torch.arange(anchor_positions.shape[1]).repeat_interleave(block_size)
    context = torch.arange(seq_len)[None] < anchor_positions[0, owner][:, None]
    return torch.cat([context, owner[:, None] == owner[None]], dim=1)[None, None]


def eagle3(model: PreTrainedModel, inputs: Inputs) -> Outputs:
    """Every position's first draft in one causal pass, and the evaluation's drafting loop on a fresh cache."""
    logits = model.compute_logits(
        model(hidden_states=inputs.features, input_ids=inputs.next_tokens, position_ids=torch.arange(LENGTH)[None])
    )
    draft_logits, draft_tokens = [], []
    for end in ENDS:
        cache = DynamicCache()
        hidden = model.extend_draft_cache(
            hidden_states=inputs.features[:, :end],
            input_ids=inputs.next_tokens[:, :end],
            position_ids=torch.arange(end)[None],
            past_key_values=cache,
        )
        steps, tokens = [], []
        for position in range(end, end + DRAFTS):
            steps.append(model.compute_logits(hidden)[0, 0])
            tokens.append(steps[-1].argmax())
            hidden = model(
                hidden_states=hidden,
                input_ids=tokens[-1][None, None],
                position_ids=torch.tensor([[position]]),
                past_key_values=cache,
                use_cache=True,
            )
        draft_logits.append(torch.stack(steps))
        draft_tokens.append(torch.stack(tokens))
    return Outputs(logits, torch.stack(draft_logits), torch.stack(draft_tokens))

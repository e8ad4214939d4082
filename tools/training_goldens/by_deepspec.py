"""Training objectives of DSpark and the DFlash baseline by a checkout of deepseek-ai/DeepSpec: its models and its loss, on one rank.

Its EAGLE-3 loss is a Triton kernel for GPUs and isn't here.
"""

import contextlib
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from drafter_goldens.by_deepspec import CASES as DRAFTER_CASES
from drafter_goldens.by_deepspec import CLASSES, admit_published
from drafter_goldens.common import load_verifier
from transformers import PreTrainedModel

from training_goldens import common
from training_goldens.by_speculators import keep
from training_goldens.common import DRAFTERS


@dataclass(frozen=True)
class Case:
    """`rows` (see `common.pack`, one document each: DeepSpec doesn't pack) for a drafter of tests/goldens/drafters. `loss`: the
    coefficients and the decay in DeepSpec's training configs."""

    drafter: str
    seed: int
    rows: tuple[str, ...]
    anchors: int
    loss: dict[str, float] = field(default_factory=dict)
    length: int = 24


DSPARK = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}
DFLASH = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 1.0, "l1_loss_alpha": 0.0, "confidence_head_alpha": 0.0}
ROWS = (".....xxxxxxxx..xxxxxxxxx", "...xxxxxxxxxxx")

CASES = {
    "deepspec_dspark": Case("deepspec_dspark", 301, ROWS, 6, DSPARK),
    "deepspec_dspark_gated": Case("deepspec_dspark_gated", 302, ROWS[:1], 6, DSPARK),
    "deepspec_dspark_rnn": Case("deepspec_dspark_rnn", 303, ROWS, 5, DSPARK),
    "deepspec_dflash": Case("deepspec_dflash", 304, ROWS, 12, DFLASH),
    "deepspec_gemma4": Case("deepspec_gemma4", 305, ROWS, 5, DSPARK),
}


def make(name: str, case: Case, directory: Path, commit: str) -> None:
    """Write the case's files. `drafter_goldens.by_deepspec.unpack` comes first."""
    drafter = DRAFTER_CASES[case.drafter]
    modeling = importlib.import_module(f"deepspec.modeling.{drafter.module}.modeling")
    model = load(case.drafter, modeling)
    model.num_anchors = case.anchors
    verifier = load_verifier(DRAFTERS / drafter.verifier)
    taps = [layer + 1 for layer in model.target_layer_ids]
    packed = common.pack([(row,) for row in case.rows], case.length, taps, verifier, case.seed)
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    metrics: dict[str, float] = {}
    loss = importlib.import_module("deepspec.modeling.dspark.loss")

    def add_metric(name: str, value: torch.Tensor, *, den: object = 1.0, **_: object) -> None:
        metrics[f"{name}_sum"], metrics[f"{name}_total"] = float(value.detach()), float(den)

    with (
        keep(modeling, "sample_anchor_positions", chosen),
        mock.patch.object(modeling, "create_dspark_attention_mask", dense_mask),
        mock.patch.object(loss, "add_metric", add_metric),
        mock.patch.object(loss.dist, "get_world_size", lambda: 1),
    ):
        torch.manual_seed(case.seed)
        with torch.no_grad():
            final = verifier.model.norm(packed.last)
        outputs = model(packed.tokens, packed.taps, packed.loss_mask.float(), final)
        total = loss.compute_dspark_loss(outputs=outputs, **case.loss)
    common.gap(name, "drafts", outputs.draft_logits[outputs.eval_mask])
    anchors, valid = chosen[0]
    meta = {
        "drafter": case.drafter,
        "class": type(model).__name__,
        "attention": "sdpa",
        "verifier": drafter.verifier,
        "target_head": "the drafter's own",
        "seed": case.seed,
        "documents": [[row] for row in case.rows],
        "loss_arguments": case.loss,
        "loss": float(total.detach()),
        "metrics": common.numbers(metrics),
        "peers": {"deepseek-ai/DeepSpec": commit},
    }
    choices = {"anchors": torch.where(valid, anchors, -1)}
    common.write(directory, name, packed, choices, common.gradients(model, total), meta)


def load(drafter: str, modeling: ModuleType) -> PreTrainedModel:
    """The drafter in float32, its embedding and head frozen as by DeepSpec's trainer."""
    case = DRAFTER_CASES[drafter]
    model_class = getattr(modeling, CLASSES[case.module])
    config = model_class.config_class.from_pretrained(DRAFTERS / drafter)
    admit_published(config, case.published)
    with contextlib.chdir(DRAFTERS):
        model = model_class.from_pretrained(drafter, config=config, dtype=torch.float32, attn_implementation="sdpa")
    model.set_embedding_head_trainable(False)
    return model.train()


def dense_mask(
    *, anchor_positions: torch.Tensor, block_keep_mask: torch.Tensor, seq_len: int, block_size: int, device: object
) -> torch.Tensor:
    """create_dspark_attention_mask as a tensor bool [B, 1, Q, KV] in place of flex attention's block mask, which CPUs can't take."""
    del device
    owner = torch.arange(anchor_positions.shape[1]).repeat_interleave(block_size)
    context = torch.arange(seq_len)[None, None] < anchor_positions[:, owner, None]
    own = (owner[:, None] == owner[None]).expand(len(anchor_positions), -1, -1)
    return (torch.cat([context, own], dim=2) & block_keep_mask[:, owner, None])[:, None]

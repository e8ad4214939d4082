"""The other side of the training bench: speculators 0.9 on CPU torch, its models with their eager losses, as its trainer steps them."""

import contextlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from loguru import logger
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash_core
from speculators.models.peagle import core as peagle_core

from jaxspec.drafters.config import Method
from jaxspec.training.recipe import ObjectiveRecipe
from training_bench import case
from training_bench.case import PackedRow

LOSSES = {"dflash": "ce", "dspark": '{"ce": 0.1, "tv": 0.9}', "peagle": "kl_div", "eagle3": "kl_div"}


class Training:
    """A drafter in training. `attention`: "sdpa" or "eager"; flex has no backward on CPUs."""

    def __init__(
        self, folder: Path, method: Method, objective: ObjectiveRecipe, row: PackedRow, attention: str, threads: int
    ):
        torch.set_num_threads(threads)
        logger.remove()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._method, self._depths = method, objective.depths
        config = SpeculatorModelConfig.from_pretrained(folder / method)
        config.transformer_layer_config._attn_implementation = attention
        self._model = SpeculatorModel.from_pretrained(folder / method, config=config, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(
            self._model.named_parameters(), lr=case.OPTIMIZER.lr, weight_decay=case.OPTIMIZER.weight_decay
        )
        paired = method in ("peagle", "eagle3")
        self._row_of, self._inputs = pairs(row) if paired else (None, plain(row))
        self._arguments: dict[str, object] = {"loss_config": resolve_loss_config(LOSSES[method], "eager")}
        if method == "eagle3":
            self._arguments |= {"ttt_steps": objective.ttt_steps, "ttt_step_loss_decay": objective.step_decay}
        else:
            self._arguments["max_anchors"] = objective.anchors
        if method == "peagle":
            self._arguments |= {
                "num_depths": objective.depths,
                "down_sample_ratio": objective.down_sample_ratio,
                "down_sample_ratio_min": objective.down_sample_min,
            }
        if method == "dflash":
            self._arguments |= {"per_position_loss_weight": "dpace", "dpace_alpha": objective.alpha}
        if method == "dspark":
            self._arguments["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
            self._arguments |= {"gamma": objective.gamma, "confidence_head_alpha": objective.confidence_weight}

    @property
    def trained(self) -> int:
        """How many parameters are trained."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)

    def step(self, choices: dict[str, np.ndarray] | None = None) -> tuple[float, float]:
        """A whole step, with these random choices or its own; its loss, and the norm of its gradients."""
        with contextlib.ExitStack() as stack:
            if choices:
                stack.enter_context(self._chosen(choices))
            _, loss, _ = self._model(**self._inputs, **self._arguments)
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), case.OPTIMIZER.clip)
        self._optimizer.step()
        return float(loss.detach()), float(norm)

    def _chosen(self, choices: dict[str, np.ndarray]) -> contextlib.AbstractContextManager:
        """speculators' own draw replaced."""
        anchors = torch.from_numpy(choices["anchors"].astype(np.int64))
        if self._method != "peagle":
            chosen = (anchors.clamp(min=0), anchors >= 0)
            return mock.patch.object(dflash_core, "select_anchors", lambda *_: chosen)
        assert self._row_of is not None
        first = torch.from_numpy(self._row_of)[anchors]
        lengths = torch.from_numpy(choices["lengths"].astype(np.int64))
        rows, depths = [torch.arange(case.TOKENS)], [torch.zeros(case.TOKENS, dtype=torch.long)]
        for depth in range(1, self._depths):
            rows.append(first[lengths >= depth].sort().values)
            depths.append(torch.full_like(rows[-1], depth))
        pair = (torch.cat(rows), torch.cat(depths))
        return mock.patch.object(peagle_core, "generate_cod_sample_indices", lambda **_: pair)


def plain(row: PackedRow) -> dict[str, torch.Tensor]:
    """The inputs of a block drafter, position by position."""
    return {
        "hidden_states": torch.from_numpy(row.taps),
        "input_ids": torch.from_numpy(row.tokens.astype(np.int64)),
        "loss_mask": torch.from_numpy(row.loss_mask),
        "verifier_last_hidden_states": torch.from_numpy(row.last),
        "document_ids": torch.from_numpy(row.documents.astype(np.int64)),
        "position_ids": torch.from_numpy(row.positions.astype(np.int64)),
    }


def pairs(row: PackedRow) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Where each position's features went, int64 [T], and the inputs of EAGLE-3 and P-EAGLE: features with the token that follows,
    document by document, one pair less each; padding behind them."""
    documents = row.documents[0]
    first = np.flatnonzero(documents[1:] == documents[:-1])
    row_of = np.zeros(case.TOKENS, np.int64)
    row_of[first] = np.arange(len(first))

    def gathered(values: np.ndarray, index: np.ndarray, padding: int = 0) -> torch.Tensor:
        out = np.full_like(values, padding)
        out[:, : len(index)] = values[:, index]
        return torch.from_numpy(out.astype(np.int64) if out.dtype == np.int32 else out)

    return row_of, {
        "hidden_states": gathered(row.taps, first),
        "input_ids": gathered(row.tokens, first + 1),
        "loss_mask": gathered(row.loss_mask, first + 1),
        "verifier_last_hidden_states": gathered(row.last, first + 1),
        "document_ids": gathered(row.documents, first, -1),
        "position_ids": gathered(row.positions, first + 1),
    }

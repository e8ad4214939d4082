"""Training objectives of EAGLE-3, P-EAGLE, DFlash and DSpark by speculators 0.9: its models' forward passes with their own losses."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from drafter_goldens.by_speculators import CLASSES
from drafter_goldens.common import load_verifier
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import core as eagle3_core
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import core as peagle_core

from training_goldens import common
from training_goldens.common import DRAFTERS, Packed

CORES = {"eagle3": eagle3_core, "peagle": peagle_core, "dflash": dflash_core, "dspark": dspark_core}


@dataclass(frozen=True)
class Case:
    """A row of `documents` (see `common.pack`) for a drafter of tests/goldens/drafters. `loss`: as --loss-fn; `arguments`: of the
    model's forward."""

    drafter: str
    seed: int
    documents: tuple[str, ...]
    loss: str
    arguments: dict[str, object] = field(default_factory=dict)
    length: int = 32


# Prompts are at least as long as a block or a chain: speculators lets those run on into the next document, which counts only where the
# tokens there are supervised.
ONE = ("......xxxxxxxxxxxxxxxxxxxxxxxxxx",)
GAP = (".....xxxxxxxxx...xxxxxxxxxxxxxxx",)
TWO = (".......xxxxxxxx", "......xxxxxxx")
DSPARK_LOSS = '{"ce": 0.1, "tv": 0.9}'

CASES = {
    "eagle3": Case("eagle3_llama", 201, TWO, "kl_div", {"ttt_steps": 3, "ttt_step_loss_decay": 1.0}),
    "eagle3_norm_output": Case("eagle3_qwen3", 202, ONE, "kl_div", {"ttt_steps": 3, "ttt_step_loss_decay": 0.8}),
    "eagle3_fc_norm": Case(
        "eagle3_fc_norm", 303, GAP, '{"ce": 0.5, "lk_hybrid": 2.0}', {"ttt_steps": 3, "ttt_step_loss_decay": 0.8}
    ),
    # One step: the window of speculators' training mask stays behind in later ones, that of decoding moves with them.
    "eagle3_window": Case("eagle3_window", 204, TWO, "kl_div", {"ttt_steps": 1}),
    "peagle": Case("peagle", 205, TWO, "kl_div", {"num_depths": 4}),
    "peagle_window": Case("peagle_window", 206, GAP, "kl_div", {"num_depths": 4, "max_anchors": 15}),
    "dflash": Case("dflash", 207, TWO, "ce", {"max_anchors": 6, "per_position_loss_weight": "dpace"}),
    "dflash_sliding": Case("dflash_sliding", 218, ONE, "kl_div", {"max_anchors": 7, "gamma": 4.0}),
    "dflash_sliding_both_ways": Case("dflash_sliding_both_ways", 219, TWO, "jsd", {"max_anchors": 5, "gamma": 2.0}),
    "dflash_from_anchor": Case(
        "dflash_from_anchor",
        210,
        TWO,
        "ce",
        {"max_anchors": 20, "per_position_loss_weight": "dpace", "dpace_alpha": 0.3},
    ),
    "dflash_from_anchor_fixed": Case("dflash_from_anchor", 211, GAP, "kl_div", {"max_anchors": 6, "gamma": 4.0}),
    "dspark_vanilla": Case("dspark_vanilla", 212, TWO, DSPARK_LOSS, {"max_anchors": 6}),
    "dspark_gated": Case("dspark_gated", 213, GAP, DSPARK_LOSS, {"max_anchors": 6, "confidence_head_alpha": 0.5}),
    "dspark_rnn": Case("dspark_rnn", 214, TWO, DSPARK_LOSS, {"max_anchors": 6}),
    "dspark_rnn_sliding": Case(
        "dspark_rnn_sliding", 215, ONE, "ce", {"max_anchors": 6, "per_position_loss_weight": "dpace"}
    ),
}


@dataclass(frozen=True)
class Step:
    """What one call of compute_metrics got: logits and targets [rows, Vd], and which rows count, bool [rows]."""

    logits: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Run:
    """A forward pass: the calls of compute_metrics, the random choices (None without any), the loss and the metrics."""

    steps: list[Step]
    chosen: tuple[torch.Tensor, torch.Tensor] | None
    loss: torch.Tensor
    metrics: dict[str, object]


def make(name: str, case: Case, directory: Path) -> None:
    """Write the case's files."""
    model = load(case.drafter)
    taps, verifier = model.target_layer_ids, load_verifier(DRAFTERS / "verifier")
    packed = common.pack((case.documents,), case.length, taps, verifier, case.seed)
    before = run(model, case, packed)
    index, drafts = drafted(model, before, packed)
    packed = common.agree(packed, model.verifier_lm_head.weight, index, drafts, case.seed)
    made = run(model, case, packed)
    for step in made.steps:
        common.gap(name, "drafts", step.logits[step.counts])
        common.gap(name, "targets", step.targets[step.counts])
    meta = {
        "drafter": case.drafter,
        "class": type(model).__name__,
        "attention": "sdpa",
        "verifier": "verifier",
        "seed": case.seed,
        "documents": [list(case.documents)],
        "loss_fn": case.loss,
        "arguments": case.arguments,
        "loss": float(made.loss.detach()),
        "metrics": common.numbers(made.metrics),
        "peers": {"speculators": importlib.metadata.version("speculators")},
    }
    choices = stored_choices(name, model, made, packed)
    common.write(directory, name, packed, choices, common.gradients(model, made.loss), meta)


def run(model: SpeculatorModel, case: Case, packed: Packed) -> Run:
    """The training forward. The same random choices every time."""
    kind = model.config.speculators_model_type
    arguments = case.arguments | {"loss_config": resolve_loss_config(case.loss, "eager")}
    if kind == "dspark":
        arguments["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    inputs = pairs(packed)[0] if paired(model) else plain(packed)
    steps: list[Step] = []
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(watch(CORES[kind], steps))
        if kind == "peagle":
            stack.enter_context(keep(peagle_core, "generate_cod_sample_indices", chosen))
        elif not paired(model):
            stack.enter_context(keep(dflash_core, "select_anchors", chosen))
        torch.manual_seed(case.seed)
        _, loss, metrics = model(**inputs, **arguments)
    return Run(steps, chosen[0] if chosen else None, loss, metrics)


def paired(model: SpeculatorModel) -> bool:
    """Whether its rows are pairs of features and the token that follows."""
    return model.config.speculators_model_type in ("eagle3", "peagle")


def drafted(model: SpeculatorModel, made: Run, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Chains of drafts [C, K]: the index in `packed` of the position whose verifier distribution each is compared with, and the most
    likely draft id; -1 where there is none."""
    drafts = [torch.where(step.counts, step.logits.argmax(-1), -1) for step in made.steps]
    row = pairs(packed)[1]
    if model.config.speculators_model_type == "eagle3":
        return row[:, None] + 1 + torch.arange(len(drafts)), torch.stack(drafts, dim=1)
    assert made.chosen is not None
    if model.config.speculators_model_type == "peagle":
        anchor, depth = made.chosen
        by_chain = torch.full((packed.tokens.shape[1], int(depth.max()) + 1), -1)
        by_chain[anchor, depth] = drafts[0]
        return row[:, None] + 1 + torch.arange(by_chain.shape[1]), by_chain
    slots = torch.arange(model.block_size) - (0 if model.config.sample_from_anchor else 1)
    return made.chosen[0][:, None] + slots, drafts[0].reshape(-1, model.block_size)


def stored_choices(name: str, model: SpeculatorModel, made: Run, packed: Packed) -> dict[str, torch.Tensor]:
    """Block drafters: anchors [1, A], -1 for none. P-EAGLE: see `chains`."""
    if made.chosen is None:
        return {}
    if paired(model):
        return chains(name, packed, pairs(packed)[1], *made.chosen)
    anchors, valid = made.chosen
    return {"anchors": torch.where(valid, anchors, -1)[None]}


def chains(
    name: str, packed: Packed, row: torch.Tensor, anchor: torch.Tensor, depth: torch.Tensor
) -> dict[str, torch.Tensor]:
    """speculators' pairs at depth 1 and deeper: [pairs] indices in `packed` of their anchors' features, and depths."""
    anchor, depth = row[anchor[depth > 0]], depth[depth > 0]
    if not (packed.documents[0][anchor + depth + 1] == packed.documents[0][anchor]).all():
        raise RuntimeError(f"{name}: a chain crosses documents; let prompts be longer")
    return {"anchor": anchor, "depth": depth}


def load(drafter: str) -> SpeculatorModel:
    """The drafter in float32, frozen where speculators' trainer freezes it."""
    with contextlib.chdir(DRAFTERS):
        config_class = next(c for c, m in CLASSES.values() if m.__name__ == _class_name(drafter))
        config = config_class.from_pretrained(drafter)
        config.transformer_layer_config._attn_implementation = "sdpa"
        return SpeculatorModel.from_pretrained(drafter, config=config, dtype=torch.float32).train()


def _class_name(drafter: str) -> str:
    return common.read_json(DRAFTERS / drafter / "config.json")["architectures"][0]


def plain(packed: Packed) -> dict[str, torch.Tensor]:
    """The model's inputs, position by position."""
    return {
        "hidden_states": packed.taps,
        "input_ids": packed.tokens,
        "loss_mask": packed.loss_mask,
        "verifier_last_hidden_states": packed.last,
        "document_ids": packed.documents,
        "position_ids": packed.positions,
    }


def pairs(packed: Packed) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs as speculators pairs features with the token that follows, document by document, and for each of their rows
    the index in `packed` of its features."""
    rows, parts = [], []
    for number in range(int(packed.documents.max()) + 1):
        at = torch.nonzero(packed.documents[0] == number)[:, 0]
        parts.append(
            shift_batch(
                {
                    "input_ids": packed.tokens[0, at],
                    "hidden_states": packed.taps[0, at],
                    "verifier_last_hidden_states": packed.last[0, at],
                    "loss_mask": packed.loss_mask[0, at],
                    "lengths": torch.tensor([len(at)]),
                    "position_ids": packed.positions[0, at],
                }
            )
        )
        rows.append(at[:-1])
    row = torch.cat(rows)
    padding = packed.tokens.shape[1] - len(row)

    def joined(name: str) -> torch.Tensor:
        value = torch.cat([part[name] for part in parts])
        return torch.cat([value, value.new_zeros(padding, *value.shape[1:])])[None]

    inputs = {name: joined(name) for name in parts[0] if name != "lengths"}
    documents = [torch.full((len(at),), number) for number, at in enumerate(rows)]
    inputs["document_ids"] = torch.cat([*documents, torch.full((padding,), -1)])[None]
    last = packed.tokens.shape[1] - 1
    return inputs, torch.cat([row, torch.full((padding,), last)])


def watch(core: object, steps: list[Step]) -> contextlib.AbstractContextManager:
    """Keeps what `core`'s compute_metrics gets."""
    compute = core.compute_metrics

    def wrapped(*args: object, **kwargs: object) -> object:
        logits, targets = args[:2] if args else (kwargs["logits"], kwargs["targets"])
        counts, shift = counted(core, args, kwargs)
        steps.append(Step(logits[0].detach(), targets[0].roll(-shift, dims=0), counts[0]))
        return compute(*args, **kwargs)

    return mock.patch.object(core, "compute_metrics", wrapped)


def counted(core: object, args: tuple, kwargs: dict) -> tuple[torch.Tensor, int]:
    """bool [1, rows]: which rows of the logits count; and how far ahead their targets are."""
    if core is peagle_core:
        return kwargs["loss_mask"][:, kwargs["anchor_pos"] + kwargs["depth"]].bool(), 0
    if core is eagle3_core:
        step = args[4]
        shifted = torch.zeros_like(args[2])
        shifted[:, : shifted.shape[1] - step] = args[2][:, step:]
        return shifted.bool(), step
    return args[3 if core is dspark_core else 2].bool(), 0


def keep(module: object, name: str, chosen: list) -> contextlib.AbstractContextManager:
    """Keeps what the function `name` of the module returns."""
    choose: Callable = getattr(module, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        chosen.append(choose(*args, **kwargs))
        return chosen[-1]

    return mock.patch.object(module, name, wrapped)

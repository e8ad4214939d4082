"""The fixtures of tests/goldens/training, loaded: drafter, batch, features, the original's choices, and our objective as it was run."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jitted import QUICK_COMPILE
from safetensors.numpy import load_file

from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.drafters.table import table
from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.checkpoint.load import LoadedVerifier, load_verifier
from jaxspec.training.anchors import Chains
from jaxspec.training.batch import Batch, Features
from jaxspec.training.objectives.base import Metrics, Objective, terms_of
from jaxspec.training.objectives.block import BlockObjective
from jaxspec.training.objectives.eagle3 import Eagle3Objective
from jaxspec.training.objectives.peagle import PEagleObjective
from jaxspec.training.recipe import VerifierRecipe
from jaxspec.training.setup import open_side
from jaxspec.verifiers.names import expand

GOLDENS = Path(__file__).parent / "goldens" / "training"
DRAFTERS = GOLDENS.parent / "drafters"
CASES = sorted(path.stem for path in GOLDENS.glob("*.json"))
LOSS_NAMES = {"kl_div": "kl", "rkl": "reverse_kl", "jsd": "js"}  # speculators' names where ours differ


@cache
def verifier(name: str) -> LoadedVerifier:
    return load_verifier(DRAFTERS / name, dtype=jnp.float32)


def read_meta(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"{name}.json").read_text())


def mixture(loss_fn: str) -> dict[str, float]:
    """speculators' --loss-fn under our names."""
    parsed = json.loads(loss_fn) if loss_fn.startswith("{") else {loss_fn: 1.0}
    return {LOSS_NAMES.get(name, name): weight for name, weight in parsed.items()}


class TrainingCase:
    """A fixture. `gradients`: the original's, by their names in checkpoints."""

    def __init__(self, name: str):
        self.meta = read_meta(name)
        tensors = load_file(GOLDENS / f"{name}.safetensors")
        self.batch = Batch(*(jnp.asarray(tensors[x]) for x in ("tokens", "documents", "positions", "loss_mask")))
        self.features = Features(*(jnp.asarray(tensors[x], jnp.float32) for x in ("taps", "last")))
        self.gradients = {
            key.removeprefix("gradient."): value for key, value in tensors.items() if key.startswith("gradient.")
        }
        lender = verifier(self.meta["verifier"])
        self.drafter = load_drafter(DRAFTERS / self.meta["drafter"], verifier=lender, dtype=jnp.float32).module
        self.config = self.drafter.config
        ids = self.drafter.vocabulary.target_ids
        side = open_side(VerifierRecipe(str(DRAFTERS / self.meta["verifier"])), lambda line: None)
        made = side.target(None if ids is None else np.asarray(ids[...]), jnp.dtype("float32"))
        self.target = jax.tree.map(jnp.asarray, made)
        if "target_head" in self.meta:
            # DeepSpec's drafter has the one head, a frozen copy of the verifier's; the fixture's is random.
            self.target = replace(self.target, head=self.drafter.vocabulary.head.weight[...])
        self.objective, self.choices = self._objective(tensors)

    def _objective(self, tensors: dict[str, np.ndarray]) -> tuple[Objective, Any]:
        if "loss_arguments" in self.meta:
            return self._deepspec(), jnp.asarray(tensors["anchors"])
        arguments, losses, block = self.meta["arguments"], mixture(self.meta["loss_fn"]), self.config.block
        if self.config.method == "eagle3":
            decay = arguments.get("ttt_step_loss_decay", 1.0)
            return Eagle3Objective(arguments["ttt_steps"], decay, losses), None
        if self.config.method == "peagle":
            seeds = arguments.get("max_anchors", int(self.batch.loss_mask.sum()))
            chains = chains_of(tensors["anchor"], tensors["depth"], seeds)
            return PEagleObjective(arguments["num_depths"], seeds=seeds, mixture=losses), chains
        assert block is not None
        objective = BlockObjective(
            block.size,
            block.sample_from_anchor,
            mixture=losses,
            decay="dpace" if arguments.get("per_position_loss_weight") == "dpace" else "fixed",
            gamma=arguments.get("gamma", 4.0),
            alpha=arguments.get("dpace_alpha", 0.5),
            confidence=0.0 if block.confidence is None else arguments.get("confidence_head_alpha", 1.0),
        )
        return objective, jnp.asarray(tensors["anchors"])

    def _deepspec(self) -> BlockObjective:
        arguments, block = self.meta["loss_arguments"], self.config.block
        assert block is not None
        # |p - q| summed over the vocabulary is twice the total variation.
        losses = {"ce": arguments["ce_loss_alpha"], "tv": 2 * arguments["l1_loss_alpha"]}
        return BlockObjective(
            block.size,
            block.sample_from_anchor,
            mixture={name: weight for name, weight in losses.items() if weight},
            decay="fixed",
            gamma=arguments["loss_decay_gamma"],
            labels="data",
            normalise="weights",
            confidence=arguments["confidence_head_alpha"],
        )

    def run(self) -> tuple[np.ndarray, Metrics, dict[str, np.ndarray]]:
        """Each term of the loss, the metrics, and the gradients by their names in checkpoints."""
        graphdef, state, rest = nnx.split(self.drafter, nnx.Param, ...)

        def loss(state: nnx.State, batch: Batch, features: Features, choices: Any) -> tuple[jax.Array, Any]:
            weights = self.objective.weights(batch, choices)
            drafter = nnx.merge(graphdef, state, rest)
            sums, metrics = self.objective.sums(drafter, self.target, batch, features, choices)
            return jnp.sum(terms_of(sums, weights)), (sums / weights, metrics)

        run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK_COMPILE)
        gradients, (terms, metrics) = run(state, self.batch, self.features, self.choices)
        flat = {path: np.asarray(leaf[...]) for path, leaf in flat_parameters(gradients).items()}
        links = expand(table(self.config), {path: value.shape for path, value in flat.items()}, "")
        return np.asarray(terms), metrics, {link.name: flat[link.path].reshape(link.shape) for link in links}


def chains_of(anchor: np.ndarray, depth: np.ndarray, seeds: int) -> Chains:
    """speculators' pairs at depths 1 and more as chains [1, seeds], those that aren't there behind."""
    lengths = {int(a): int(depth[anchor == a].max()) for a in anchor}
    assert len(anchor) == sum(lengths.values()), "chains are nested"
    ordered = sorted(lengths, key=lambda a: -lengths[a])
    pad = [0] * (seeds - len(ordered))
    rows = [ordered + pad, [lengths[a] for a in ordered] + pad]
    return Chains(*(jnp.asarray([row], jnp.int32) for row in rows))

"""Our side of the training bench: the trainer's own program."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.orbax import name_of
from jaxspec.drafters.config import Method
from jaxspec.training.anchors import Chains
from jaxspec.training.batch import Batch, Features
from jaxspec.training.initial import drafter_config, initial_drafter, open_start
from jaxspec.training.objective_of import plan_objective
from jaxspec.training.placement import make_mesh
from jaxspec.training.programs import Programs
from jaxspec.training.recipe import ObjectiveRecipe, VerifierRecipe
from jaxspec.training.setup import open_side
from training_bench import case
from training_bench.case import PackedRow

FLOAT32 = jnp.dtype(jnp.float32)


class Training:
    """A drafter in training."""

    def __init__(self, folder: Path, method: Method, objective: ObjectiveRecipe, row: PackedRow):
        side = open_side(VerifierRecipe(str(folder / case.VERIFIER)), lambda line: None)
        recipe = case.drafter_recipe(method, folder)
        start = open_start(recipe, side.lend)
        assert start is not None
        config = drafter_config(recipe, side.config, mask_token=None, start=start.config)
        drafter = initial_drafter(recipe, config, side.lend, start.target_ids, start, case.SEED)
        plan = plan_objective(objective, config, case.TOKENS)
        self._objective = plan.objective
        self._programs = Programs(
            config,
            sorted(drafter.trainable, key=name_of),
            plan,
            case.OPTIMIZER,
            steps=case.OPTIMIZER.steps or 1,
            seed=case.SEED,
            dtype=FLOAT32,
            mesh=make_mesh(None),
            verifier=None,
        )
        values = {name_of(path): np.array(value) for path, value in drafter.values.items()}
        trained = {name_of(path) for path in drafter.trainable}
        self._state = self._programs.state({name: values[name] for name in trained})
        untrained = {name: value for name, value in values.items() if name not in trained}
        self._frozen = self._programs.frozen(untrained, side.target(start.target_ids, FLOAT32), None)

        def micro_batches(x: np.ndarray) -> jax.Array:
            return jnp.asarray(x[None])

        batch = Batch(*map(micro_batches, (row.tokens, row.documents, row.positions, row.loss_mask)))
        self._given = (batch, Features(micro_batches(row.taps), micro_batches(row.last)))
        jax.block_until_ready((self._state, self._frozen, self._given))
        self._taken = 0

    @property
    def trained(self) -> int:
        """How many parameters are trained."""
        return sum(value.size for value in self._state.params.values())

    def compile(self) -> int:
        """Compiles the step, as the trainer does before the first one; bytes of its temporaries."""
        analysis = self._programs.compile_step(self._state, self._frozen, *self._given).memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    def step(self) -> tuple[float, float]:
        """A whole step; its loss, and the norm of its gradients."""
        self._state, report = self._programs.step(self._state, self._frozen, *self._given)
        jax.block_until_ready((self._state, report))
        self._taken += 1
        return float(report.loss), float(report.gradient_norm)

    def choices(self) -> dict[str, np.ndarray]:
        """The random choices of the next step: {} without any."""
        chosen = self._chosen()
        if chosen is None:
            return {}
        if isinstance(chosen, Chains):
            return {"anchors": np.asarray(chosen.anchors[0]), "lengths": np.asarray(chosen.lengths[0])}
        return {"anchors": np.asarray(chosen[0])}

    @property
    def positions(self) -> int:
        """Positions that the next step's loss averages over, of every pass."""
        weights = self._objective.weights(self._batch, self._chosen())
        named = zip(self._objective.terms, weights, strict=True)
        return int(sum(weight for name, weight in named if name != "confidence"))  # which is on the same ones

    @property
    def _batch(self) -> Batch:
        return jax.tree.map(lambda x: x[0], self._given[0])

    def _chosen(self) -> Any:
        """As `train_step` chooses for its one micro-batch."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(case.SEED), self._taken), 0)
        return self._objective.choose(key, self._batch)

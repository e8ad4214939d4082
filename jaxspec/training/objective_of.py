"""From a recipe's objective section to the objective of the drafter's method."""

from dataclasses import dataclass

from jaxspec.drafters.config import BlockConfig, DrafterConfig
from jaxspec.errors import InputError
from jaxspec.training.objectives.base import Objective
from jaxspec.training.objectives.block import BlockObjective
from jaxspec.training.objectives.eagle3 import Eagle3Objective
from jaxspec.training.objectives.peagle import PEagleObjective
from jaxspec.training.recipe import ObjectiveRecipe


@dataclass(frozen=True)
class Plan:
    """An objective; `drafts` is the K that validation asks for, `walked` how many anchors a row it looks at in one call."""

    objective: Objective
    drafts: int
    walked: int


def plan_objective(recipe: ObjectiveRecipe, config: DrafterConfig, length: int) -> Plan:
    """The objective of a drafter over rows of `length` tokens. Raises InputError for settings that its method has no use for."""
    mixture = None if recipe.losses is None else {str(name): weight for name, weight in recipe.losses.items()}
    anchors = min(recipe.anchors, length)
    match config.method:
        case "eagle3":
            chunks = (recipe.attention_chunk, recipe.logits_chunk)
            made = Eagle3Objective(recipe.ttt_steps, recipe.step_decay, mixture, *chunks)
            return Plan(made, recipe.ttt_steps, length)  # it makes every row's drafts anyway
        case "peagle":
            return Plan(
                PEagleObjective(
                    recipe.depths,
                    recipe.down_sample_ratio,
                    recipe.down_sample_min,
                    anchors,
                    mixture,
                    recipe.attention_chunk,
                    recipe.logits_chunk,
                ),
                recipe.depths,
                anchors,
            )
        case "dflash" | "dspark":
            assert config.block is not None
            block = config.block
            spark = config.method == "dspark"
            decay = recipe.decay or ("fixed" if spark else "dpace")
            return Plan(
                BlockObjective(
                    size=block.size,
                    sample_from_anchor=block.sample_from_anchor,
                    anchors=anchors,
                    mixture=mixture or ({"ce": 0.1, "tv": 0.9} if spark else {"ce": 1.0}),
                    decay=decay,
                    gamma=recipe.gamma,
                    alpha=recipe.alpha,
                    labels=recipe.labels,
                    # DeepSpec, whose labels are the data's and whose decay is fixed, divides by the sum of the slots' weights.
                    normalise="weights" if recipe.labels == "data" and decay == "fixed" else "slots",
                    confidence=_confidence(recipe, block),
                    chunk=recipe.attention_chunk,
                    scored=recipe.logits_chunk,
                ),
                block.max_drafts,
                anchors,
            )


def _confidence(recipe: ObjectiveRecipe, block: BlockConfig) -> float:
    return recipe.confidence_weight if block.confidence is not None else 0.0


def check_objective(recipe: ObjectiveRecipe, config: DrafterConfig) -> None:
    """Raises InputError for settings that the method's objective would pass over."""
    if config.block is None and recipe.labels != "verifier":
        raise InputError(
            f"objective.labels is {recipe.labels}: {config.method} learns from the verifier; that goes with dflash and dspark"
        )
    if config.block is None and recipe.decay is not None:
        raise InputError(f"objective.decay goes with dflash and dspark, not with {config.method}")

"""From a recipe to what a run works with: the verifier's side, the documents, the drafter, the objective."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.config_json import to_json
from jaxspec.checkpoint.drafters.content import Lender, lender
from jaxspec.checkpoint.drafters.load import HEAD_PATH, OpenedDrafter
from jaxspec.checkpoint.load import OpenedVerifier, open_verifier
from jaxspec.checkpoint.orbax import name_of
from jaxspec.checkpoint.safetensors import read_json
from jaxspec.config import VerifierConfig
from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec.training.features import FeatureSource, fingerprint
from jaxspec.training.files import VOCABULARY, begun
from jaxspec.training.initial import InitialDrafter, drafter_config, initial_drafter, open_start
from jaxspec.training.objective_of import Plan, check_objective, plan_objective
from jaxspec.training.objectives.base import Target
from jaxspec.training.recipe import DataRecipe, OptimizerRecipe, Recipe, VerifierRecipe
from jaxspec.training.samples import Sample, hold_out, load_samples
from jaxspec.training.vocabulary import count_texts, count_tokens, draft_vocabulary, ending_ids, load_counts
from jaxspec.verifiers.hf import architectures

Say = Callable[[str], None]
"""Takes a line that says what is being done or was found."""

DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class VerifierSide:
    """The verifier without its layers in memory.

    Fields:
        path: directory or file.
        opened, lend: its checkpoint, and embedding and head out of it.
        tokenizer: None without one.
        fingerprint: tells it from others.
    """

    path: Path
    opened: OpenedVerifier
    lend: Lender
    tokenizer: Tokenizer | None
    fingerprint: str

    @property
    def config(self) -> VerifierConfig:
        """What it is."""
        return self.opened.config

    def target(self, target_ids: np.ndarray | None, dtype: jnp.dtype) -> Target:
        """Its last step over the draft vocabulary int32 [Vd] (None: the whole one), in `dtype`; numpy arrays."""
        config, head = self.config, self.lend.read(HEAD_PATH)
        draft_ids: Any = None
        if target_ids is not None:
            head = head[target_ids]
            ids = np.full(config.vocab_size, -1, np.int32)
            ids[target_ids] = np.arange(len(target_ids), dtype=np.int32)
            draft_ids = ids
        norm = self.opened.read(("norm", "weight"))
        return Target(
            norm.astype(dtype),  # pyright: ignore[reportArgumentType]  # on the host still
            head.astype(dtype),  # pyright: ignore[reportArgumentType]
            draft_ids,
            config.norm_eps,
            config.norm_offset,
            config.logit_softcap,
        )


@dataclass(frozen=True)
class Documents:
    """What the drafter learns from and what it is judged by."""

    train: list[Sample]
    validation: list[Sample]

    @property
    def all(self) -> list[Sample]:
        """Both."""
        return [*self.train, *self.validation]


def digest_of(samples: Sequence[Sample]) -> str:
    """Tells these documents, in this order, from others."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(np.int64(len(sample.tokens)).tobytes())
        digest.update(sample.tokens.tobytes())
        digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Setup:
    """All that a run works with."""

    recipe: Recipe
    verifier: VerifierSide
    documents: Documents
    drafter: InitialDrafter
    target_ids: np.ndarray | None
    plan: Plan
    dtype: jnp.dtype

    @property
    def feature_source(self) -> FeatureSource:
        """What features on disk must have been made with."""
        return feature_source(self.recipe.data, self.verifier, self.drafter.config.taps)

    def identity(self) -> dict[str, Any]:
        """What makes a run's directory this run's."""
        ids = b"" if self.target_ids is None else self.target_ids.tobytes()
        return {
            "drafter": to_json(self.drafter.config),
            "draft vocabulary": hashlib.blake2b(ids, digest_size=16).hexdigest(),
            "trained parameters": sorted(name_of(path) for path in self.drafter.trainable),
            "verifier": self.verifier.fingerprint,
            "optimizer": self.recipe.optimizer.name,
        }


def feature_source(recipe: DataRecipe, verifier: VerifierSide, taps: Sequence[int]) -> FeatureSource:
    """What features of these taps are made with."""
    return FeatureSource(verifier.fingerprint, tuple(taps), verifier.config.width, recipe.features_dtype)


def verifier_path(recipe: VerifierRecipe, say: Say) -> str:
    """Where a recipe's verifier is; the demo model is fetched if it is not there yet."""
    if recipe.model != "demo":
        return recipe.model
    from jaxspec import demo

    return str(demo.ensure(report=say))


def open_side(recipe: VerifierRecipe, say: Say) -> VerifierSide:
    """The verifier of a recipe."""
    opened = open_verifier(verifier_path(recipe, say))
    name = recipe.name or (DEMO_HUB_ID if recipe.model == "demo" else recipe.model)
    config_file = opened.path / "config.json"
    given = read_json(config_file) if config_file.is_file() else opened.hf_config
    lend = lender(opened, name, architectures(given))
    return VerifierSide(opened.path, opened, lend, load_tokenizer(opened.tokenizer_source), fingerprint(opened))


def load_documents(recipe: DataRecipe, verifier: VerifierSide, seed: int, say: Say) -> Documents:
    """The samples of the recipe's sources; says what became of the lines."""

    def load(sources: Sequence[str], what: str) -> list[Sample]:
        samples, counts = load_samples(
            sources,
            verifier.tokenizer,
            vocab_size=verifier.config.vocab_size,
            eos_ids=verifier.opened.eos_ids,
            max_tokens=recipe.max_tokens,
            too_long=recipe.too_long,
            min_supervised=recipe.min_answer or 1,
            thinking=recipe.thinking,
            limit=recipe.limit,
        )
        say(f"{what}: {counts}")
        return samples

    train = load(recipe.train, "training documents")
    if recipe.validation:
        return Documents(train, load(recipe.validation, "held-out documents"))
    if not recipe.validation_share:
        return Documents(train, [])
    train, held_out = hold_out(train, recipe.validation_share, seed)
    say(f"held out: {len(held_out)} of {len(train) + len(held_out)} documents")
    return Documents(train, held_out)


def set_up(recipe: Recipe, say: Say, *, fresh: bool = False) -> Setup:
    """Reads, checks and builds everything but the training programs.

    fresh: nothing is taken from an earlier run in the recipe's directory. Raises InputError for whatever does not fit.
    """
    verifier = open_side(recipe.verifier, say)
    start = open_start(recipe.drafter, verifier.lend)
    config = _config(recipe, verifier, start)
    check_objective(recipe.objective, config)
    documents = load_documents(recipe.data, verifier, recipe.run.seed, say)
    target_ids = _vocabulary(recipe, verifier, config.draft_vocab_size, documents, start, fresh, say)
    drafter = initial_drafter(recipe.drafter, config, verifier.lend, target_ids, start, recipe.run.seed)
    for note in drafter.notes:
        say(note)
    plan = plan_objective(recipe.objective, config, recipe.data.length)
    _check_lengths(config.block.size if config.block is not None else 1, documents)
    return Setup(recipe, verifier, documents, drafter, target_ids, plan, compute_dtype(recipe.optimizer))


def compute_dtype(recipe: OptimizerRecipe) -> jnp.dtype:
    """What steps compute in."""
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(recipe.compute or default)


def taps_of(recipe: Recipe, verifier: VerifierSide) -> tuple[int, ...]:
    """The drafter's taps, without building it."""
    return _config(recipe, verifier, open_start(recipe.drafter, verifier.lend)).taps


def _config(recipe: Recipe, verifier: VerifierSide, start: OpenedDrafter | None) -> Any:
    vocab_size = verifier.config.vocab_size
    mask = None if verifier.tokenizer is None else verifier.tokenizer.mask_id(vocab_size)
    drafts = {"eagle3": recipe.objective.ttt_steps, "peagle": recipe.objective.depths}.get(recipe.drafter.method)
    return drafter_config(
        recipe.drafter,
        verifier.config,
        mask_token=mask,
        drafts=drafts,
        start=None if start is None else start.config,
    )


def _vocabulary(
    recipe: Recipe,
    verifier: VerifierSide,
    size: int,
    documents: Documents,
    start: OpenedDrafter | None,
    fresh: bool,
    say: Say,
) -> np.ndarray | None:
    """Verifier ids int32 [Vd] of the draft vocabulary: the checkpoint's, the run's own from before, or the most frequent; None: all."""
    vocab_size = verifier.config.vocab_size
    if size == vocab_size:
        return None
    if start is not None and start.target_ids is not None:
        return start.target_ids
    output = Path(recipe.run.output).expanduser()
    if begun(output) and (output / VOCABULARY).is_file() and not fresh:
        ids = _kept_vocabulary(output / VOCABULARY, size, vocab_size)
        say(f"draft vocabulary: the {size} of {vocab_size} tokens that the run in {output} was begun with")
        return ids
    answers = count_tokens(documents.train, vocab_size)
    counts = _counts(recipe.data, verifier, answers)
    ids = draft_vocabulary(counts, size, ending_ids(documents.train, verifier.opened.eos_ids))
    coverage = answers[ids].sum() / answers.sum()
    say(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of the answers' tokens")
    return ids


def _kept_vocabulary(file: Path, size: int, vocab_size: int) -> np.ndarray:
    """The draft vocabulary of a run that was begun."""
    anew = "name another directory, or begin anew with --fresh"
    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file}: cannot be read: {error}; {anew}") from error
    if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids) or not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InputError(f"{file}: holds no draft vocabulary of a verifier of {vocab_size} tokens; {anew}")
    if len(ids) != size:
        raise InputError(f"drafter.draft_vocab_size is {size}, and the run in {file.parent} has {len(ids)}; {anew}")
    return ids


def _counts(recipe: DataRecipe, verifier: VerifierSide, answers: np.ndarray) -> np.ndarray:
    """Token counts int64 [V] for the draft vocabulary. answers: those of the training documents' answers."""
    vocab_size = len(answers)
    if recipe.token_counts is not None:
        return load_counts(Path(recipe.token_counts).expanduser(), vocab_size)
    counts = recipe.vocabulary.answers * answers
    for source, weight in recipe.vocabulary.texts.items():
        if verifier.tokenizer is None:
            raise InputError(f"data.vocabulary.texts {source}: the model has no tokenizer to count text with")
        counts = counts + weight * count_texts(source, verifier.tokenizer, vocab_size)
    return counts


def keep_vocabulary(output: Path, target_ids: np.ndarray | None) -> None:
    """Keeps the draft vocabulary in the run's directory: a resumed run has the same one even if its data has grown."""
    file = output / VOCABULARY
    if target_ids is not None and not begun(output):
        work = file.with_name(".vocabulary.part.npy")
        np.save(work, target_ids)
        work.rename(file)


def _check_lengths(block: int, documents: Documents) -> None:
    longest = max(int(sample.loss_mask.sum()) for sample in documents.train)
    if longest < block:
        raise InputError(
            f"drafter.block_size is {block}, and no answer has as many tokens (the longest: {longest}); a smaller "
            "block, or longer answers"
        )


def describe(setup: Setup) -> str:
    """One line: the drafter and its size."""
    values, trainable = setup.drafter.values, setup.drafter.trainable
    trained = sum(int(np.prod(values[path].shape)) for path in trainable)
    config = setup.drafter.config
    return (
        f"{config.method}: {len(config.layers)} layers, taps {list(config.taps)}, {trained / 1e6:.2f} M trained parameters, "
        f"vocabulary {config.draft_vocab_size}"
    )

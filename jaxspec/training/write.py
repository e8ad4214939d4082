"""What is written before training: the verifier's answers, the documents' features."""

from pathlib import Path

import jax

from jaxspec.checkpoint.load import open_verifier
from jaxspec.errors import InputError
from jaxspec.sharding import by_rows, rows
from jaxspec.training.features import fingerprint, write_features
from jaxspec.training.online import VerifierParts, load_leaves, verifier_dtype
from jaxspec.training.placement import check_rows, make_mesh
from jaxspec.training.recipe import Recipe
from jaxspec.training.report import Progress
from jaxspec.training.setup import Say, feature_source, load_documents, open_side, taps_of, verifier_path


def write_all_features(recipe: Recipe, say: Say) -> None:
    """Adds the features of the recipe's documents to `data.features`. Raises InputError for whatever does not fit."""
    data = recipe.data
    if data.features is None:
        raise InputError("--write-features: data.features names no directory")
    mesh = make_mesh(recipe.mesh)
    check_rows(data, mesh)
    side = open_side(recipe.verifier, say)
    documents = load_documents(data, side, recipe.run.seed, say)
    taps = taps_of(recipe, side)
    dtype = verifier_dtype(side, recipe.verifier.dtype)
    leaves = load_leaves(side, dtype, mesh)
    compute = jax.jit(by_rows(VerifierParts(side.config, dtype, taps).features, mesh))
    source = feature_source(data, side, taps)
    progress = Progress.counting()
    number = write_features(
        documents.all,
        Path(data.features).expanduser(),
        source,
        lambda batch: compute(leaves, jax.device_put(batch, rows(mesh))),
        rows=data.rows,
        length=data.length,
        progress=progress.count,
    )
    progress.close()
    say(f"{data.features}: features of {number} documents written, {len(documents.all)} asked for")


def write_all_answers(recipe: Recipe, say: Say) -> None:
    """Answers the recipe's questions into `data.answers.output`. Raises InputError for whatever does not fit."""
    from jaxspec.decoding.engine import Engine
    from jaxspec.training.answers import read_questions, write_answers

    asked = recipe.data.answers
    if asked is None or not recipe.data.questions:
        raise InputError("--write-answers: data.questions and data.answers.output are wanted")
    questions, counts = read_questions(
        recipe.data.questions, chat=asked.chat, system=asked.system, limit=recipe.data.limit
    )
    mesh = make_mesh(recipe.mesh)
    path = verifier_path(recipe.verifier, say)
    engine = Engine.from_pretrained(
        path, dtype=recipe.verifier.dtype, mesh=mesh if mesh.size > 1 else None, max_batch_size=asked.rows
    )
    progress = Progress.counting()
    counts = write_answers(
        engine,
        questions,
        Path(asked.output).expanduser(),
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        rows=asked.rows,
        max_tokens=recipe.data.max_tokens,
        thinking=recipe.data.thinking,
        verifier=fingerprint(open_verifier(path)),
        counts=counts,
        progress=lambda now: progress.count(now.before + now.answered, now.questions, "answers"),
    )
    progress.close()
    say(f"{asked.output}: {counts}")

"""Recipes: what is read, what is refused, and that every refusal is one line that names the field."""

from pathlib import Path

import pytest

from jaxspec.errors import InputError
from jaxspec.training.recipe import MarkovRecipe, Recipe, read_recipe

SMALLEST = """
drafter: {method: dspark}
data: {train: [a.jsonl]}
optimizer: {steps: 10}
run: {output: out}
"""


def read(tmp_path: Path, text: str = SMALLEST, *overrides: str) -> Recipe:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return read_recipe(file, overrides)


def refusal(tmp_path: Path, text: str = SMALLEST, *overrides: str) -> str:
    with pytest.raises(InputError) as refused:
        read(tmp_path, text, *overrides)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_the_smallest_recipe_has_defaults(tmp_path: Path):
    made = read(tmp_path)
    assert made.drafter.method == "dspark"
    assert made.data.train == ("a.jsonl",)
    assert made.verifier.model == "demo"
    assert made.optimizer.clip == 1.0
    assert made.mesh is None


def test_overrides_are_typed_by_their_field(tmp_path: Path):
    made = read(
        tmp_path,
        SMALLEST,
        "optimizer.lr=1e-3",
        "optimizer.clip=null",
        "drafter.taps=[1, 5]",
        "drafter.markov.rank=8",
        "data.features=runs/1",
        "data.limit=3",
        "run.export.format=orbax",
        "objective.losses={ce: 1, tv: 0.5}",
        "mesh.data=4",
    )
    assert made.optimizer.lr == 1e-3
    assert made.optimizer.clip is None
    assert made.drafter.taps == (1, 5)
    assert made.drafter.markov == MarkovRecipe(rank=8)
    assert made.data.features == "runs/1"
    assert made.data.limit == 3
    assert made.run.export.format == "orbax"
    assert made.objective.losses == {"ce": 1.0, "tv": 0.5}
    assert made.mesh is not None and made.mesh.data == 4


def test_an_override_of_one_loss_keeps_the_others(tmp_path: Path):
    made = read(tmp_path, SMALLEST + "objective: {losses: {ce: 0.1, tv: 0.9}}\n", "objective.losses.tv=0.5")
    assert made.objective.losses == {"ce": 0.1, "tv": 0.5}


def test_a_number_without_a_point_before_its_exponent_is_a_number(tmp_path: Path):
    # YAML 1.1 takes 6e-4 for text
    assert read(tmp_path, SMALLEST.replace("steps: 10", "steps: 10, lr: 6e-4")).optimizer.lr == 6e-4


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.learning_rate=1", ("unknown key optimizer.learning_rate", "nearest known one is")),
        ("optimiser.lr=1", ("unknown key optimiser", "optimizer")),
        ("drafter.markov.ranks=1", ("unknown key drafter.markov.ranks", "rank")),
        ("objective.losses.kld=1", ("objective.losses key is 'kld'", "kl, reverse_kl")),
        ("optimizer.lr=fast", ("--set optimizer.lr=fast", "optimizer.lr is 'fast'", "a number is wanted")),
        ("optimizer.lr=0", ("optimizer.lr is 0.0", "more than 0")),
        ("optimizer.lr=.nan", ("optimizer.lr is nan", "more than 0")),
        ("data.rows=0", ("data.rows is 0", "at least 1")),
        ("run.seed=4294967296", ("run.seed is 4294967296", "0 to 4294967295")),
        ("data.rows=2.5", ("data.rows is 2.5", "a whole number")),
        ("data.pack=1", ("data.pack is 1", "true or false")),
        ("data.train=a.jsonl", ("data.train is 'a.jsonl'", "a list")),
        ("data.vocabulary.answers=0", ("data.vocabulary.answers is 0 and there are no texts",)),
        ("data.vocabulary.texts={a.jsonl: 0}", ("data.vocabulary.texts.a.jsonl is 0", "at least 1")),
        ("data.train=[]", ("data.train is empty",)),
        ("drafter.method=eagle", ("drafter.method is 'eagle'", "eagle3, peagle, dflash, dspark")),
        ("objective.alpha=1.5", ("objective.alpha is 1.5", "0 to 1")),
        ("optimizer.steps=null", ("optimizer.steps and epochs", "exactly one")),
        ("optimizer.epochs=2", ("optimizer.steps and epochs", "exactly one")),
        ("optimizer.betas=[0.9]", ("optimizer.betas is [0.9]", "two numbers")),
        ("optimizer.warmup=1.5", ("optimizer.warmup is 1.5",)),
        ("drafter.eagle.fc_norm=true", ("drafter.eagle goes with eagle3 and peagle, not with dspark",)),
        ("optimizer.lr", ("--set optimizer.lr", "section.field=value")),
        ("optimizer.lr.a=1", ("optimizer.lr has no fields",)),
        ("optimizer.lr=[1", ("--set optimizer.lr=[1", "is not YAML")),
        ("optimizer=3", ("optimizer is 3", "fields of the section")),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, override: str, parts: tuple[str, ...]):
    message = refusal(tmp_path, SMALLEST, override)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("drafter: {method: dspark}\n", ("data is missing",)),
        (SMALLEST.replace("{steps: 10}", "{}"), ("optimizer.steps and epochs",)),
        (SMALLEST + "drafter: {method: dflash}\n", ("line 6", "drafter is there twice")),
        ("- 1\n", ("holds no settings",)),
        ("a: [\n", ("is not YAML",)),
        (SMALLEST.replace("dspark", "eagle3, block_size: 8"), ("drafter.block_size goes with dflash and dspark",)),
        (SMALLEST.replace("dspark", "dflash, markov: {rank: 4}"), ("drafter.markov goes with dspark",)),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, parts: tuple[str, ...]):
    message = refusal(tmp_path, text)
    assert message.startswith(str(tmp_path / "recipe.yaml"))
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: cannot be read: No such file"):
        read_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs" / "train").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_recipes_that_ship_are_readable(path: Path):
    read_recipe(path)


def test_sections_may_be_merged_and_set_again(tmp_path: Path):
    made = read(tmp_path, SMALLEST.replace("{steps: 10}", "{<<: {steps: 9, lr: 1e-3}, steps: 10}")).optimizer
    assert (made.steps, made.lr) == (10, 1e-3)
    twice = SMALLEST.replace("{steps: 10}", "{<<: {steps: 9}, lr: 1e-3, lr: 1e-4}")
    assert "lr is there twice" in refusal(tmp_path, twice)

"""Calibration of DSpark's confidences: the temperatures, what they are fitted to, and that generation uses them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jitted import quick_programs
from tiny_drafters import OWN, block, spark
from tiny_drafters import write as write_drafter
from tiny_training import workspace
from trainer_run import command, refused

import jaxspec
from jaxspec.checkpoint.drafters import export
from jaxspec.checkpoint.drafters.load import load_drafter, open_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.errors import InputError
from jaxspec.training.calibration import Calibration, Observed
from jaxspec.training.temperatures import calibration_error, fit_temperatures, survivals

TRUE = np.array([2.0, 1.5, 0.5, 3.0])


def synthetic(mean: float, number: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, 4] whose slots' right temperatures are TRUE, and how many drafts were accepted."""
    rng = np.random.default_rng(0)
    right = rng.normal(mean, 1.5, (number, len(TRUE)))
    accepted = np.cumprod(rng.random(right.shape) < 1 / (1 + np.exp(-right)), axis=1).sum(axis=1)
    return right * TRUE, accepted


# The temperatures --------------------------------------------------------------------------------------------------------------------


def test_the_calibration_error_is_the_gap_of_each_bin_by_its_size():
    predicted, happened = np.array([0.51, 0.53, 0.98, 1.0]), np.array([True, False, True, True])
    # two in the bin of 0.50 to 0.55, mean 0.52, of which half happened; two in the last one, mean 0.99, of which all did
    assert calibration_error(predicted, happened) == pytest.approx(0.5 * 0.02 + 0.5 * 0.01)


@pytest.mark.parametrize("mean", [1.0, 0.0])
def test_the_optimum_is_the_temperatures_that_the_confidences_were_made_with(mean: float):
    """Also where half of all drafts are accepted, and the least error of all is that of confidences that are all alike."""
    logits, accepted = synthetic(mean)
    np.testing.assert_allclose(fit_temperatures(logits, accepted), TRUE, rtol=0.12)


def test_the_errors_fall_on_cycles_that_were_not_fitted_to():
    logits, accepted = synthetic(1.0)
    half = len(accepted) // 2
    fitted = fit_temperatures(logits[:half], accepted[:half])
    made = Calibration(tuple(fitted.tolist()), Observed(logits[half:], accepted[half:]))
    assert made.error(calibrated=True) < 0.25 * made.error(calibrated=False)
    assert all(after < before for before, after in zip(made.errors(False), made.errors(True), strict=True))
    assert len(made.lines()) == len(TRUE) + 1


def test_a_slot_that_was_never_reached_keeps_its_confidences():
    logits = np.full((50, 3), 2.0)
    fitted = fit_temperatures(logits, np.zeros(50, int))
    assert fitted[0] > 1
    assert fitted[1:].tolist() == [1, 1]
    assert np.all(np.diff(survivals(logits, fitted), axis=1) <= 0)


# Stored with the drafter -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["speculators", "deepspec", "orbax"])
def test_every_format_keeps_the_temperatures_and_all_else(tmp_path: Path, to: str):
    path = write_drafter(tmp_path / "drafter", spark("vanilla", **OWN), to)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    opened, temperatures = open_drafter(path, 2), (2.0, 1.5, 1.0, 0.5, 0.25, 3.0)
    export.store_temperatures(opened, (9.0,) * 6)
    export.store_temperatures(open_drafter(path, 2), temperatures)
    found = open_drafter(path, 2)
    assert found.config.block is not None and found.config.block.confidence is not None
    assert found.config.block.confidence.temperatures == temperatures
    assert opened.config.block is not None
    assert found.config.speculative_tokens == opened.config.speculative_tokens
    changed = [file.name for file in path.rglob("*") if file.is_file() and before.get(file) != file.read_bytes()]
    assert changed == ["jaxspec.json" if to == "orbax" else "config.json"]


def test_a_directory_that_cannot_be_written_keeps_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_drafter(tmp_path / "drafter", spark(), "speculators")
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"drafter: cannot be written: No space left on device"):
        export.store_temperatures(open_drafter(path, 2), (2.0,) * 6)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


# The command -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe, greedy answers of its verifier, and a drafter half trained on them."""
    directory = tmp_path_factory.mktemp("calibration")
    with quick_programs():
        train_on_answers(directory)
    return directory


def train_on_answers(directory: Path) -> None:
    verifier = workspace(directory, "dspark").parent / "verifier"
    rng = np.random.default_rng(1)
    prompts = [rng.integers(97, 120, 6).tolist() for _ in range(8)]
    params = jaxspec.SamplingParams(max_new_tokens=26, ignore_eos=True)
    lines = [
        json.dumps({"prompt_ids": prompt, "token_ids": list(result.token_ids)})
        for prompt, result in zip(
            prompts, jaxspec.Engine.from_pretrained(verifier).generate(prompts, params), strict=True
        )
    ]
    (directory / "answers.jsonl").write_text("\n".join(lines))

    def change(made: dict[str, Any]) -> None:
        answers = [str(directory / "answers.jsonl")]
        made["data"] |= {"train": answers, "validation": answers, "rows": 4}
        made["optimizer"] |= {"steps": 60}
        made["run"] |= {"validate_every": 0, "checkpoint_every": 0, "log_every": 60}

    assert command("--config", workspace(directory, "dspark", change)) == 0


def test_calibration_observes_the_cycles_of_generation_and_generation_uses_the_result(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from jaxspec.training import calibration

    seen: list[Observed] = []
    observe = calibration.observe
    monkeypatch.setattr(calibration, "observe", lambda *given: seen.append(observe(*given)) or seen[-1])
    drafter = trained / "run" / "drafter"
    answers = [json.loads(line) for line in (trained / "answers.jsonl").read_text().splitlines()]
    assert command("--config", trained / "recipe.yaml", "--calibrate", drafter) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(drafter)
    assert "all drafts: calibration error" in err and "draft 4: temperature" in err
    assert (drafter / "reliability.png").read_bytes().startswith(b"\x89PNG")
    stored = load_drafter(drafter, verifier=load_verifier(trained / "verifier")).config.block
    assert stored is not None and stored.confidence is not None
    temperatures = np.array(stored.confidence.temperatures)
    assert temperatures.shape == (4,) and not np.allclose(temperatures, 1)

    params = jaxspec.SamplingParams(max_new_tokens=26, ignore_eos=True)
    with quick_programs():
        engine = jaxspec.Engine.from_pretrained(trained / "verifier", str(drafter))
        results = engine.generate([answer["prompt_ids"] for answer in answers], params)
    generated = []
    for index in [*range(0, 8, 2), *range(1, 8, 2)]:  # as the documents were halved
        assert list(results[index].token_ids) == answers[index]["token_ids"]
        # those whose whole block lies within the answer
        end = len(answers[index]["prompt_ids"]) + 26
        generated += [cycle for cycle in results[index].cycles if cycle.position + 4 < end]
    logits = np.concatenate([one.logits for one in seen])
    accepted = np.concatenate([one.accepted for one in seen])
    assert accepted.tolist() == [cycle.accepted for cycle in generated]
    assert len(set(accepted.tolist())) > 2
    confidences = np.array([cycle.confidence for cycle in generated])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits / temperatures)), confidences, atol=1e-4)


def test_calibrating_again_begins_anew(trained: Path):
    drafter = trained / "run" / "drafter"
    first = (drafter / "config.json").read_text()
    assert command("--config", trained / "recipe.yaml", "--calibrate", drafter) == 0
    assert (drafter / "config.json").read_text() == first


def test_what_cannot_be_calibrated_is_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = trained / "recipe.yaml"
    dflash = write_drafter(tmp_path / "dflash", block("dflash"), "z-lab")
    assert "this dflash drafter has no confidence head" in refused(capsys, "--config", recipe, "--calibrate", dflash)
    assert "no such directory" in refused(capsys, "--config", recipe, "--calibrate", tmp_path / "nothing")
    drafter = trained / "run" / "drafter"
    alone = ("--set", "data.validation=[]", "--set", "data.validation_share=0")
    assert "0 documents are held out" in refused(capsys, "--config", recipe, "--calibrate", drafter, *alone)
    assert "leave one of them out" in refused(capsys, "--config", recipe, "--calibrate", drafter, "--fresh")
    features = f"data.features={tmp_path / 'features'}"
    first = ("--set", "data.limit=3", "--set", "data.validation=[]", "--set", "data.validation_share=0")
    assert command("--config", recipe, "--write-features", "--set", features, *first) == 0
    said = refused(capsys, "--config", recipe, "--calibrate", drafter, "--set", features)
    assert "lacks 5 of 8 samples" in said and "--write-features adds them" in said
    assert drafter.is_dir()

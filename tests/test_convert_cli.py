"""`python -m jaxspec.convert`: what it writes and prints, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_gguf import write_gguf
from tiny import write_model
from tiny_drafters import OWN, block, eagle, edit_tensors, spark, write

from jaxspec import convert, load_drafter, load_verifier
from jaxspec.checkpoint.drafters.content import read_content
from jaxspec.checkpoint.drafters.load import open_drafter
from jaxspec.errors import InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("verifier") / "model")


def lend(directory: Path, model: Path) -> None:
    """Gives the drafter's file the verifier's own embedding and head."""
    embed = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(directory, lambda t: t.update({"embed_tokens.weight": embed, "lm_head.weight": embed}))


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line of a refused call."""
    status = convert.main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_drafter_is_converted_and_reported(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "source", spark(**OWN), "deepspec")
    lend(source, model)
    argv = [source, tmp_path / "target", "--to", "speculators", "--verifier", model]
    assert convert.main([str(argument) for argument in argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"read   {source}: deepspec dspark drafter, 2 layers, block 6, vocabulary 259 of 259; 31 tensors"
    )
    assert lines[1].strip() == "left out the embed: it equals the verifier's"
    assert lines[2].strip() == "left out the head: it equals the verifier's"
    assert "embedding and head borrowed from the verifier; 29 tensors (29 BF16)" in lines[3]
    assert load_drafter(tmp_path / "target", verifier=load_verifier(model)).borrowed == ("embed", "head")


def test_there_and_back_gives_the_same_weights(tmp_path: Path, model: Path):
    source = write(tmp_path / "a", block("dflash"), "z-lab")
    for index, (to, drop) in enumerate((("speculators", ""), ("orbax", ""), ("z-lab", ""))):
        previous = source if index == 0 else tmp_path / str(index - 1)
        argv = [previous, tmp_path / str(index), "--to", to, "--verifier", model, "--drop", drop]
        assert convert.main([str(argument) for argument in argv]) == 0
    one, two = (load_file(path / "model.safetensors") for path in (source, tmp_path / "2"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value)
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "2/config.json").read_text())


def test_dtype_is_written(tmp_path: Path):
    source = write(tmp_path / "source", eagle("eagle3"), "eagle3")
    assert convert.main([str(source), str(tmp_path / "target"), "--to", "speculators", "--dtype", "float32"]) == 0
    assert {str(value.dtype) for value in load_file(tmp_path / "target/model.safetensors").values()} == {"float32"}


def test_dropping_is_explicit(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "source", block("dflash", own_head=True), "speculators")
    argv = [source, tmp_path / "target", "--to", "z-lab", "--verifier", model]
    assert "--drop head" in refused(capsys, *argv)
    assert not (tmp_path / "target").exists()
    assert convert.main([str(argument) for argument in (*argv, "--drop", "head")]) == 0
    assert "dropped the drafter's own output head" in capsys.readouterr().out


def test_heads_are_dropped_only_by_name(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "source", spark(), "speculators")
    argv = [source, tmp_path / "target", "--to", "z-lab", "--verifier", model]
    assert "--drop markov,confidence" in refused(capsys, *argv)
    assert "sample_from_anchor" in refused(capsys, *argv, "--drop", "markov,confidence")


def test_a_verifier_becomes_orbax_and_comes_back(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    assert convert.main([str(model), str(tmp_path / "orbax"), "--to", "orbax"]) == 0
    assert "orbax llama verifier, 2 layers" in capsys.readouterr().out
    loaded, first = load_verifier(tmp_path / "orbax"), load_verifier(model)
    assert loaded.config == first.config
    assert loaded.eos_ids == first.eos_ids
    assert (loaded.tokenizer_source / "tokenizer.json").is_file()
    assert convert.main([str(tmp_path / "orbax"), str(tmp_path / "back"), "--to", "safetensors"]) == 0
    one, two = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value)


def test_a_gguf_file_becomes_safetensors(tmp_path: Path):
    source = write_gguf(tmp_path / "small.gguf")
    assert convert.main([str(source), str(tmp_path / "model"), "--to", "safetensors"]) == 0
    assert load_verifier(tmp_path / "model").config == load_verifier(source).config
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_bfloat16_verifier_stays_bfloat16(tmp_path: Path, model: Path):
    half = shutil.copytree(model, tmp_path / "half")
    tensors = {name: value.astype("bfloat16") for name, value in load_file(half / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors")
    assert convert.main([str(half), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in tensors.items():
        assert written[name].dtype == value.dtype
        np.testing.assert_array_equal(written[name], value)


def test_bad_arguments_are_one_line(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    drafter = write(tmp_path / "drafter", spark(), "speculators")
    (tmp_path / "taken").mkdir()
    target = tmp_path / "target"
    cases = {
        "no such directory or file": (tmp_path / "absent", target, "--to", "orbax"),
        "exists already": (drafter, tmp_path / "taken", "--to", "orbax"),
        "lies inside SRC": (drafter, drafter / "inside", "--to", "orbax"),
        "invalid choice: 'pytorch'": (drafter, target, "--to", "pytorch"),
        "--to": (drafter, target),
        "--to safetensors": (drafter, target, "--to", "safetensors"),
        "--to z-lab": (model, target, "--to", "z-lab"),
        "--drop head: this drafter has none": (drafter, target, "--to", "speculators", "--drop", "head"),
        "--drop wings: known are": (drafter, target, "--to", "speculators", "--drop", "wings"),
        "--drop: ": (model, target, "--to", "orbax", "--drop", "head"),
        "--verifier: ": (model, target, "--to", "orbax", "--verifier", model),
        "give --verifier": (drafter, target, "--to", "deepspec"),
        "give it as --drafter": (drafter, target, "--to", "speculators", "--verifier", drafter),
        "unrecognized arguments": (drafter, target, "--to", "orbax", "--quick"),
    }
    for message, argv in cases.items():
        assert message in refused(capsys, *argv), message
        assert not target.exists()


def test_the_source_itself_is_no_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drafter = write(tmp_path / "drafter", block("dflash"), "z-lab")
    before = read_content(open_drafter(drafter))
    assert "exists already" in refused(capsys, drafter, drafter, "--to", "z-lab")
    np.testing.assert_array_equal(
        read_content(open_drafter(drafter)).parameters[("fc", "weight")], before.parameters[("fc", "weight")]
    )


def test_a_failed_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    drafter = write(tmp_path / "drafter", block("dflash"), "z-lab")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("jaxspec.checkpoint.drafters.export.write_json", fail)
    said = refused(capsys, drafter, tmp_path / "target", "--to", "z-lab")
    assert f"{tmp_path / 'target'}: cannot be written: disk full" in said
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_orbax_of_a_drafter_is_no_verifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drafter = write(tmp_path / "drafter", block("dflash"), "orbax")
    with pytest.raises(InputError, match="this is a drafter, not a verifier; give it as --drafter"):
        load_verifier(drafter)
    shutil.rmtree(drafter / "arrays" / "ocdbt.process_0")
    assert "damaged or incomplete" in refused(capsys, drafter, tmp_path / "target", "--to", "z-lab")

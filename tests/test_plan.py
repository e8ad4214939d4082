"""`python -m jaxspec.plan`: memory against compiled programs and published sizes, floors against sums by hand, and what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny_drafters
from jitted import quick_programs
from mesh_run import DEVICES, ROOT
from tiny import hf_config, tiny_config, write_model

from jaxspec.cli import BAD_INPUT, run
from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.drafters.config import DrafterConfig
from jaxspec.forecast import configs
from jaxspec.forecast.devices import GPUS
from jaxspec.forecast.floor import draft, verify
from jaxspec.forecast.memory import compiled_memory, largest_batch, largest_context, parts
from jaxspec.forecast.programs import lower_here
from jaxspec.forecast.report import collectives_of
from jaxspec.forecast.setup import Setup
from jaxspec.plan import NAME, main
from jaxspec.verifiers.families import parse_config

DATA = Path(__file__).parent / "data"
F32 = np.dtype(np.float32)
A100 = GPUS["a100-80gb"]
PAIR = [
    *("--model", str(DATA / "qwen3_8b.json")),
    *("--drafter", str(DATA / "drafters" / "redhat_qwen3_8b_peagle.json")),
]


def setup_of(
    verifier: VerifierConfig, drafter: DrafterConfig | None, drafts: int = 3, dtype: Any = F32, **sizes: int
) -> Setup:
    plan = Plan(drafts=drafts, widths=(drafts,)) if drafter is not None else Plan()
    return Setup(verifier, drafter, plan, np.dtype(dtype), {"data": 1, "tensor": 1, "expert": 1, **sizes})


def plan_json(capsys, *argv: str) -> dict[str, Any]:
    assert run(NAME, main, [*argv, "--output", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def demo_like(heads: int = 9, kv_heads: int = 3) -> VerifierConfig:
    """The demo model, three layers of it: weights that outweigh temporaries, as they do in models that matter."""
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    layers = {"num_hidden_layers": 3, "head_dim": 64}
    return parse_config({**hf_config(vocab_size=49_152, max_positions=8192), **sizes, **layers}, "small")[0]


@pytest.fixture(scope="module")
def small() -> VerifierConfig:
    return demo_like()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Flags of a model and a drafter on disk."""
    made = tmp_path_factory.mktemp("plan")
    write_model(made / "model", tokenizer=False)
    tiny_drafters.write(made / "flash", tiny_drafters.block("dflash"), "z-lab")
    return ["--model", str(made / "model"), "--drafter", str(made / "flash")]


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with quick_programs():
        yield


def drafter_for(verifier: VerifierConfig) -> DrafterConfig:
    """P-EAGLE with a vocabulary of its own, as wide as the verifier."""
    base = tiny_drafters.eagle("peagle", vocab_size=verifier.vocab_size, draft_vocab_size=8192, mask_token=1)
    first = verifier.layers[0]
    layers = tuple(
        replace(
            first,
            attention=replace(first.attention, kv_source=i, in_width=None if i else 2 * verifier.width),
        )
        for i in range(2)
    )
    return replace(base, width=verifier.width, layers=layers, taps=(0, 2))


@pytest.mark.usefixtures("quick")
def test_memory_agrees_with_the_compiled_programs(small):
    batch, setup = 2, setup_of(small, drafter_for(small))
    capacity = setup.programs.capacity(3000)
    predicted = parts(setup, batch, capacity)
    compiled = compiled_memory(setup, batch, capacity, lower_here)
    # What decoding takes stays on the device while a prompt is taken in, though prefill makes no use of the heads.
    held, temporary = compiled["decode"].arguments, max(one.temporary for one in compiled.values())
    assert predicted.total - predicted.temporaries == pytest.approx(held, rel=0.001)
    assert predicted.total == pytest.approx(held + temporary, rel=0.1)
    assert parts(setup, batch, capacity, temporary).total == pytest.approx(held + temporary, rel=0.001)


# Two devices: a pair that is split, and one whose drafter lies whole and borrows embedding and head.
ON_TWO = """
import json, sys
from dataclasses import replace
sys.path.insert(0, "tests")
import tiny_drafters
from jitted import quick_programs
from test_plan import demo_like, drafter_for, setup_of
from tiny import tiny_config
from jaxspec.forecast.memory import compiled_memory, parts
from jaxspec.forecast.programs import lower_here
from jaxspec.sharding import make_mesh

split = demo_like(heads=8, kv_heads=4)
whole = tiny_drafters.block("dflash", vocab_size=260, draft_vocab_size=260)
whole = replace(whole, layers=tuple(replace(layer, mlp_width=45) for layer in whole.layers))
found = []
with quick_programs():
    for pair, tokens in (((split, drafter_for(split)), 3000), ((tiny_config(vocab_size=260), whole), 300)):
        setup = setup_of(*pair, tensor=2)
        capacity = setup.programs.capacity(tokens)
        planned = parts(setup, 2, capacity)
        compiled = compiled_memory(setup, 2, capacity, lower_here, make_mesh(setup.sizes))
        found.append({
            "whole": setup.drafter_replicated,
            "planned": [planned.total - planned.temporaries, planned.total],
            "held": compiled["decode"].arguments,
            "temporary": max(one.temporary for one in compiled.values()),
        })
print(json.dumps(found))
"""


def test_memory_on_two_devices_agrees_with_the_compiled_programs():
    environment = {**os.environ, **DEVICES, "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])}
    command = [sys.executable, "-c", ON_TWO]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    split, whole = json.loads(done.stdout)
    assert not split["whole"] and whole["whole"]
    for one in (split, whole):
        assert one["planned"][0] == pytest.approx(one["held"], rel=0.001 if one is split else 0.01)
    assert split["planned"][1] == pytest.approx(split["held"] + split["temporary"], rel=0.1)


def test_a_drafter_that_lies_whole_has_copies_of_what_it_borrows():
    flash = tiny_drafters.block("dflash", vocab_size=260, draft_vocab_size=260)
    odd = replace(flash, layers=tuple(replace(layer, mlp_width=45) for layer in flash.layers))
    split = setup_of(tiny_config(vocab_size=260), flash, tensor=2)
    with pytest.warns(UserWarning, match="the drafter lies whole on every device"):
        whole = setup_of(tiny_config(vocab_size=260), odd, tensor=2)
    assert not split.drafter_replicated and whole.drafter_replicated
    borrowed = {("vocabulary", name, "weight"): 260 * 32 * 4 for name in ("embed", "head")}
    found = {weight.path: weight.nbytes for weight in whole.drafter_weights}
    assert found.items() >= borrowed.items()
    assert not {weight.path for weight in split.drafter_weights} & borrowed.keys()
    head = 260 * 32 * 4  # what each device reads of it, half of it where it is the verifier's
    layers = sum(size for path, size in found.items() if path[0] in ("layers", "norm"))
    sight = 2 * 2 * 8 * 4 * len(odd.layers) * 6
    assert draft(whole, 1, 0)[1].nbytes == layers + head + sight


def test_a_published_pair_has_its_published_size(capsys):
    found = plan_json(capsys, *PAIR, "--context", "8000")
    assert found["memory"]["verifier_weights"] == 2 * 8_190_735_360  # the model card's 8.2 billion, in bfloat16
    assert found["capacity"] == 8192
    assert found["memory"]["verifier_cache"] == 2 * 2 * 36 * 8 * 128 * 8192
    assert found["fits"] and found["num_speculative_tokens"] == 7
    # The cycle reads every weight but the two tables of embeddings (151,936 x 4096 each), and the keys and values.
    weights = found["memory"]["verifier_weights"] + found["memory"]["drafter_weights"] - 2 * 2 * 151_936 * 4096
    seen = 2 * 2 * 8 * 128 * (36 * (8000 + 8) + 4 * (8000 + 14))
    assert found["floor"]["bytes"] == pytest.approx(weights + seen, rel=1e-3)
    assert found["floor"]["cycle_ms"] == pytest.approx(1000 * found["floor"]["bytes"] / A100.bandwidth)
    assert found["collectives"] == {} and found["tokens_per_s"]["speculative"] is None


def test_tokens_a_second_follow_from_the_floor(tiny, capsys):
    argv = ["--context", "300", "--batch", "4", "--acceptance-length", "3", "--share-of-floor", "0.5"]
    found = plan_json(capsys, *tiny, *argv)
    wanted = 0.5 * 4 * 3 / (found["floor"]["cycle_ms"] / 1000)
    assert found["tokens_per_s"]["speculative"] == pytest.approx(wanted)
    assert found["tokens_per_s"]["plain"] == pytest.approx(0.5 * 4 / (found["floor"]["plain_ms"] / 1000))


def test_two_devices_share_the_matrices_and_exchange_two_sums_a_layer(small):
    small = replace(
        small, layers=tuple(replace(one, attention=replace(one.attention, heads=8, kv_heads=4)) for one in small.layers)
    )
    alone, shared = (setup_of(small, drafter_for(small), tensor=tensor) for tensor in (1, 2))
    one, two = (parts(setup, 2, 1024) for setup in (alone, shared))
    assert two.verifier_cache == one.verifier_cache // 2
    assert 0.5 <= two.verifier_weights / one.verifier_weights < 0.501  # the norms are whole on each
    passed = verify(shared, 2, 1000, 3)
    reduced, gathered = passed.collectives
    assert (reduced.kind, reduced.count, reduced.nbytes) == ("all-reduce", 2 * 3 + 1, 2 * 4 * 576 * 4)
    assert (gathered.kind, gathered.count, gathered.nbytes) == ("all-gather", 1, 2 * 4 * 49_152 * 4)
    assert reduced.sent == reduced.count * reduced.nbytes  # a ring of two: each sends half, twice
    drafted = collectives_of(draft(shared, 2, 1000))
    assert drafted["all-reduce"]["count"] == 2 * 2 + 1 and drafted["all-gather"]["bytes"] == 2 * 3 * 8192 * 4
    assert verify(alone, 2, 1000, 3).collectives == ()
    rows = parts(setup_of(small, None, data=2), 2, 1024)
    assert rows.verifier_cache == one.verifier_cache // 2 and rows.verifier_weights == one.verifier_weights


@pytest.mark.parametrize(
    ("config", "names", "drafts"),
    [
        (tiny_drafters.eagle("eagle3"), ["draft"] * 4, 4),
        (tiny_drafters.eagle("peagle"), ["draft"], 4),
        (tiny_drafters.block("dflash"), ["inject", "draft"], 4),
        (tiny_drafters.spark(), ["inject", "draft"], 4),
    ],
    ids=["eagle3", "peagle", "dflash", "dspark"],
)
def test_a_drafter_reads_its_weights_once_a_pass(config, names, drafts):
    verifier = tiny_config()
    setup = setup_of(verifier, config, drafts)
    passes = draft(setup, 1, 0)
    assert [one.name for one in passes] == names
    own = {weight.path: weight.nbytes for weight in setup.drafter_weights}
    head = own.get(("vocabulary", "head", "weight"), 259 * 32 * 4)
    layers = sum(size for path, size in own.items() if path[0] in ("layers", "norm"))
    sight = 2 * 2 * 8 * 4 * len(config.layers)  # bytes of a position's keys and values
    fused = sum(size for path, size in own.items() if path[0] == "fc")
    steps = drafts * sum(size for path, size in own.items() if path[:2] == ("markov", "w2"))
    if config.block is not None:
        assert passes[0].nbytes == fused + sum(
            size for path, size in own.items() if path[0] == "hidden_norm" or path[-2] in ("k", "v", "k_norm")
        )
        assert passes[1].nbytes == layers + head + steps + sight * config.block.size
    else:
        block = 2 * drafts if config.method == "peagle" else drafts + 1
        assert passes[0].nbytes == layers + head + fused + sight * block
        assert all(one.nbytes == layers + head + sight for one in passes[1:])


def test_experts_that_few_tokens_reach_are_read_in_part():
    config = parse_config(json.loads((DATA / "qwen3_30b_a3b.json").read_text()), "moe")[0]
    setup = setup_of(replace(config, layers=config.layers[:1]), None, dtype=jax.numpy.bfloat16)
    expert = 3 * 768 * 2048 * 2
    one, eight = (verify(setup, batch, 1, 0).nbytes for batch in (1, 8))
    assert eight - one == pytest.approx(128 * expert * (1 - (1 - 8 / 128) ** 8) - 8 * expert, rel=1e-3)


def test_pretended_devices_exchange_too(capsys):
    model = ["--model", str(ROOT / "tests" / "goldens" / "llama"), "--context", "90"]
    found = plan_json(capsys, *model, "--device", "cpu", "--mesh", "tensor=2")
    assert found["collectives"]["all-reduce"]["bytes"] > 0 and found["floor"]["cycle_ms"] > 0


def test_the_largest_batch_and_context_fit_and_more_does_not(small):
    setup = setup_of(small, drafter_for(small))
    device = replace(A100, memory=A100.reserved + 2**29)
    capacity = setup.programs.capacity(1000)
    most = largest_batch(setup, capacity, device)
    assert most > 1
    assert parts(setup, most, capacity).total <= device.usable < parts(setup, most + 1, capacity).total
    longest = largest_context(setup, 4, device)
    assert 256 < longest < small.max_positions
    fitting, larger = (setup.programs.capacity(tokens) for tokens in (longest, longest + 1))
    assert parts(setup, 4, fitting).total <= device.usable < parts(setup, 4, larger).total
    assert largest_context(setup, 1, A100) == small.max_positions
    assert largest_batch(setup, capacity, replace(device, memory=device.reserved)) == 0


def test_directories_configs_and_hub_ids_are_read_without_weights(tmp_path, monkeypatch, capsys):
    model, flash = write_model(tmp_path / "model"), tmp_path / "flash"
    tiny_drafters.write(flash, tiny_drafters.block("dflash"), "z-lab")
    wanted = plan_json(
        capsys, "--model", str(model), "--drafter", str(flash), "--context", "100", "--device", "h100-80gb"
    )
    for file in [*model.glob("*.safetensors"), *model.glob("token*")]:
        file.unlink()
    names = sorted(configs.open_drafter(flash, 2).links)
    monkeypatch.setattr(configs, "snapshot_download", lambda *_, **__: str(tmp_path / "nothing"))
    monkeypatch.setattr(
        configs, "hf_hub_download", lambda hub_id, file: str({"owner/m": model, "owner/d": flash}[hub_id] / file)
    )
    from safetensors import safe_open

    with safe_open(flash / "model.safetensors", "np") as stored:
        names = list(stored.keys())
    listed = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=dict.fromkeys(names))})
    monkeypatch.setattr(configs, "get_safetensors_metadata", lambda hub_id: listed)
    got = plan_json(capsys, "--model", "owner/m", "--drafter", "owner/d", "--context", "100", "--device", "h100-80gb")
    assert got == {**wanted, "model": "owner/m", "drafter": "owner/d"}


def test_text_says_what_json_says(capsys):
    argv = ["--mesh", "tensor=2", "--device", "a100-40gb", "--acceptance-length", "2.5", "--context", "300"]
    assert run(NAME, main, [*PAIR, *argv]) == 0
    out = capsys.readouterr().out
    assert "on 2 x a100-40gb (tensor 2), bfloat16, batch 1, context 300 (512 slots a row)" in out
    for name in (
        "verifier weights",
        "temporaries (estimate)",
        "largest batch",
        "largest context",
        "all-reduce a cycle",
    ):
        assert f"\n{name}" in out
    assert "of 40.8: fits" in out and "tokens/s at acceptance length 2.5" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "--model nowhere: no such directory or file, and not a hub id of the form owner/name"),
        (["--drafter", "nowhere"], "--drafter nowhere: no such directory or file"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--context", "5000"], "--context 5000 must be from 1 to 1024, the model's longest sequence"),
        (["--mesh", "tensor=3"], "mesh: tensor=3 does not divide the"),
        (["--mesh", "row=2"], "'row' is no axis"),
        (["--mesh", "data=2"], "--batch 1 is no multiple of the 2 devices along data"),
        (["--acceptance-length", "9"], "--acceptance-length 9 is more than the K + 1 = 6 tokens of a cycle"),
        (["--share-of-floor", "0"], "--share-of-floor is 0.0; it must be above 0 and at most 1"),
        (["--drafter", "none", "--acceptance-length", "2"], "--acceptance-length needs --drafter, and there is none"),
        (["--drafter", str(DATA / "qwen3_8b.json")], "a drafter's config doesn't say everything"),
        (
            ["--device", "cpu", "--mesh", "data=2", "--batch", "2", "--compile"],
            "mesh: data 2 are 2 devices; there are 1",
        ),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tiny, argv, message, capsys):
    assert run(NAME, main, [*tiny, "--context", "300", *argv]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{NAME}: error: ") and err.count("\n") == 1
    assert message in err

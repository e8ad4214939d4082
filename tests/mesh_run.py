"""Runs engines on one device and on meshes of eight pretended ones, in a process of its own: `python mesh_run.py CASES` with a JSON list of
`Case` fields prints a JSON list of what came out. Tests import the rest."""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
PROMPTS = [[5], [7, 3, 11, 2, 9, 1, 20, 33, 4, 8, 61, 17, 12, 25, 40, 41, 3], [90, 14, 2, 77, 31]]
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
PHASE = re.compile(r'op_name="[^"]*?/(draft|verify|accept|commit)/')


@dataclass(frozen=True)
class Case:
    """One pair on one mesh.

    Fields:
        verifier: a directory of tests/goldens; "qwen3_moe" has four of its five experts.
        drafter: a method, "odd", or None.
        mesh: as --mesh takes it.
        kernels: as --kernels takes it.
        plan: the speculative config, as JSON.
    """

    verifier: str
    drafter: str | None
    mesh: str
    kernels: str | None = None
    plan: str | None = None

    def __str__(self) -> str:
        return f"{self.verifier} {self.drafter or 'plain'} {self.mesh}{f' {self.kernels}' if self.kernels else ''}"


@dataclass(frozen=True)
class Outcome:
    """What a case gave.

    Fields:
        one, several: tokens of each prompt on one device and on the mesh, all greedy, then some rows sampled.
        accepted: drafts, on the mesh.
        collectives: of the decode program, by "phase kind".
        said: warnings.
        spread: for each parameter by path, how many different parts of it the devices hold.
    """

    one: list[list[int]]
    several: list[list[int]]
    accepted: int
    collectives: dict[str, int]
    said: list[str]
    spread: dict[str, int]


def run_cases(cases: Sequence[Case]) -> list[Outcome]:
    """Runs them in two processes of eight devices each: compiling is the cost, and mostly keeps one core busy."""
    environment = {**os.environ, **DEVICES, "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])}
    with ThreadPoolExecutor() as pool:

        def run(part: Sequence[Case]) -> list[Outcome]:
            command = [sys.executable, str(Path(__file__)), json.dumps([asdict(case) for case in part])]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            return [Outcome(**one) for one in json.loads(done.stdout)]

        middle = (len(cases) + 1) // 2
        return [outcome for part in pool.map(run, (cases[:middle], cases[middle:])) for outcome in part]


def main(cases: Sequence[Case]) -> list[Outcome]:
    from jitted import quick_programs

    with tempfile.TemporaryDirectory() as folder, quick_programs():
        write = cache(lambda name: write_model(Path(folder) / name, name))
        alone = cache(lambda case: tokens_of(engine_of(case, write))[0])
        return [outcome(case, alone(replace(case, mesh="data=1", kernels=None)), write) for case in cases]


def outcome(case: Case, alone: list[list[int]], write: Any) -> Outcome:
    from flax import nnx

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(case, write)
    several, accepted = tokens_of(engine)
    programs = engine.programs
    leaves = nnx.to_flat_state(programs._treedef.unflatten(programs._leaves))
    spread = {
        ".".join(map(str, path)): len({str(shard.index) for shard in leaf[...].addressable_shards})
        for path, leaf in leaves
    }
    decode = next(program for key, program in programs.compiled.items() if key[0] == "decode")
    return Outcome(
        alone, several, accepted, collectives(decode.as_text() or ""), [str(one.message) for one in caught], spread
    )


def engine_of(case: Case, write: Any) -> Any:
    from jaxspec.decoding.engine import Engine

    return Engine.from_pretrained(
        write(case.verifier),
        None if case.drafter is None else write(case.drafter),
        speculative_config=case.plan,
        dtype="float32",
        mesh=case.mesh,
        kernels=case.kernels,  # pyright: ignore[reportArgumentType]
    )


def tokens_of(engine: Any) -> tuple[list[list[int]], int]:
    """Greedy answers, then answers of which two are sampled; and how many drafts were accepted."""
    from jaxspec.decoding.params import SamplingParams

    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True)
    mixed = [
        replace(greedy, temperature=1.0, top_k=40, top_p=0.9, seed=1),
        replace(greedy, max_new_tokens=7),
        replace(greedy, temperature=0.7, seed=2),
    ]
    results = engine.generate(PROMPTS, greedy) + engine.generate(PROMPTS, mixed)
    accepted = sum(cycle.accepted for result in results for cycle in result.cycles)
    return [list(result.token_ids) for result in results], accepted


def write_model(folder: Path, name: str) -> Path:
    """The directory of a verifier or drafter of `Case`, written there if it is none of tests/goldens."""
    if name == "qwen3_moe":
        return write_even_experts(folder, 4)
    return GOLDENS / name if (GOLDENS / name).is_dir() else write_drafter(folder, name)


def write_even_experts(folder: Path, number: int) -> Path:
    """tests/goldens/qwen3_moe with its first experts only."""
    from safetensors.numpy import load_file, save_file

    source = GOLDENS / "qwen3_moe"
    tensors = load_file(source / "model.safetensors")
    kept = {
        name: value[:number].copy() if name.endswith("mlp.gate.weight") else value
        for name, value in tensors.items()
        if not (found := re.search(r"experts\.(\d+)\.", name)) or int(found[1]) < number
    }
    folder.mkdir()
    save_file(kept, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": number}))
    return folder


def write_drafter(folder: Path, method: str) -> Path:
    """A tiny drafter for the verifiers of tests/goldens; it drafts at the temperature of the row."""
    import tiny_drafters as tiny

    from jaxspec.checkpoint.drafters.parsed import VerifierFacts

    own = {"vocab_size": 96, "draft_vocab_size": 96, "mask_token": 1, "own_embed": True, "own_head": True}
    reduced = {**own, "draft_vocab_size": 48}
    config = {
        "eagle3": lambda: tiny.eagle("eagle3", **{**reduced, "mask_token": None}),
        "peagle": lambda: tiny.eagle("peagle", **own),
        "dflash": lambda: tiny.block("dflash", **{**own, "own_embed": False, "own_head": False}),
        "dspark": lambda: tiny.spark(**reduced),
        # of a width that no mesh divides
        "odd": lambda: tiny.block("dflash", **own, layers=tuple(replace(one, mlp_width=45) for one in tiny.layers())),
    }[method]()
    return tiny.write(folder, config, "orbax", VerifierFacts("owner/verifier", (), num_layers=None))


def collectives(text: str) -> dict[str, int]:
    """Exchanges between devices in a compiled program, by "phase kind"; what belongs to no phase of the cycle is "other"."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        kind, phase = COLLECTIVE.search(line), PHASE.search(line)
        if kind:
            found[f"{phase[1] if phase else 'other'} {kind[1]}"] += 1
    return dict(found)


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in main([Case(**case) for case in json.loads(sys.argv[1])])]))

"""The draft-then-verify cycle measured: what it costs besides the two models' forward passes, and against dflash's loop in torch.

    python tools/bench_cycle.py [--model DIR] [--threads 2] [--rounds 3] [--json FILE] [growth] [split] [host] [dflash]

Drafters have random weights where nothing else is said: drafting costs the same whatever is accepted. Speeds are ratios of
medians whose runs took turns in this one process (`--rounds` of them). The split is a trace's (`cycle_trace.py`); growth takes the least of
several measurements by turns; the host's share is a median. torch and dflash are in the `reference` environment only;
without them the comparison is left out and said to be.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from bench_decode import prompt_ids, take_turns
from cycle_trace import trace_cycle
from flax import nnx

from jaxspec import compilation_cache
from jaxspec.checkpoint.drafters.content import DrafterContent
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import load_drafter, own_shapes
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.checkpoint.load import LoadedVerifier, load_verifier
from jaxspec.config import LayerConfig, VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine, Prompt
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import Programs
from jaxspec.decoding.state import DecodeState, Dispatch, Requests
from jaxspec.drafters.build import build_drafter
from jaxspec.drafters.config import (
    BlockConfig,
    ConfidenceConfig,
    DrafterConfig,
    EagleConfig,
    MarkovConfig,
    Method,
)
from jaxspec.evaluation.split import measure_split
from jaxspec.verifiers.decoder import Decoder

METHODS: tuple[Method, ...] = ("eagle3", "peagle", "dflash", "dspark")
LAYERS, DRAFT_VOCAB, MARKOV_RANK = 2, 8192, 256
DRAFTS = 7  # K where nothing else is said
FEW, MANY = 3, 15  # K of the growth of drafting; a block of 16
TURNS = 3  # of growth
SHALLOW = 8  # layers of a verifier that doesn't matter
NEW_TOKENS, SPLIT_TOKENS = 48, 8
BATCHES = (1, 8)
CYCLES = 8  # a dispatch
PARTS = ["growth", "split", "host", "dflash"]
QUESTIONS = (
    "A baker sells 12 loaves a day at 3 dollars each. How much does she earn in a week?",
    "Tom has 5 boxes with 8 pencils each and gives away 11 pencils. How many are left?",
    "A train travels 60 miles an hour for 3 hours and 40 miles an hour for 2 hours. How far does it go?",
    "Anna is twice as old as Ben, who is 3 years older than Carl. Carl is 7. How old is Anna?",
    "A shirt costs 20 dollars and is sold at a quarter off. What do 4 shirts cost?",
    "There are 30 children in a class and two fifths of them are boys. How many are girls?",
    "A tank holds 240 liters and loses 4 liters a minute. When is half of it left?",
    "Mia reads 15 pages every evening. How many evenings does she need for a book of 195 pages?",
)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=1)


def drafter_config(
    verifier: VerifierConfig, method: Method, block: int, draft_vocab: int = DRAFT_VOCAB
) -> DrafterConfig:
    """A drafter of LAYERS layers as wide as the verifier's; `block` slots where it has them. The whole vocabulary is borrowed."""
    eagle = method in ("eagle3", "peagle")
    first = verifier.layers[0]

    def layer(index: int) -> LayerConfig:
        wide = 2 * verifier.width if eagle and index == 0 else None
        attention = replace(first.attention, kv_source=index, qk_norm=not eagle, causal=eagle, in_width=wide)
        return replace(first, attention=attention)

    spark = method == "dspark"
    heads = {"markov": MarkovConfig("vanilla", MARKOV_RANK), "confidence": ConfidenceConfig(True)} if spark else {}
    reduced = draft_vocab < verifier.vocab_size
    return DrafterConfig(
        method=method,
        vocab_size=verifier.vocab_size,
        draft_vocab_size=draft_vocab,
        width=verifier.width,
        taps=(2, verifier.num_layers // 2, verifier.num_layers - 3),
        layers=tuple(layer(index) for index in range(LAYERS)),
        norm_eps=verifier.norm_eps,
        max_positions=verifier.max_positions,
        own_embed=False,
        own_head=reduced,
        mask_token=None if method == "eagle3" else verifier.vocab_size - 1,
        eagle=EagleConfig(norm_before_residual=False) if eagle else None,
        block=None if eagle else BlockConfig(block, sample_from_anchor=spark, **heads),
    )


def engine_of(config: VerifierConfig, decoder: Decoder, method: Method, drafts: int, block: int) -> Engine:
    """With a random drafter, whose drafts are drawn like the verifier's tokens where those are drawn."""
    drafter = build_drafter(drafter_config(config, method, block), rngs=nnx.Rngs(0))
    return Engine(config, decoder, drafter, Plan(drafts=drafts, sample_drafts=True, widths=(drafts,)))


def draft_ms(engine: Engine) -> float:
    """Of one drafting, half-way through a short answer."""
    params = replace(GREEDY, max_new_tokens=SPLIT_TOKENS)
    return measure_split(engine, engine.generate(prompt_ids(1, engine.config.vocab_size), params), params).draft_ms


def splits(verifier: LoadedVerifier) -> dict[str, dict[str, float]]:
    """Milliseconds of a cycle's parts. With the demo's drafters on questions, and with random ones on random tokens, whose flat
    distributions are the worst that top-p can meet."""
    table = {}

    def measure(name: str, engine: Engine, prompts: Sequence[Prompt], tokens: int) -> None:
        for way, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            params = replace(params, max_new_tokens=tokens)
            phases = trace_cycle(engine, engine.generate(prompts, params), params)
            table[f"{name}, {way}"] = {**asdict(phases), "rest_share": phases.rest_share}
            print(
                f"{name}, {way:7}: draft {phases.draft_ms:6.1f} ms, verify {phases.verify_ms:6.1f} ms, the rest "
                f"{phases.rest_ms:5.2f} ms, {phases.rest_share:.1%} of the cycle",
                flush=True,
            )

    questions: list[Prompt] = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    for method in METHODS:
        config = {"method": method, "model": f"demo-{method}", "draft_sample_method": "probabilistic"}
        engine = Engine.from_pretrained(verifier.path, speculative_config=config)
        for batch in BATCHES:
            measure(f"demo-{method}, batch {batch}", engine, questions[:batch], NEW_TOKENS)
    engine = engine_of(verifier.config, verifier.module, "dflash", DRAFTS, DRAFTS + 1)
    for batch in BATCHES:
        measure(f"random dflash, batch {batch}", engine, prompt_ids(batch, engine.config.vocab_size), SPLIT_TOKENS)
    return table


def growth(config: VerifierConfig) -> dict[str, dict[str, float]]:
    """Milliseconds of drafting by K, and their ratio; a block of 16 whatever K is. The verifier is cut to SHALLOW random layers: drafting
    doesn't see it, and it compiles faster."""
    shallow = replace(config, layers=config.layers[:SHALLOW])
    decoder = Decoder(shallow, rngs=nnx.Rngs(1))
    table = {}
    for method in METHODS:
        block = MANY if method == "dspark" else MANY + 1
        engines = {drafts: engine_of(shallow, decoder, method, drafts, block) for drafts in (FEW, MANY)}
        turns = [(drafts, draft_ms(engine)) for _ in range(TURNS) for drafts, engine in engines.items()]
        ms = {drafts: min(found for of, found in turns if of == drafts) for drafts in engines}
        table[method] = {f"K={FEW}": ms[FEW], f"K={MANY}": ms[MANY], "ratio": ms[MANY] / ms[FEW]}
        print(
            f"{method:6}: K={FEW} {ms[FEW]:6.1f} ms, K={MANY} {ms[MANY]:6.1f} ms, {ms[MANY] / ms[FEW]:.2f} times",
            flush=True,
        )
    return table


@contextmanager
def dispatches_timed(waiting: list[float]) -> Iterator[None]:
    """Dispatches of CYCLES cycles; `waiting` gets the seconds that the host waited for each."""
    decode = Programs.decode

    def timed(
        programs: Programs, state: DecodeState, requests: Requests, cycles: int, logprobs: int | None = None
    ) -> tuple[DecodeState, Dispatch]:
        made = decode(programs, state, requests, cycles, logprobs)
        start = time.perf_counter()
        jax.block_until_ready(made)
        waiting.append(time.perf_counter() - start)
        return made

    with (
        mock.patch.object(Programs, "decode", timed),
        mock.patch("jaxspec.decoding.engine.MAX_CYCLES", CYCLES),
    ):
        yield


def host_share(verifier: LoadedVerifier, rounds: int) -> dict[str, float]:
    """Share of the decoding time in which nothing ran on the device: launching a dispatch and taking in the last one's tokens."""
    shares = {}
    for batch in BATCHES:
        engine = engine_of(verifier.config, verifier.module, "dflash", DRAFTS, DRAFTS + 1)
        prompts = prompt_ids(batch, verifier.config.vocab_size)
        engine.generate(prompts, GREEDY)
        seen = []
        for _ in range(rounds):
            waiting: list[float] = []
            with dispatches_timed(waiting):
                result = engine.generate(prompts, GREEDY)[0]
            seen.append(1 - sum(waiting) / result.timing.decode_s)
        shares[f"batch {batch}"] = statistics.median(seen)
        print(
            f"host time between dispatches of {CYCLES} cycles, batch {batch}: {shares[f'batch {batch}']:.2%}",
            flush=True,
        )
    return shares


def zlab_drafter(verifier: LoadedVerifier, directory: Path) -> Path:
    """A DFlash drafter with a block of 16 for the whole vocabulary, on disk as z-lab's users get it."""
    config = drafter_config(verifier.config, "dflash", MANY + 1, verifier.config.vocab_size)
    rng = np.random.default_rng(0)
    parameters = {
        path: np.ones(shape, np.float32) if len(shape) == 1 else (0.02 * rng.standard_normal(shape)).astype(np.float32)
        for path, shape in own_shapes(config).items()
    }
    facts = VerifierFacts(verifier.path.name, ("LlamaForCausalLM",), verifier.config.num_layers)
    save_drafter(directory / "drafter", DrafterContent(config, parameters, None, facts), "z-lab")
    return directory / "drafter"


def against_dflash(verifier: LoadedVerifier, threads: int, rounds: int) -> dict[str, float]:
    """Tokens a second of one greedy answer with the same DFlash drafter, prefill included."""
    with tempfile.TemporaryDirectory() as scratch:
        path = zlab_drafter(verifier, Path(scratch))
        loaded = load_drafter(path, verifier=verifier, dtype=jnp.float32)
        engine = Engine(verifier.config, verifier.module, loaded.module, Plan(drafts=MANY, widths=(MANY,)))
        (prompt,) = prompt_ids(1, verifier.config.vocab_size)
        answers: dict[str, list[int]] = {}

        def jaxspec_run() -> float:
            start = time.perf_counter()
            answers["jaxspec"] = list(engine.generate([prompt], GREEDY)[0].token_ids)
            return NEW_TOKENS / (time.perf_counter() - start)

        runs = {"jaxspec": jaxspec_run, "dflash": dflash_run(verifier.path, path, threads, prompt, answers)}
        rates = take_turns(runs, rounds)
    if answers["jaxspec"] != answers["dflash"]:
        raise RuntimeError("the two loops' greedy answers differ")
    return rates


def dflash_run(
    model: Path, drafter: Path, threads: int, prompt: list[int], answers: dict[str, list[int]]
) -> Callable[[], float]:
    """The same work by dflash_generate; `answers` gets what it makes."""
    import torch
    import transformers
    from dflash.model import DFlashDraftModel, dflash_generate

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    peer = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])

    def run() -> float:
        start = time.perf_counter()
        out = dflash_generate(peer, target, ids, NEW_TOKENS, None)
        answers["dflash"] = out[0, ids.shape[1] :].tolist()
        return NEW_TOKENS / (time.perf_counter() - start)

    return run


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure; default: everything")
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (JAX uses every core)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.model is None:
        from jaxspec import demo

        args.model = demo.ensure()
    compilation_cache.enable()
    verifier = load_verifier(args.model, dtype=jnp.float32)

    figures: dict[str, object] = {}
    if "growth" in args.parts:
        figures["growth_ms"] = grown = growth(verifier.config)
        ratio = grown["dflash"]["ratio"]
        print(f"  K={MANY} over K={FEW} with dflash: {ratio:.2f} (wanted: at most 1.5)")
        if ratio > 1.5:
            print(
                f"  the block's {MANY + 1} slots run either way; the head runs on K of them, the injection on K + 1 rows"
            )
    if "split" in args.parts:
        figures["split_ms"] = table = splits(verifier)
        share, name = max((row["rest_share"], name) for name, row in table.items() if "random" not in name)
        print(f"  neither drafter nor verifier: at most {share:.1%}, {name} (wanted: at most 5 %)")
    if "host" in args.parts:
        figures["host_share"] = shares = host_share(verifier, args.rounds)
        print(f"  at most {max(shares.values()):.2%} (wanted: below 2 %)")
        if max(shares.values()) > 0.02:
            print(f"  that part is handing over the parameters, one by one, and reading {CYCLES} records")
    here = all(importlib.util.find_spec(name) is not None for name in ("torch", "dflash"))
    if "dflash" in args.parts and here:
        figures["tokens_per_s"] = rates = against_dflash(verifier, args.threads, args.rounds)
        print(f"jaxspec {rates['jaxspec']:.1f} tokens/s, dflash in torch {rates['dflash']:.1f}, the same answer")
        print(f"  {rates['jaxspec'] / rates['dflash']:.2f} x (wanted: 1.5)")
    elif "dflash" in args.parts:
        print("torch and dflash are not installed here: run this in the reference environment for the comparison")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

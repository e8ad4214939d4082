"""Plain greedy decoding measured: against transformers + torch on the same weights, by cache capacity, and by block size.

    python tools/bench_decode.py [--model DIR] [--threads 2] [--rounds 3] [--json FILE]

Every figure is a ratio of medians whose runs took turns in this one process, so that a noisy machine disturbs both sides alike. torch is
in the `reference` environment only (`make bench` runs it there); without it the comparison is left out and said to be.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT_TOKENS = 64
NEW_TOKENS = 128
BATCHES = (1, 8)
BLOCKS = (1, 2, 4, 8, 16)
CAPACITIES = (512, 4096)
CONTEXT = 200  # real length at which capacities and blocks are compared
STEPS = 8  # forward passes a measurement of those


def take_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call every run `rounds` times in turn, after one call each to warm up; the median of what each returns."""
    for run in runs.values():
        run()
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seen[name].append(run())
    return {name: statistics.median(values) for name, values in seen.items()}


def prompt_ids(batch: int, vocab_size: int) -> list[list[int]]:
    """`batch` different prompts of PROMPT_TOKENS ids, the same on every run."""
    return [[(7919 * (row + 1) + 104729 * t) % vocab_size for t in range(PROMPT_TOKENS)] for row in range(batch)]


def against_torch(model: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second of generate() by batch and engine; both do the same greedy work of NEW_TOKENS tokens a row."""
    import jaxspec

    engine = jaxspec.Engine.from_pretrained(str(model), dtype="float32")
    vocab_size = engine.config.vocab_size
    params = jaxspec.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    def jaxspec_run(batch: int) -> Callable[[], float]:
        prompts = prompt_ids(batch, vocab_size)

        def run() -> float:
            start = time.perf_counter()
            results = engine.generate(prompts, params)
            return sum(len(result.token_ids) for result in results) / (time.perf_counter() - start)

        return run

    table = {}
    for batch in BATCHES:
        runs = {"jaxspec float32": jaxspec_run(batch)}
        if importlib.util.find_spec("torch") is not None:
            for dtype in ("float32", "bfloat16"):
                runs[f"torch {dtype}"] = torch_run(model, dtype, threads, prompt_ids(batch, vocab_size))
        table[f"batch {batch}"] = take_turns(runs, rounds)
    return table


def torch_run(model: Path, dtype: str, threads: int, prompts: list[list[int]]) -> Callable[[], float]:
    """The same work by transformers' generate()."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    peer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor(prompts)

    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].numel() / (time.perf_counter() - start)

    return run


def forward_costs(model: Path, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a forward pass with its argmax: of one token by cache capacity, and by block size."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxspec.checkpoint.load import load_verifier
    from jaxspec.layers.cache import KVCache

    loaded = load_verifier(str(model), dtype=jnp.float32)
    layers = [layer.attention for layer in loaded.config.layers]
    graphdef, state = nnx.split(loaded.module)
    leaves, treedef = jax.tree.flatten(state)

    def passes(leaves: list[jax.Array], cache: KVCache, tokens: jax.Array) -> tuple[KVCache, jax.Array]:
        decoder = nnx.merge(graphdef, treedef.unflatten(leaves))

        def one(step: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            del step
            hidden, _, cache = decoder(carry[1], carry[0])
            return cache, jax.lax.argmax(decoder.logits(hidden), 2, jnp.int32)

        return jax.lax.fori_loop(0, STEPS, one, (cache, tokens))

    program = jax.jit(passes, donate_argnums=1)

    def measure(capacity: int, block: int) -> Callable[[], float]:
        caches = [KVCache.empty(layers, 1, capacity, jnp.float32)]
        tokens = jnp.ones((1, block), jnp.int32)

        def run() -> float:
            cache = dataclasses.replace(caches.pop(), length=jnp.full(1, CONTEXT, jnp.int32))
            start = time.perf_counter()
            cache, out = program(leaves, cache, tokens)
            out.block_until_ready()
            elapsed = time.perf_counter() - start
            caches.append(cache)
            return elapsed / STEPS * 1e3

        return run

    by_capacity = take_turns({str(capacity): measure(capacity, 1) for capacity in CAPACITIES}, rounds)
    by_block = take_turns({str(block): measure(CAPACITIES[0], block) for block in BLOCKS}, rounds)
    return by_capacity, by_block


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (JAX uses every core)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.model is None:
        from jaxspec import demo

        args.model = demo.ensure()

    figures: dict[str, object] = {}
    by_capacity, by_block = forward_costs(args.model, 3 * args.rounds)
    figures["capacity_ms"], figures["block_ms"] = by_capacity, by_block
    small, large = (by_capacity[str(capacity)] for capacity in CAPACITIES)
    print(f"one token at length {CONTEXT}: capacity {CAPACITIES[0]} {small:.1f} ms, {CAPACITIES[1]} {large:.1f} ms")
    print(f"  ratio {large / small:.2f} (wanted: at most 1.15)")
    for block in BLOCKS:
        print(f"block of {block:2d}: {by_block[str(block)]:6.1f} ms, {by_block[str(block)] / by_block['1']:.2f} of one")
    print("  wanted: at most 1.7 at 8")
    figures["tokens_per_s"] = table = against_torch(args.model, args.threads, args.rounds)
    for batch, rates in table.items():
        print(f"{batch}: " + ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items()))
        if "torch float32" in rates:
            ours, best = rates["jaxspec float32"], max(rates["torch float32"], rates["torch bfloat16"])
            print(
                f"  {ours / rates['torch float32']:.2f} x torch float32 (wanted: 1.5), {ours / best:.2f} x its best (1.2)"
            )
        else:
            print("  torch is not installed here: run `make bench` for the comparison")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

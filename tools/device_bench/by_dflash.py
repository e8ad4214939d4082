"""dflash 0.1's own loop in torch at the shape of `cycles`, in a process of its own.

    python -m device_bench.by_dflash [--toy]

Prints one JSON object: milliseconds a cycle, by block size. Weights are random and drafts hardly ever hold, so that a cycle is about a
token; what a cycle costs doesn't depend on that.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import dflash.model
import torch
from aot_gate.programs import DATA
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT, CYCLES, ROUNDS = 1024, 32, 3
BLOCKS = (8, 16)  # K + 1
TOY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


def configs(toy: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the verifier and the drafter, as published, or tiny ones."""
    verifier = json.loads((DATA / "qwen3_8b.json").read_text())
    drafter = json.loads((DATA / "drafters" / "zlab_qwen3_8b_dflash.json").read_text())["config"]
    if toy:
        own = {**drafter["dflash_config"], "mask_token_id": 255, "target_layer_ids": [0, 1]}
        verifier = {**verifier, **TOY, "layer_types": None, "max_window_layers": 2}
        drafter = {**drafter, **TOY, "layer_types": None, "max_window_layers": 2, "num_target_layers": 2}
        drafter["dflash_config"] = own
    return verifier, drafter


def main() -> int:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        dflash.model._cuda_time = time.perf_counter
    context, cycles, rounds = (16, 2, 1) if args.toy else (CONTEXT, CYCLES, ROUNDS)
    verifier, drafter = (Qwen3Config(**config) for config in configs(args.toy))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        target, draft = Qwen3ForCausalLM(verifier).eval(), DFlashDraftModel(drafter).eval()
        prompt = torch.randint(0, verifier.vocab_size - 1, (1, context))
    figures = {}
    for block in BLOCKS:
        seen = []
        for _ in range(rounds + 1):  # the first warms up
            stats = dflash_generate(draft, target, prompt, cycles, None, block_size=block, return_stats=True)
            seen.append(stats.time_per_output_token * stats.num_output_tokens / len(stats.acceptance_lengths))
        figures[f"K = {block - 1}"] = 1000 * statistics.median(seen[1:])
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "ms_per_cycle": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make the golden fixtures of tests/test_parity.py with transformers.

Run in an environment with the `reference` extra (CPU torch):

    python tools/make_goldens.py [CASE ...]

For each case, tests/goldens/CASE/ becomes an ordinary Hugging Face directory (config.json, generation_config.json, model.safetensors) of a
small random float32 model, beside
- outputs.npz: `tokens` int64 [B, T]; `logits` float32 [B, T, V]; `taps` float32 [L+1, B, T, D], the residual stream in the aux convention
  (SPEC 0.1: entry k enters layer k, entry L enters the final norm); `greedy` int64 [B, 32], the greedy continuation of each whole row.
- meta.json: peers and versions, seed, and the smallest gap between the two largest logits along the greedy continuation.

Attention is transformers' eager implementation, everything is float32, and a second run writes the same bytes.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs the hub: make sure that nothing asks it

import numpy as np
import safetensors
import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
BATCH, LENGTH, GREEDY = 3, 24, 32
VOCAB = 96
MIN_GAP = 0.005  # of the two largest logits on the greedy path: far above float32 noise, so tokens must agree exactly


@dataclass(frozen=True)
class Case:
    """A small model. `published` names config.json keys to write as hub checkpoints do (transformers 5.24 writes per_layer_config)."""

    make: Callable[[], PreTrainedModel]
    seed: int
    published: dict[str, int | None] | None = None


def common(**fields: object) -> dict[str, object]:
    """Sizes that most cases share: G = 2, H = 16, N * H = 64 over D = 32."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | fields


def llama(**fields: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**common(**fields)))


def qwen3(**fields: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**common(**fields)))


def qwen3_moe(**fields: object) -> PreTrainedModel:
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common(**(sizes | fields)), experts_implementation="eager"))


def gemma3(**fields: object) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**common(**fields)))


def gemma4(**fields: object) -> PreTrainedModel:
    sizes = {"sliding_window": 8, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
    sizes["vocab_size_per_layer_input"] = VOCAB
    return Gemma4ForCausalLM(Gemma4TextConfig(**common(**(sizes | fields)), experts_implementation="eager"))


def default_rope(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


SLIDING, FULL = "sliding_attention", "full_attention"

CASES: dict[str, Case] = {
    "llama": Case(lambda: llama(head_dim=8, rope_parameters=default_rope(500000.0)), seed=12),
    "llama_tied_bias": Case(
        lambda: llama(
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            # the wavelengths of H = 16 fall in all three bands of this scaling
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        seed=2,
    ),
    "llama_linear": Case(
        lambda: llama(
            num_hidden_layers=2, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        ),
        seed=25,
    ),
    "qwen3": Case(
        lambda: qwen3(
            max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
        seed=4,
    ),
    "qwen3_window": Case(
        lambda: qwen3(
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
            tie_word_embeddings=True,
            rope_parameters=default_rope(1000000.0),
        ),
        seed=5,
    ),
    "qwen3_moe": Case(
        lambda: qwen3_moe(norm_topk_prob=True, num_hidden_layers=2, rope_parameters=default_rope(1000000.0)), seed=6
    ),
    "qwen3_moe_raw": Case(
        lambda: qwen3_moe(
            norm_topk_prob=False,
            num_hidden_layers=2,
            mlp_only_layers=[0],
            use_sliding_window=True,  # every layer of this family slides then
            sliding_window=8,
            rope_parameters=default_rope(1000000.0),
        ),
        seed=18,
    ),
    "gemma3": Case(
        lambda: gemma3(
            num_hidden_layers=4,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING],
            sliding_window=8,
            query_pre_attn_scalar=24,
            final_logit_softcapping=25.0,
            rope_parameters={
                FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                SLIDING: default_rope(10000.0),
            },
        ),
        seed=8,
    ),
    # the shape of gemma-4-31B
    "gemma4_dense": Case(
        lambda: gemma4(
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            attention_k_eq_v=True,
            global_head_dim=32,
            num_global_key_value_heads=1,
        ),
        seed=9,
        published={"global_head_dim": 32, "num_global_key_value_heads": 1},
    ),
    # the shape of gemma-4-26B-A4B; its config.json stays as transformers 5.24 writes it
    "gemma4_moe": Case(
        lambda: gemma4(
            layer_types=[SLIDING, SLIDING, FULL],
            attention_k_eq_v=True,
            global_head_dim=32,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=12,
        ),
        seed=10,
    ),
    # the shape of gemma-4-E2B and E4B: layers 3 and 4 read the keys and values of layers 1 and 2
    "gemma4_e": Case(
        lambda: gemma4(
            num_hidden_layers=5,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL],
            intermediate_size=24,
            head_dim=8,
            global_head_dim=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB + 8,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
        seed=11,
        published={"global_head_dim": 16, "num_global_key_value_heads": None},
    ),
}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter, and Gemma-4's layer scalars, with seeded noise.

    Nothing keeps the value it starts with: a norm, bias or scale that an implementation leaves out must show. Matrices get a standard
    deviation of 1 / sqrt(fan in), so that each layer changes the stream about as much as the last.
    """
    generator = torch.Generator().manual_seed(seed)
    offset_norms = model.config.model_type == "gemma3_text"
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("layer_scalar"):
            value = 0.8 + 0.1 * noise
        elif name.endswith(("router.scale", "per_expert_scale")):
            value = 1.0 + 0.3 * noise
        elif "norm" in name:
            value = 0.2 * noise + (0.0 if offset_norms else 1.0)
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 2.0 * noise / math.sqrt(tensor.shape[1])  # wide logits: few near ties
        elif tensor.ndim in (2, 3):
            value = noise / math.sqrt(tensor.shape[-1])
        else:
            raise ValueError(f"no rule for {name} {list(tensor.shape)}")
        tensor.data.copy_(value)


def publish(directory: Path, keys: dict[str, int | None]) -> None:
    """Rewrite a Gemma-4 config.json the way the hub's checkpoints have it, by `keys` in place of per_layer_config."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["per_layer_config"]
    path.write_text(json.dumps(dict(sorted((config | keys).items())), indent=2) + "\n")


def forward(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] and the residual stream entering each layer and the final norm [L+1, B, T, D]."""
    taps: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        taps.append(args[0].detach().clone())

    decoder = model.model
    handles = [module.register_forward_pre_hook(keep) for module in (*decoder.layers, decoder.norm)]
    output = model(tokens, use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for ours, theirs in zip(taps[:-1], output.hidden_states[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # all but the last of HF's are aux ids already
    return output.logits, torch.stack(taps)


def greedy(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """transformers' greedy continuation [B, GREEDY] past any EOS, and the smallest gap of the two largest logits on its path."""
    config = GenerationConfig(do_sample=False, max_new_tokens=GREEDY, pad_token_id=0, eos_token_id=None)
    model.generation_config.eos_token_id = None
    whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    logits = model(whole, use_cache=False).logits[:, LENGTH - 1 : -1]
    top = logits.topk(2, dim=-1)
    continuation = whole[:, LENGTH:]
    if continuation.shape[1] != GREEDY or not torch.equal(top.indices[..., 0], continuation):
        raise RuntimeError(
            "transformers' cached greedy decoding differs from its own full forward pass; try another seed"
        )
    return continuation, float((top.values[..., 0] - top.values[..., 1]).min())


def make(name: str, case: Case) -> None:
    """Write one case's directory, replacing the old one only if all went well."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / name
        fill(directory, name, case)
        shutil.rmtree(GOLDENS / name, ignore_errors=True)
        shutil.copytree(directory, GOLDENS / name)


def fill(directory: Path, name: str, case: Case) -> None:
    """Make the model and write it and its reference outputs into `directory`."""
    torch.manual_seed(case.seed)  # transformers initialises before randomise() overwrites
    model = case.make().to(torch.float32).eval()
    randomise(model, case.seed)
    model.save_pretrained(directory)
    if case.published is not None:
        publish(directory, case.published)

    # reference outputs come from the files, as any user of the directory would get them
    model = type(model).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1000 + case.seed)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    with torch.no_grad():
        logits, taps = forward(model, tokens)
        continuation, gap = greedy(model, tokens)
    if gap < MIN_GAP:
        raise RuntimeError(f"{name}: the greedy path has a near tie (gap {gap:.2g}); try another seed")
    np.savez(
        directory / "outputs.npz",
        tokens=tokens.numpy(),
        logits=logits.numpy(),
        taps=taps.numpy(),
        greedy=continuation.numpy(),
    )
    meta = {
        "case": name,
        "seed": case.seed,
        "attention": "eager",
        "dtype": "float32",
        "greedy_min_gap": round(gap, 4),
        "peers": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
        "class": type(model).__name__,
        "tool": "tools/make_goldens.py",
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{name}: {size / 1000:.0f} kB, |logits| <= {logits.abs().max():.3g}, |taps| <= {taps.abs().max():.3g}, gap {gap:.3g}"
    )


def main() -> None:
    """Make the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}; all by default")
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    torch.set_num_threads(1)  # one order of summation
    transformers.logging.set_verbosity_error()
    for name in args.cases or CASES:
        make(name, CASES[name])


if __name__ == "__main__":
    main()

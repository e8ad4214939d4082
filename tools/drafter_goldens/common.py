"""What the fixtures of all peers share: sizes, the tiny verifiers, random weights, and the files of a case."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

GOLDENS = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "drafters"
WIDTH, VOCAB, DRAFT_VOCAB, MASK = 32, 96, 64, 95
TARGET_LAYERS = {"verifier": 8, "verifier_gemma": 4}
SLIDING, FULL = "sliding_attention", "full_attention"
LENGTH = 20  # positions with features
ENDS = (5, 9, 13)  # positions committed when a draft is made; consecutive cycles of one sequence
BLOCK = 6  # slots of a block drafter
DRAFTS = 4  # of EAGLE-3 and P-EAGLE
MIN_GAP = 0.005  # of the two largest logits wherever a draft is the most likely token: far above float32 noise


@dataclass(frozen=True)
class Outputs:
    """A case's reference, float32. A is the number of ENDS, K the number of drafts.

    `logits`: EAGLE-3 and P-EAGLE [1, T, Vd], the first draft after every position; block drafters [A, B, Vd], every slot of the block
    at position ENDS[i], with the true tokens before it. `confidence` [A, B]: likewise, logits of the confidence head.
    `draft_logits` [A, K, Vd], `draft_tokens` [A, K] (verifier ids), `draft_confidence` [A, K]: greedy drafting at ENDS[i].
    """

    logits: torch.Tensor
    draft_logits: torch.Tensor
    draft_tokens: torch.Tensor
    confidence: torch.Tensor | None = None
    draft_confidence: torch.Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """A sequence [1, T + 1] and the features [1, T, n * D] of its first T tokens."""

    sequence: torch.Tensor
    features: torch.Tensor

    @property
    def next_tokens(self) -> torch.Tensor:
        """The token after each of the T positions, [1, T]."""
        return self.sequence[:, 1:]

    def block(self, end: int) -> torch.Tensor:
        """The true tokens [1, B] from position `end` on."""
        return self.sequence[:, end : end + BLOCK]


def qwen3_config(**fields: object) -> Qwen3Config:
    """N * H = D, G = 2."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    return Qwen3Config(**(sizes | fields))


def sliding(types: list[str], window: int) -> Callable[[], Qwen3Config]:
    """One layer of each of `types`, the sliding ones with `window`."""
    return lambda: qwen3_config(
        num_hidden_layers=len(types), layer_types=types, use_sliding_window=True, sliding_window=window
    )


def gemma4_config(**fields: object) -> Gemma4TextConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": TARGET_LAYERS["verifier_gemma"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 8,
        "max_position_embeddings": 256,
        "final_logit_softcapping": 5.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return Gemma4TextConfig(**(sizes | fields))


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every parameter, and Gemma-4's layer scalars, with seeded noise that bfloat16 holds exactly.

    Nothing keeps the value it starts with: a norm, bias or scale that an implementation leaves out must show. Matrices get a standard
    deviation of 1 / sqrt(fan in), embeddings, heads and the Markov head more, so that logits are wide and every part moves them.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("layer_scalar"):
            value = 0.8 + 0.1 * noise
        elif "norm" in name:
            value = 1.0 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif name == "mask_hidden":
            value = noise
        elif "embed_tokens" in name or "lm_head" in name or "markov_w" in name:
            value = 2.0 * noise / math.sqrt(tensor.shape[1])
        elif tensor.ndim == 2:
            value = noise / math.sqrt(tensor.shape[-1])
        else:
            raise ValueError(f"no rule for {name} {list(tensor.shape)}")
        tensor.data.copy_(value.to(torch.bfloat16))


def save(model: PreTrainedModel, directory: Path) -> None:
    """As published checkpoints are: bfloat16 weights and a config.json; not the copy of its own source that speculators adds."""
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in directory.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def edit_config(directory: Path, changes: dict[str, object], drop: tuple[str, ...] = ()) -> None:
    """Rewrite config.json with some keys changed or left out."""
    path = directory / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(dict(sorted((config | changes).items())), indent=2) + "\n")


def gemma4_published(head_dim: int, kv_heads: int | None) -> dict[str, object]:
    """The keys in which the hub's Gemma-4 files hold what transformers 5.24 writes as per_layer_config."""
    return {"global_head_dim": head_dim, "num_global_key_value_heads": kv_heads}


def make_verifiers(directory: Path) -> None:
    """The two verifiers, ordinary Hugging Face directories; each case names the one it is for."""
    for name, seed, make in (
        ("verifier", 101, lambda: Qwen3ForCausalLM(qwen3_config(num_hidden_layers=TARGET_LAYERS["verifier"]))),
        ("verifier_gemma", 102, lambda: Gemma4ForCausalLM(gemma4_config())),
    ):
        model = make()
        randomise(model, seed)
        shutil.rmtree(directory / name, ignore_errors=True)
        save(model, directory / name)
    edit_config(directory / "verifier_gemma", gemma4_published(16, 1), drop=("per_layer_config",))


def load_verifier(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def aux_features(verifier: PreTrainedModel, tokens: torch.Tensor, aux_ids: list[int]) -> torch.Tensor:
    """Features [1, T, n * D] by aux ids (SPEC 0.1): HF's hidden_states, but the last before the final norm."""
    last: list[torch.Tensor] = []
    handle = verifier.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    states = verifier(tokens, use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    return torch.cat([(*states[:-1], last[0])[k] for k in aux_ids], dim=-1)


def sequence(seed: int) -> torch.Tensor:
    """Random tokens [1, T + 1]; no mask among them."""
    return torch.randint(0, MASK, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + seed))


def vocabulary_maps(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """t2d bool [V] and d2t int64 [Vd] (offsets) of a random reduced vocabulary."""
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2000 + seed))[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return t2d, chosen - torch.arange(DRAFT_VOCAB)


def gap(logits: torch.Tensor) -> float:
    """The smallest distance of the two largest logits."""
    top = logits.topk(2, dim=-1).values
    return float((top[..., 0] - top[..., 1]).min())


def write(directory: Path, case: str, seed: int, inputs: Inputs, outputs: Outputs, meta: dict[str, object]) -> None:
    """outputs.npz and meta.json beside the checkpoint."""
    smallest = gap(outputs.draft_logits)
    if smallest < MIN_GAP:
        raise RuntimeError(f"{case}: a draft is a near tie (gap {smallest:.2g}); try another seed")
    arrays = {"sequence": inputs.sequence, "features": inputs.features, "ends": torch.tensor(ENDS)}
    arrays |= {name: value for name, value in vars(outputs).items() if value is not None}
    np.savez_compressed(directory / "outputs.npz", **{name: value.detach().numpy() for name, value in arrays.items()})
    peers = {"torch": torch.__version__, "transformers": transformers.__version__}
    meta = {
        "case": case,
        "seed": seed,
        "dtype": "float32 on bfloat16 weights",
        "draft_min_gap": round(smallest, 4),
        **meta,
        "peers": peers | meta["peers"],
        "tool": "tools/make_drafter_goldens.py",
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{case}: {size / 1000:.0f} kB, |logits| <= {outputs.logits.abs().max():.3g}, gap {smallest:.3g}", flush=True)


def cycles() -> Iterator[tuple[int, int]]:
    """(start, end) of the rows that each cycle commits."""
    return zip((0, *ENDS[:-1]), ENDS, strict=True)

"""Writes tests/goldens/rope.json: inverse frequencies by transformers for every kind of rotary embedding.

Run with the `reference` extra (CPU torch): python tools/make_rope_goldens.py
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import Gemma4TextConfig, GlmConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUTPUT = Path(__file__).parent.parent / "tests" / "goldens" / "rope.json"

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

# name -> (head width, rope_parameters); all with a Llama config of 131072 positions
LLAMA_CASES = {
    "default": (128, {"rope_type": "default", "rope_theta": 1e6}),
    "default_small_theta": (64, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (256, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}),
    "linear_partial": (64, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "llama3": (128, {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}),
    "llama3_32": (64, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}),
    "yarn": (128, {**YARN, "rope_theta": 1e6}),
    "yarn_untruncated": (128, {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "rope_theta": 1e6}),
    "yarn_attention_factor": (64, {**YARN, "attention_factor": 1.25, "rope_theta": 1e4}),
    "yarn_mscale": (64, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "rope_theta": 1e4}),
    "proportional": (512, {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}),
}


def main() -> None:
    cases = {}
    for name, (head_dim, parameters) in LLAMA_CASES.items():
        config = LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters=dict(parameters),
        )
        kind = parameters["rope_type"]
        make = LlamaRotaryEmbedding(config).compute_default_rope_parameters
        if kind != "default":
            make = ROPE_INIT_FUNCTIONS[kind]
        cases[name] = _case(head_dim, parameters, make(config, device="cpu"))

    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    glm = GlmConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=dict(parameters))
    cases["default_partial"] = _case(
        128, parameters, GlmRotaryEmbedding.compute_default_rope_parameters(glm, device="cpu")
    )

    gemma = Gemma4TextConfig(num_hidden_layers=6)
    parameters = gemma.rope_parameters["full_attention"]
    layer = gemma.per_layer_config["full_attention"]
    made = ROPE_INIT_FUNCTIONS["proportional"](layer, "cpu", layer_type="full_attention")
    cases["gemma4_full"] = _case(512, parameters, made)

    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}"
    OUTPUT.write_text(json.dumps({"made_by": made_by, "cases": cases}, indent=1) + "\n")


def _case(head_dim: int, parameters: dict, made: tuple[torch.Tensor, float]) -> dict:
    frequencies, scaling = made
    return {
        "head_dim": head_dim,
        "rope_parameters": parameters,
        "frequencies": [float(f"{value:.9g}") for value in frequencies.tolist()],
        "scaling": scaling,
    }


if __name__ == "__main__":
    main()

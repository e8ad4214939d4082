"""Tiny drafters with random weights, as content to write: no module is built."""

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.drafters.content import DrafterContent
from jaxspec.checkpoint.drafters.export import save_drafter
from jaxspec.checkpoint.drafters.load import own_shapes
from jaxspec.checkpoint.drafters.parsed import VerifierFacts
from jaxspec.config import AttentionConfig, LayerConfig, RopeConfig
from jaxspec.drafters.config import (
    BlockConfig,
    ConfidenceConfig,
    DrafterConfig,
    EagleConfig,
    MarkovConfig,
    MarkovKind,
    Method,
)

V, VD, D, TAPS, MASK = 259, 96, 32, (0, 2), 258  # sizes of tests/tiny.py's verifier
ROPE = RopeConfig(theta=1e6, head_dim=8)
FACTS = VerifierFacts("owner/verifier", ("LlamaForCausalLM",), num_layers=2)


def layers(
    count: int = 2,
    *,
    wide: bool = False,
    qk_norm: bool = True,
    causal: bool | None = None,
    windows: tuple[int | None, ...] = (None, None),
    from_block: bool = False,
    bias: bool = False,
) -> tuple[LayerConfig, ...]:
    """`causal` None: as the block formats have it, sliding layers causal and full ones not."""
    return tuple(
        LayerConfig(
            AttentionConfig(
                4,
                2,
                8,
                ROPE,
                8**-0.5,
                index,
                window=windows[index],
                qk_norm=qk_norm,
                bias=bias,
                out_bias=bias,
                causal=windows[index] is not None if causal is None else causal,
                window_from_block=from_block and windows[index] is not None,
                in_width=2 * D if wide and index == 0 else None,
            ),
            mlp_width=48,
            activation="silu",
        )
        for index in range(count)
    )


def eagle(method: Method, **changes: Any) -> DrafterConfig:
    count = 1 if method == "eagle3" else 2
    made = DrafterConfig(
        method=method,
        vocab_size=V,
        draft_vocab_size=V,
        width=D,
        taps=TAPS,
        layers=layers(count, wide=True, qk_norm=False, causal=True),
        norm_eps=1e-6,
        max_positions=512,
        own_embed=True,
        own_head=True,
        mask_token=MASK if method == "peagle" else None,
        eagle=EagleConfig(norm_before_residual=False),
        speculative_tokens=5,
    )
    return replace(made, **changes)


def block(method: Method, **changes: Any) -> DrafterConfig:
    made = DrafterConfig(
        method=method,
        vocab_size=V,
        draft_vocab_size=V,
        width=D,
        taps=TAPS,
        layers=layers(),
        norm_eps=1e-6,
        max_positions=512,
        own_embed=False,
        own_head=False,
        mask_token=MASK,
        block=BlockConfig(6, sample_from_anchor=method == "dspark"),
        speculative_tokens=6 if method == "dspark" else 5,
    )
    return replace(made, **changes)


def spark(kind: MarkovKind = "vanilla", with_markov: bool = True, **changes: Any) -> DrafterConfig:
    heads = BlockConfig(6, True, MarkovConfig(kind, 4), ConfidenceConfig(with_markov))
    return block("dspark", **{"block": heads, **changes})


def gemma(v_from_k: bool = True) -> DrafterConfig:
    """DeepSpec's Gemma-4 style."""
    rope = RopeConfig(theta=1e6, head_dim=16, kind="proportional", partial=0.25)
    attention = AttentionConfig(4, 1, 16, rope, 1.0, 0, qk_norm=True, v_norm=True, v_from_k=v_from_k, causal=False)
    return spark(
        own_embed=True,
        own_head=True,
        embed_scale=D**0.5,
        logit_softcap=30.0,
        layers=tuple(
            LayerConfig(replace(attention, kv_source=index), 48, "gelu_pytorch_tanh", sandwich=True, scalar=True)
            for index in range(2)
        ),
    )


REDUCED = {"draft_vocab_size": VD, "own_head": True}
OWN = {"own_embed": True, "own_head": True}


def content(config: DrafterConfig, dtype: Any = ml_dtypes.bfloat16, facts: VerifierFacts = FACTS) -> DrafterContent:
    """Random parameters, the same for the same config."""
    rng = np.random.default_rng(zlib.crc32(repr(config).encode()))
    parameters = {
        path: rng.standard_normal(shape, dtype=np.float32).astype(dtype) for path, shape in own_shapes(config).items()
    }
    target_ids = None
    if config.reduced_vocab:
        target_ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False)).astype(np.int32)
    return DrafterContent(config, parameters, target_ids, facts)


def write(directory: Path, config: DrafterConfig, to: str, facts: VerifierFacts = FACTS) -> Path:
    """A checkpoint of random weights in format `to`."""
    save_drafter(directory, content(config, facts=facts), to)
    return directory


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def edit_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")

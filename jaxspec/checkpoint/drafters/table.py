"""Tensor names of drafters. All formats share them but for a few old spellings, so one table serves reading and writing."""

import re
from collections.abc import Mapping

import numpy as np

from jaxspec.checkpoint.source import Source, StoredTensor
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.names import ATTENTION, MLP, PRE_NORMS, QK_NORMS, SANDWICH_NORMS, Rule, Table

EMBED, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"

_COMMON = (
    Rule("vocabulary.embed.weight", EMBED),
    Rule("vocabulary.head.weight", HEAD),
    Rule("fc.weight", "fc.weight"),
    Rule("hidden_norm.weight", "hidden_norm.weight"),
    Rule("norm.weight", "norm.weight"),
    Rule("input_norm.weight", "input_norm.weight"),
    Rule("fc_norms.{i}.weight", "fc_norm.{i}.weight"),
    Rule("mask_hidden", "mask_hidden", leading=2),
    Rule("layers.{i}.hidden_norm.weight", "layers.{i}.hidden_norm.weight"),
    *ATTENTION,
    *QK_NORMS,
    *MLP,
    Rule("markov.w1.weight", "markov_head.markov_w1.weight"),
    Rule("markov.w2.weight", "markov_head.markov_w2.weight"),
    Rule("markov.gate.weight", "markov_head.gate_proj.weight"),
    Rule("markov.gate.bias", "markov_head.gate_proj.bias"),
    Rule("markov.joint.weight", "markov_head.joint_proj.weight"),
    Rule("markov.joint.bias", "markov_head.joint_proj.bias"),
    Rule("confidence.projection.weight", "confidence_head.proj.weight"),
    Rule("confidence.projection.bias", "confidence_head.proj.bias"),
)
_PLAIN = Table((*_COMMON, *PRE_NORMS))
_GEMMA = Table((*_COMMON, *SANDWICH_NORMS, Rule("layers.{i}.scalar", "layers.{i}.layer_scalar")))

# What speculators keeps of the verifier while it trains, and rotary tables: no part of a drafter.
_IGNORED = re.compile(r"(verifier_(lm_head|norm)\.weight|(.*\.)?rotary_emb\.\w*inv_freq|d2t|t2d)")

# Old spellings: EAGLE-3's one layer, the sequential heads of SpecForge's first DSpark files.
_SPELLINGS = (("midlayer.", "layers.0."), ("logit_head.", ""))


def table(config: DrafterConfig) -> Table:
    """The names of a drafter's tensors: the norms of a Gemma-style layer are called otherwise."""
    return _GEMMA if config.layers[0].sandwich else _PLAIN


def ignored(name: str) -> bool:
    """Tensors that are no parameter: vocabulary maps (read on their own) and what carries nothing."""
    return _IGNORED.fullmatch(name) is not None


class CanonicalSource:
    """A checkpoint's tensors under the table's names: without a `model.` before them, and without old spellings."""

    def __init__(self, source: Source):
        self._source = source
        self._stored: dict[str, str] = {}
        for name in source.tensors:
            other = self._stored.setdefault(canonical(name), name)
            if other != name:
                raise InputError(
                    f"{source.where}: tensors {other} and {name} are the same parameter; only one of them can be"
                )
        self.where = source.where

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By canonical name."""
        return {name: self._source.tensors[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as stored."""
        return self._source.read(self._stored[name])


def canonical(name: str) -> str:
    """A stored tensor's name as the table has it."""
    name = name.removeprefix("model.")
    for old, new in _SPELLINGS:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name

"""A tiny verifier, plain decoding with it, and one engine whose drafts a table says; every test of a module shares what they compile."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tiny import tiny_config, tiny_decoder

from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.result import Result
from jaxspec.evaluation.scripted import Scripted, oracle_table

VERIFIER = tiny_config()
DECODER = tiny_decoder(VERIFIER)
V = VERIFIER.vocab_size
K = 5  # drafts
ROWS, POSITIONS = 8, 512  # of a table
SHAPE = (ROWS, POSITIONS, K)
FIRST = 0x4E00


class Characters:
    """A tokenizer of one character a token."""

    has_chat_template = False

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(FIRST + token) for token in tokens)


def ragged_prompts(seed: int = 0) -> list[list[int]]:
    """A batch of ROWS; no two of a length, shortest first, so that it keeps its order."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, length).tolist() for length in (1, 2, 3, 5, 9, 17, 24, 31)]


PROMPTS = ragged_prompts()


def plain_engine(**options: Any) -> Engine:
    return Engine(VERIFIER, DECODER, tokenizer=Characters(), max_batch_size=ROWS, **options)


class ScriptedEngine:
    """An engine with another table for every call."""

    def __init__(self, **plan: Any):
        drafter = Scripted(VERIFIER, np.zeros(SHAPE))
        self.engine = Engine(
            VERIFIER,
            DECODER,
            drafter,
            Plan(**{"drafts": K, "widths": (K,), **plan}),
            tokenizer=Characters(),
            max_batch_size=ROWS,
        )

    def generate(self, table: np.ndarray, params: SamplingParams | Sequence[SamplingParams]) -> list[Result]:
        """Answers to PROMPTS, row b drafting by table[b]."""
        self.engine.programs.set_drafter(Scripted(VERIFIER, table))
        return self.engine.generate(PROMPTS, params)


def tokens_of(results: Sequence[Result]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


def oracle(answers: Sequence[Sequence[int]]) -> np.ndarray:
    """The table that drafts the answers to PROMPTS."""
    return oracle_table([prompt + list(answer) for prompt, answer in zip(PROMPTS, answers, strict=True)], SHAPE)

"""Drafters' methods and engines' programs, compiled for tests: tiny models, so that compiling is the cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import numpy as np
from flax import nnx

from jaxspec.drafters.base import Choose, Context, Drafter, Proposal, greedy
from jaxspec.layers.cache import KVCache

QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # the same HLO, compiled faster


@contextmanager
def quick_programs() -> Iterator[None]:
    """What `decoding.programs` compiles meanwhile is compiled with QUICK_COMPILE."""
    compile_ = jax.stages.Lowered.compile
    with mock.patch.object(jax.stages.Lowered, "compile", lambda lowered: compile_(lowered, QUICK_COMPILE)):
        yield


class Jitted:
    """Every method compiles once a shape. Arguments may be NumPy arrays: making them costs no compilation."""

    def __init__(self, drafter: Drafter):
        self.config = drafter.config
        ids = drafter.vocabulary.target_ids
        self.target_ids = None if ids is None else np.asarray(ids[...])  # [Vd]
        graphdef, self._state = nnx.split(drafter)

        def method(name: str, static: tuple[int, ...] = ()) -> Callable:
            def run(state: nnx.State, *arguments: object) -> object:
                return getattr(nnx.merge(graphdef, state), name)(*arguments)

            return partial(jax.jit(run, static_argnums=static, compiler_options=QUICK_COMPILE), self._state)

        self._draft = method("draft", static=(3, 4))
        self.prefill: Callable[[Context, KVCache], KVCache] = method("prefill")
        self.logits: Callable[[np.ndarray, np.ndarray], jax.Array] = method("logits")
        self.heads: Callable[[np.ndarray, np.ndarray], tuple[jax.Array, jax.Array | None]] = method("heads")  # DSpark

    def draft(self, context: Context, cache: KVCache, drafts: int, choose: Choose = greedy) -> tuple[Proposal, KVCache]:
        return self._draft(context, cache, drafts, choose)


def padded_context(features: np.ndarray, tokens: np.ndarray, start: int, stop: int, rows: int) -> Context:
    """Rows start..stop-1 of features [1, T, F] and tokens [1, T], and rubbish behind them that doesn't count, `rows` in all."""
    pad = ((0, 0), (0, rows - (stop - start)))
    return Context(
        np.pad(features[:, start:stop], (*pad, (0, 0)), constant_values=100),
        np.pad(tokens[:, start:stop], pad).astype(np.int32),
        np.full(1, stop - start, np.int32),
    )

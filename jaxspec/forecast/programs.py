"""An engine's programs on shapes alone: lowered for some device, run nowhere, no weight allocated."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxspec.checkpoint.drafters.load import abstract_drafter
from jaxspec.checkpoint.load import abstract_decoder
from jaxspec.config import VerifierConfig
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.loop import MAX_CYCLES
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.programs import MIN_STOP_IDS, Key, Programs
from jaxspec.decoding.sampling import SamplingRows
from jaxspec.decoding.state import DecodeState, Requests
from jaxspec.drafters.config import DrafterConfig

# Lowers a jitted function for arguments given as arrays or shapes.
Lower = Callable[[jax.stages.Wrapped, tuple[Any, ...]], jax.stages.Lowered]


def lower_here(jitted: jax.stages.Wrapped, arguments: tuple[Any, ...]) -> jax.stages.Lowered:
    """For JAX's default device."""
    return jitted.lower(*jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments))


class AbstractPrograms(Programs):
    """Programs that are lowered instead of run, and give the shapes of their results.

    Attributes:
        decoder: the verifier, with shapes in place of weights.
        drafter: likewise, or None.
        lowered: what has been lowered so far, by the program's name.
    """

    def __init__(
        self,
        verifier: VerifierConfig,
        drafter: DrafterConfig | None,
        plan: Plan,
        dtype: DTypeLike,
        lower: Lower = lower_here,
    ):
        """Of these models with weights and caches of `dtype`."""
        self.decoder = abstract_decoder(verifier, dtype)
        self.drafter = None if drafter is None else abstract_drafter(drafter, dtype)
        super().__init__(verifier, self.decoder, self.drafter, plan)
        self._lower = lower
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def _program(self, key: Key, build: Callable[[], jax.stages.Wrapped], arguments: tuple[object, ...]) -> Any:
        lowered = self.lowered[str(key[0])] = self._lower(build(), arguments)
        return lambda *_: lowered.out_info

    def lower_all(self, batch: int, capacity: int, prefill: int) -> dict[str, jax.stages.Lowered]:
        """What the engine compiles to answer B = `batch` greedy prompts with caches of S = `capacity` slots: the empty caches, a prefill
        call of T = `prefill` tokens, and the decode loop round the cycle."""
        tokens = np.zeros((batch, prefill + 1), np.int32)
        rows: Any = np.zeros(batch, np.int32)  # only its shape counts, as everywhere here
        cache, draft = self.empty(rows, capacity)
        cache, draft = self.prefill(cache, draft, tokens, rows)
        state = DecodeState(cache, rows, rows, rows, None, draft)
        sampling = jax.eval_shape(lambda: SamplingRows.of([SamplingParams()] * batch, [0] * batch))
        stop_ids: Any = np.zeros((batch, MIN_STOP_IDS), np.int32)
        self.decode(state, Requests(sampling, rows, stop_ids), MAX_CYCLES)
        return self.lowered

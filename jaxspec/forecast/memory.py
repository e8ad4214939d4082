"""Bytes on each device, by part, and what fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxspec.decoding.programs import MAX_PREFILL, MIN_CAPACITY
from jaxspec.forecast.compiled import Memory, memory
from jaxspec.forecast.devices import Device
from jaxspec.forecast.programs import Lower
from jaxspec.forecast.setup import Setup
from jaxspec.layers.moe import BLOCK_ROWS

FLOAT32 = 4
LOGIT_COPIES = 3  # of a block's logits: the product, its float32, what acceptance makes of it
MOST_ROWS = 4096


@dataclass(frozen=True)
class Parts:
    """Bytes on one device.

    Fields:
        verifier_weights, drafter_weights: what the verifier lends is counted with it.
        verifier_cache, drafter_cache: keys and values.
        features: of the verifier, between two cycles.
        temporaries: of the program that needs most.
    """

    verifier_weights: int
    drafter_weights: int
    verifier_cache: int
    drafter_cache: int
    features: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def parts(setup: Setup, batch: int, capacity: int, temporaries: float | None = None) -> Parts:
    """For caches of B = `batch` rows of S = `capacity` slots. `temporaries`: bytes where they are known."""
    rows, drafter = setup.rows(batch), setup.drafter
    features = 0
    if drafter is not None:
        features = rows * (setup.plan.drafts + 1) * drafter.feature_width * setup.dtype.itemsize
    return Parts(
        verifier_weights=sum(weight.nbytes for weight in setup.verifier_weights),
        drafter_weights=sum(weight.nbytes for weight in setup.drafter_weights),
        verifier_cache=rows * capacity * setup.slot_bytes(setup.verifier.layers),
        drafter_cache=0
        if drafter is None
        else rows * capacity * setup.slot_bytes(drafter.layers, setup.drafter_replicated),
        features=features,
        temporaries=round(estimated_temporaries(setup, batch) if temporaries is None else temporaries),
    )


def estimated_temporaries(setup: Setup, batch: int) -> int:
    """Roughly, with the kernels, which keep scores to themselves: of prefill its widest layer's activations and the features, of a cycle
    the logits. A compiled program tells better."""
    rows, size = setup.rows(batch), setup.dtype.itemsize
    features = 0 if setup.drafter is None else setup.drafter.feature_width
    tokens = rows * MAX_PREFILL
    widest = max(
        2 * (layer.mlp_width or 0) // setup.tensor
        + (2 * layer.moe.top_k * setup.verifier.width if layer.moe else 0)  # sorted by expert, and back in order
        + (layer.attention.heads + 2 * layer.attention.kv_heads) * layer.attention.head_dim // setup.tensor
        for layer in setup.verifier.layers
    )
    prefill = tokens * size * (3 * setup.verifier.width + widest + 2 * features)
    experts = max(layer.moe.experts if layer.moe else 0 for layer in setup.verifier.layers) // setup.sizes["expert"]
    prefill += experts * BLOCK_ROWS * setup.verifier.width * size  # what fills each expert's last block
    decode = LOGIT_COPIES * FLOAT32 * rows * (setup.plan.drafts + 1) * setup.verifier.vocab_size
    return max(prefill, decode)


def compiled_memory(
    setup: Setup, batch: int, capacity: int, lower: Lower, mesh: Mesh | None = None
) -> Mapping[str, Memory]:
    """By program, of those that answer prompts; compiling takes minutes for large models. `mesh`: of several devices."""
    lowered = setup.placed(lower, mesh).lower_all(batch, capacity, MAX_PREFILL)
    return {name: memory(one.compile()) for name, one in lowered.items()}


def largest_batch(setup: Setup, capacity: int, device: Device, scale: float = 1.0) -> int:
    """Most rows whose caches of S = `capacity` slots fit, 0 for none; for more than MOST_ROWS a part along `data`, that many.
    `scale`: of temporaries to their estimate."""
    data = setup.sizes["data"]

    def fits(rows: int) -> bool:
        return _total(setup, rows * data, capacity, scale) <= device.usable

    return data * _largest(fits, MOST_ROWS)


def largest_context(setup: Setup, batch: int, device: Device, scale: float = 1.0) -> int:
    """Most tokens a row, prompt and answer together, that B = `batch` rows fit with; 0 for none. Caches come in sizes of their own
    (`Programs.capacity`): the longest sequence that the largest fitting one holds."""
    longest, best, tokens = setup.verifier.max_positions, 0, MIN_CAPACITY
    scratch = max(setup.plan.drafts, setup.drafter.block.size if setup.drafter and setup.drafter.block else 0)
    while True:
        held = min(tokens - scratch, longest)
        if _total(setup, batch, setup.programs.capacity(held), scale) > device.usable:
            return best
        best = held
        if held == longest:
            return best
        tokens *= 2


def _total(setup: Setup, batch: int, capacity: int, scale: float) -> int:
    return parts(setup, batch, capacity, scale * estimated_temporaries(setup, batch)).total


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that holds, where every smaller one does too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low

"""A plan as JSON, and as text for people."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxspec.forecast.compiled import Memory
from jaxspec.forecast.devices import Device
from jaxspec.forecast.floor import Pass, draft, verify
from jaxspec.forecast.memory import MOST_ROWS, Parts, estimated_temporaries, largest_batch, largest_context, parts
from jaxspec.forecast.setup import Setup

GB = 1e9
WIDTH = 36  # of the names in the text


@dataclass(frozen=True)
class Speed:
    """What the floors come to.

    Fields:
        plain_ms: of one token of every row without a drafter.
        draft_ms, verify_ms: of a cycle.
        read, flops: bytes and operations of a cycle, on one device.
        acceptance_length: as asked; None where nobody did.
        share: of the floors' speed that is expected.
    """

    plain_ms: float
    draft_ms: float
    verify_ms: float
    read: float
    flops: float
    acceptance_length: float | None
    share: float

    @property
    def cycle_ms(self) -> float:
        """Draft and verify."""
        return self.draft_ms + self.verify_ms

    def tokens_per_s(self, batch: int) -> tuple[float, float | None]:
        """Of all rows together, plain and with the drafter (None without an acceptance length), at the expected share."""
        per_ms = 1000 * batch * self.share
        length = self.acceptance_length
        return per_ms / self.plain_ms, None if length is None or not self.draft_ms else per_ms * length / self.cycle_ms


@dataclass(frozen=True)
class Forecast:
    """A plan's answer.

    Fields:
        memory: on each device.
        temporaries_from: "estimate", or what compiled them.
        usable: bytes of a device that programs can have.
        capacity: slots of a row's cache.
        largest_batch, largest_context: each with the other as asked; 0 for none.
        passes: of a cycle.
        speed: of it.
    """

    memory: Parts
    temporaries_from: str
    usable: int
    capacity: int
    largest_batch: int
    largest_context: int
    passes: tuple[Pass, ...]
    speed: Speed

    @property
    def fits(self) -> bool:
        """On every device."""
        return self.memory.total <= self.usable


def forecast(
    setup: Setup,
    device: Device,
    batch: int,
    context: int,
    acceptance_length: float | None = None,
    share: float = 1.0,
    compiled: Mapping[str, Memory] | None = None,
    compiled_by: str = "",
) -> Forecast:
    """For B = `batch` rows of up to `context` tokens, prompt and answer together."""
    capacity = setup.programs.capacity(context)
    scale, known = 1.0, None
    if compiled:
        known = max(one.temporary for one in compiled.values())
        scale = known / estimated_temporaries(setup, batch)
    drafts = setup.plan.drafts if setup.drafter is not None else 0
    drafting = () if setup.drafter is None else draft(setup, batch, context)
    verifying, plain = verify(setup, batch, context, drafts), verify(setup, batch, context, 0)
    passes = (*drafting, verifying)
    speed = Speed(
        plain_ms=1000 * plain.seconds(setup, device),
        draft_ms=1000 * sum(one.seconds(setup, device) for one in drafting),
        verify_ms=1000 * verifying.seconds(setup, device),
        read=sum(one.nbytes for one in passes),
        flops=sum(one.flops for one in passes),
        acceptance_length=acceptance_length,
        share=share,
    )
    return Forecast(
        memory=parts(setup, batch, capacity, known),
        temporaries_from=compiled_by if compiled else "estimate",
        usable=device.usable,
        capacity=capacity,
        largest_batch=largest_batch(setup, capacity, device, scale),
        largest_context=largest_context(setup, batch, device, scale),
        passes=passes,
        speed=speed,
    )


def collectives_of(passes: tuple[Pass, ...]) -> dict[str, dict[str, int]]:
    """Number and bytes in all, by kind, of a cycle."""
    number: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for one in (one for each in passes for one in each.collectives):
        number[one.kind] += one.count
        nbytes[one.kind] += one.count * one.nbytes
    return {kind: {"count": number[kind], "bytes": nbytes[kind]} for kind in sorted(number)}


def forecast_json(found: Forecast, batch: int) -> dict[str, Any]:
    """Everything."""
    plain, drafted = found.speed.tokens_per_s(batch)
    return {
        "memory": {**asdict(found.memory), "total": found.memory.total, "usable": found.usable},
        "temporaries_from": found.temporaries_from,
        "fits": found.fits,
        "capacity": found.capacity,
        "largest_batch": found.largest_batch,
        "largest_context": found.largest_context,
        "collectives": collectives_of(found.passes),
        "floor": {
            "bytes": found.speed.read,
            "flops": found.speed.flops,
            "draft_ms": found.speed.draft_ms,
            "verify_ms": found.speed.verify_ms,
            "cycle_ms": found.speed.cycle_ms,
            "plain_ms": found.speed.plain_ms,
        },
        "tokens_per_s": {"plain": plain, "speculative": drafted, "share_of_floor": found.speed.share},
    }


def forecast_lines(found: Forecast, setup: Setup, device: Device, batch: int, context: int) -> list[str]:
    """The same as a table."""
    names = {
        "verifier weights": found.memory.verifier_weights,
        "drafter weights": found.memory.drafter_weights,
        "verifier cache": found.memory.verifier_cache,
        "drafter cache": found.memory.drafter_cache,
        "features": found.memory.features,
        f"temporaries ({found.temporaries_from})": found.memory.temporaries,
    }
    mesh = ", ".join(f"{axis} {size}" for axis, size in setup.sizes.items() if size > 1)
    where = f"{setup.devices} x {device.name}" + (f" ({mesh})" if mesh else "")
    lines = [f"on {where}, {setup.dtype.name}, batch {batch}, context {context} ({found.capacity} slots a row)", ""]
    lines += [f"{name:<{WIDTH}} {nbytes / GB:9.3f} GB" for name, nbytes in names.items()]
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines.append(f"{'on each device':<{WIDTH}} {found.memory.total / GB:9.3f} GB of {found.usable / GB:.1f}: {verdict}")
    more = " or more" if found.largest_batch == MOST_ROWS * setup.sizes["data"] else ""
    lines.append(f"{'largest batch':<{WIDTH}} {found.largest_batch:9}{more} at this context")
    lines.append(f"{'largest context':<{WIDTH}} {found.largest_context:9} at this batch")
    lines.append("")
    for kind, one in collectives_of(found.passes).items():
        lines.append(f"{kind + ' a cycle':<{WIDTH}} {one['count']:9}, {one['bytes'] / 1e6:.2f} MB")
    speed = found.speed
    what = f"draft {speed.draft_ms:.2f} ms, verify {speed.verify_ms:.2f} ms" if speed.draft_ms else "verify"
    lines.append(
        f"{'floor of a cycle':<{WIDTH}} {speed.cycle_ms:9.2f} ms: {what}; reads {speed.read / GB:.2f} GB, computes "
        f"{speed.flops / 1e12:.3f} TFLOP on each device"
    )
    lines.append(f"{'floor of a plain token':<{WIDTH}} {speed.plain_ms:9.2f} ms")
    plain, drafted = speed.tokens_per_s(batch)
    lines.append(f"{'plain decoding':<{WIDTH}} {plain:9.1f} tokens/s at {speed.share:.0%} of the floor's speed")
    if drafted is not None:
        lines.append(
            f"{'with the drafter':<{WIDTH}} {drafted:9.1f} tokens/s at acceptance length {speed.acceptance_length:g}, "
            f"{drafted / plain:.2f} x"
        )
    return lines

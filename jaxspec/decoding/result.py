"""What a generation gives back."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxspec.decoding.state import NO_TOKEN, Record

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt (chat template included) and of the answer (the stop token included)."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds, compilation kept apart.

    Fields:
        load_s: loading the model, the same for every result of an engine.
        compile_s: compiling during this result's batch; 0 once its shapes are warm.
        prefill_s, decode_s: running this result's batch, until its last row ended.
        tokens_per_s: this result's tokens over `decode_s`.
    """

    load_s: float
    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Cycle:
    """One draft-then-verify round of one row; a line of `--trace`.

    Fields:
        cycle: its number in the row, from 0.
        position: of the anchor in the whole sequence.
        anchor: the last token committed before it.
        draft: K verifier ids.
        confidence: K probabilities, None without a confidence head.
        verified: W, drafts that the verifier saw.
        accepted: drafts committed.
        tokens: what was committed, in all.
    """

    cycle: int
    position: int
    anchor: int
    draft: tuple[int, ...]
    confidence: tuple[float, ...] | None
    verified: int
    accepted: int
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, number: int, record: Record) -> "Cycle":
        """From one row's record of one cycle, on the host."""
        return cls(
            cycle=number,
            position=int(record.position),
            anchor=int(record.anchor),
            draft=tuple(record.draft.tolist()),
            confidence=None if record.confidence is None else tuple(record.confidence.tolist()),
            verified=int(record.verified),
            accepted=int(record.accepted),
            tokens=tuple(token for token in record.tokens.tolist() if token != NO_TOKEN),
        )

    @property
    def bonus(self) -> int | None:
        """The verifier's own token behind the accepted drafts; None where a stop token or the row's limit came first."""
        return self.tokens[self.accepted] if len(self.tokens) > self.accepted else None

    def as_json(self) -> dict[str, Any]:
        """The fields of a `--trace` line, but for the row."""
        return {
            "cycle": self.cycle,
            "position": self.position,
            "anchor": self.anchor,
            "draft": list(self.draft),
            "confidence": None if self.confidence is None else list(self.confidence),
            "verified": self.verified,
            "accepted": self.accepted,
            "bonus": self.bonus,
        }


@dataclass(frozen=True)
class Speculative:
    """How drafting went in one answer.

    Fields:
        method: the drafter's.
        cycles: draft-then-verify rounds.
        drafted: drafts that the verifier saw.
        accepted: drafts committed.
        acceptance_length: mean of accepted + 1 over the cycles.
        acceptance_per_position: for each of the K slots, cycles that accepted it over all cycles.
    """

    method: str
    cycles: int
    drafted: int
    accepted: int
    acceptance_length: float
    acceptance_per_position: tuple[float, ...]

    @classmethod
    def of(cls, method: str, drafts: int, cycles: Iterable[Cycle]) -> "Speculative":
        """Summed up over a row's cycles of `drafts` = K drafts each."""
        cycles = list(cycles)
        accepted = sum(cycle.accepted for cycle in cycles)
        number = max(len(cycles), 1)
        return cls(
            method=method,
            cycles=len(cycles),
            drafted=sum(cycle.verified for cycle in cycles),
            accepted=accepted,
            acceptance_length=1 + accepted / number,
            acceptance_per_position=tuple(
                sum(cycle.accepted > slot for cycle in cycles) / number for slot in range(drafts)
            ),
        )


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of one token of the answer, and the likeliest ids with theirs, falling."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    """One answer.

    Fields:
        prompt_ids: the prompt as the model saw it.
        token_ids: the answer, ended by its stop token if there was one.
        text: the answer without special tokens and cut before a stop string; "" where the model has no tokenizer.
        finish_reason: "stop" (stop token or string), "length", or None for an answer that was interrupted.
        usage, timing: see there.
        speculative: None without a drafter.
        cycles: what happened in each draft-then-verify round; none without a drafter.
        logprobs: one a token of the answer; None where `SamplingParams.logprobs` asked for none.
        batch: which batch of the call the row was in; rows of a batch share their run times.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    timing: Timing
    speculative: Speculative | None = None
    cycles: tuple[Cycle, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    batch: int = 0

    def as_json(self) -> dict[str, Any]:
        """The object that `--output json` prints; with "logprobs" where they were asked for."""
        fields = asdict(self)
        keys = _JSON_KEYS if self.logprobs is None else (*_JSON_KEYS, "logprobs")
        return {key: fields[key] for key in keys}


_JSON_KEYS = ("prompt_ids", "token_ids", "text", "finish_reason", "usage", "speculative", "timing")


@dataclass(frozen=True)
class StreamEvent:
    """A piece of a streamed answer: text that is final, the tokens of the dispatch, and with the last piece the whole result."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Engine.generate`.

    `results` holds what there is in input order: finished answers, answers cut short (finish_reason None), and None for prompts that
    were not begun.
    """

    def __init__(self, results: list[Result | None]):
        super().__init__()
        self.results = results

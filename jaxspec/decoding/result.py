"""What a generation gives back."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

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
class Result:
    """One answer.

    Fields:
        prompt_ids: the prompt as the model saw it.
        token_ids: the answer, ended by its stop token if there was one.
        text: the answer without special tokens and cut before a stop string; "" where the model has no tokenizer.
        finish_reason: "stop" (stop token or string), "length", or None for an answer that was interrupted.
        usage, timing: see there.
        speculative: None without a drafter.
        batch: which batch of the call the row was in; rows of a batch share their run times.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    timing: Timing
    speculative: None = None
    batch: int = 0

    def as_json(self) -> dict[str, Any]:
        """The object that `--output json` prints."""
        fields = asdict(self)
        return {key: fields[key] for key in _JSON_KEYS}


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

"""What a caller asks of one generation: `SamplingParams`, validated when made. Imports no JAX, so that commands can refuse early."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxspec.errors import InputError

SEED_LIMIT = 2**64
MAX_LOGPROBS = 20  # as in vLLM and OpenAI
GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM (v1/sample/sampler.py, _SAMPLING_EPS)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. The default is greedy.

    The operations act in vLLM's order (v1/sample/sampler.py): logit bias, repetition, frequency and presence penalty, temperature,
    min-p, top-k, top-p. Every operation but the bias and the penalties leaves a greedy request unchanged.

    Fields, with their allowed values:
        max_new_tokens: most tokens to generate, >= 1. The answer also ends where prompt and answer reach the model's longest sequence.
        temperature: 0 .. 1e6; 0 (and anything below 1e-5) takes the most likely token, the lowest id among equals.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        repetition_penalty: in [0.001, 1000]; divides positive logits of tokens in prompt or answer, multiplies negative ones.
        presence_penalty: in [-2, 2]; subtracted from the logit of every token already in the answer.
        frequency_penalty: in [-2, 2]; subtracted once for each occurrence in the answer.
        seed: 0 .. 2**64 - 1; None draws one afresh for every request.
        stop: strings that end the answer; the text is cut before the first of them.
        stop_token_ids: ids that end the answer besides the model's own end-of-sequence ids.
        ignore_eos: do not end at the model's end-of-sequence ids (`stop_token_ids` still end the answer).
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        logprobs: report log-probabilities of each token and of the `logprobs` most likely ones, 0 .. 20; None reports none. They are the
            model's own, before bias, penalties and temperature (vLLM's "raw_logprobs").

    Raises:
        InputError: a value outside its range, named with the field.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _number("temperature", self.temperature, 0, 1e6)
        _whole("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEED_LIMIT - 1)
        for name, kind in (("stop", Sequence), ("stop_token_ids", Sequence), ("logit_bias", Mapping)):
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__.lower()}")
        if isinstance(self.stop, str):
            raise InputError(f"stop is {self.stop!r}; it must be a sequence of strings, such as ({self.stop!r},)")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop holds {text!r}; every stop string must be a string of at least one character")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0)
            _number("logit_bias", bias, -100, 100)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether any penalty changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _number(name: str, value: float, low: float, high: float = math.inf, above: bool = False) -> None:
    """Refuse what is not a finite number from `low` (`above`: not `low` itself) to `high`."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or value > high or (above and value == low):
        _refuse(name, value, "number", low, high, above)


def _whole(name: str, value: int, low: int, high: float = math.inf) -> None:
    """Refuse what is not a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or value > high:
        _refuse(name, value, "whole number", low, high, False)


def _refuse(name: str, value: object, kind: str, low: float, high: float, above: bool) -> None:
    least = f"above {low}" if above else f"of at least {low}"
    most = "" if high == math.inf else f" and at most {high}"
    raise InputError(f"{name} is {value!r}; it must be a {kind} {least}{most}")

"""vLLM's `--speculative-config`: every key honoured, or refused with the reason. Imports no JAX.

Keys and meanings as in vLLM 0.33.0, vllm/config/speculative.py; `confidence_threshold` is DeepSpec's (eval.py) and ours.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

METHODS = ("eagle3", "peagle", "dflash", "dspark")
MAX_DRAFTS = 128  # vLLM's MAX_SPEC_LEN

_ELSEWHERE = {
    "draft_tensor_parallel_size": "the drafter follows --mesh",
    "tensor_parallel_size": "the drafter follows --mesh",
    "quantization": "quantised drafters are not supported",
    "draft_lm_head_quantization": "quantised drafters are not supported",
    "kv_cache_dtype": "the cache has the dtype of the weights; use --dtype",
    "attention_backend": "use --kernels",
    "moe_backend": "experts run on XLA",
    "draft_load_config": "weights load from safetensors or orbax only",
    "code_revision": "no code is loaded from checkpoints",
    "dspark_draft_topk": "DSpark's bias acts on the whole draft vocabulary here",
    "num_speculative_tokens_per_batch_size": "K is the same for every batch size; confidence_threshold and "
    "enable_adaptive_verification cut drafts by load",
    "use_heterogeneous_vocab": "drafter and verifier must share a vocabulary",
    "xpress_topc": "XPress drafters are not supported",
    "fly_window_size": "FLy is lossy and not supported",
    "fly_entropy_threshold": "FLy is lossy and not supported",
    "fly_entropy_top_k": "FLy is lossy and not supported",
    "prompt_lookup_max": "n-gram drafting is not supported",
    "prompt_lookup_min": "n-gram drafting is not supported",
    "index_share_for_mtp_iteration": "MTP drafters are not supported",
}
# They only choose how vLLM itself schedules the same result.
_NO_EFFECT = {
    "enforce_eager",
    "use_local_argmax_reduction",
    "disable_padded_drafter_batch",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What the user asked of speculation; None or the default where nothing was asked.

    Fields:
        method: "eagle3" with `parallel_drafting` means "peagle".
        model: the drafter's directory or hub id.
        revision: of a hub id.
        num_speculative_tokens: K, 1 .. 128; None takes the checkpoint's.
        draft_sample_method: "greedy" drafts are the most likely tokens; "probabilistic" ones are drawn like the verifier's.
        rejection_sample_method: "standard", "block" or "synthetic".
        synthetic_acceptance_rates: unconditional acceptance of each of the K positions, in [0, 1], not increasing.
        synthetic_acceptance_length: their sum plus one instead, in [1, K + 1].
        parallel_drafting: all drafts in one pass; what DFlash and DSpark always do.
        confidence_threshold: drafts stop before the first of confidence below it, in [0, 1] (DSpark).
        enable_adaptive_verification: the prefix scheduler decides how many drafts are verified (DSpark).
        max_model_len: the longest sequence, if shorter than the model's.
    """

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    parallel_drafting: bool = False
    confidence_threshold: float = 0.0
    enable_adaptive_verification: bool = False
    max_model_len: int | None = None

    @classmethod
    def parse(cls, source: str | Mapping[str, Any]) -> "SpeculativeConfig":
        """From a JSON object, a JSON text, or the path of a JSON file. Raises InputError naming the key."""
        data = dict(source) if isinstance(source, Mapping) else _read(source)
        known = {field.name for field in fields(cls)}
        for key in sorted(data):
            if key in _ELSEWHERE:
                raise InputError(f"speculative config: {key} is not supported: {_ELSEWHERE[key]}")
            if key not in known | _NO_EFFECT:
                near = difflib.get_close_matches(key, known, 1, 0.0)[0]
                raise InputError(f"speculative config: unknown key {key}; the nearest known one is {near}")
        given = {key: value for key, value in data.items() if key in known and value is not None}
        if isinstance(given.get("synthetic_acceptance_rates"), list):
            given["synthetic_acceptance_rates"] = tuple(given["synthetic_acceptance_rates"])
        return cls(**given)

    def __post_init__(self) -> None:
        """Check each value by itself, and those that exclude one another."""
        for name in ("method", "model", "revision", "draft_sample_method", "rejection_sample_method"):
            if not isinstance(getattr(self, name), str | None):
                raise _wrong(name, getattr(self, name), "a string")
        for name in ("parallel_drafting", "enable_adaptive_verification"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if self.method is not None and self.method not in METHODS:
            raise _wrong("method", self.method, f"one of {', '.join(METHODS)}")
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise _wrong("draft_sample_method", self.draft_sample_method, "greedy or probabilistic")
        if self.rejection_sample_method not in ("standard", "block", "synthetic"):
            raise _wrong("rejection_sample_method", self.rejection_sample_method, "standard, block or synthetic")
        drafts, longest = self.num_speculative_tokens, self.max_model_len
        if drafts is not None and (not _whole(drafts) or not 1 <= drafts <= MAX_DRAFTS):
            raise _wrong("num_speculative_tokens", drafts, f"a whole number from 1 to {MAX_DRAFTS}")
        if longest is not None and (not _whole(longest) or longest < 2):
            raise _wrong("max_model_len", longest, "a whole number of at least 2")
        if not _number(self.confidence_threshold) or not 0 <= self.confidence_threshold <= 1:
            raise _wrong("confidence_threshold", self.confidence_threshold, "a number from 0 to 1")
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            if rates is not None or length is not None:
                raise InputError(
                    "speculative config: synthetic acceptance needs rejection_sample_method to be synthetic"
                )
            return
        if (rates is None) == (length is None):
            raise InputError(
                "speculative config: rejection_sample_method synthetic needs exactly one of synthetic_acceptance_rates "
                "and synthetic_acceptance_length"
            )
        if length is not None and (not _number(length) or not 1 <= length < math.inf):
            raise _wrong("synthetic_acceptance_length", length, "a number from 1 to K + 1")
        if rates is None:
            return
        falling = isinstance(rates, tuple) and all(map(_number, rates)) and list(rates) == sorted(rates, reverse=True)
        if not falling or not all(0 <= rate <= 1 for rate in rates):
            raise _wrong("synthetic_acceptance_rates", rates, "K numbers from 0 to 1, none above the one before it")

    def conditional_rates(self, drafts: int) -> tuple[float, ...]:
        """For synthetic acceptance: P(draft accepted | those before it are) of each of the K = `drafts` positions."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is None:
            assert length is not None
            if length > drafts + 1:
                raise _wrong("synthetic_acceptance_length", length, f"at most K + 1 = {drafts + 1}")
            return (_constant_rate(length - 1, drafts),) * drafts
        if len(rates) != drafts:
            raise _wrong("synthetic_acceptance_rates", rates, f"as many numbers as K = {drafts}")
        before = (1.0, *rates[:-1])
        return tuple(rate / last if last else 0.0 for rate, last in zip(rates, before, strict=True))


def _constant_rate(accepted: float, drafts: int) -> float:
    """The r for which r + r^2 + ... + r^K is `accepted`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, drafts + 1)) < accepted else (low, middle)
    return high


def _read(source: str) -> dict[str, Any]:
    text = source
    if not source.lstrip().startswith("{"):
        try:
            text = Path(source).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"speculative config {source!r} is neither a JSON object nor a readable file") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"speculative config is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"speculative config is a {type(data).__name__}; a JSON object is wanted")
    return data


def _wrong(name: str, value: object, wanted: str) -> InputError:
    return InputError(f"speculative config: {name} is {value!r}; it must be {wanted}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The engine: a loaded model, its tokenizer and its compiled programs behind `generate` and `stream`."""

import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec import compilation_cache, distributed
from jaxspec.checkpoint.drafters.load import load_drafter
from jaxspec.checkpoint.load import load_verifier
from jaxspec.config import VerifierConfig
from jaxspec.decoding.batch import Batch, Request
from jaxspec.decoding.cycle import Plan
from jaxspec.decoding.kernels import check_kernels
from jaxspec.decoding.loop import MAX_CYCLES
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.planning import make_plan
from jaxspec.decoding.profile import measure_steps_per_s
from jaxspec.decoding.programs import Key, Programs, power_of_two
from jaxspec.decoding.refill import Finished, run_refilled
from jaxspec.decoding.result import GenerationInterrupted, Result, StreamEvent
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.decoding.state import DecodeState, Requests
from jaxspec.drafters.base import Drafter
from jaxspec.errors import InputError
from jaxspec.prompts import PROMPT_KEYS
from jaxspec.sharding import mesh_of
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec.verifiers.decoder import Decoder
from jaxspec_kernels.implementation import Implementation

Prompt = str | Sequence[int] | Mapping[str, Any]

STREAM_CYCLES = 4  # cycles a dispatch while streaming


class Engine:
    """Generates text with one model. Not for use from several threads at once."""

    def __init__(
        self,
        config: VerifierConfig,
        decoder: Decoder,
        drafter: Drafter | None = None,
        plan: Plan | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        max_batch_size: int = 8,
        load_s: float = 0.0,
        on_compile: Callable[[str | None], None] | None = None,
        kernels: Implementation | None = None,
        mesh: Mesh | None = None,
    ):
        """An engine on a decoder in memory; `from_pretrained` loads one.

        Args:
            config: what the decoder is.
            decoder: with its weights.
            drafter: with its weights; None decodes plainly.
            plan: what a draft-then-verify cycle does; needed with a drafter.
            tokenizer: None allows prompts of token ids only, and results have no text.
            eos_ids: ids that end every answer unless `ignore_eos`.
            max_batch_size: most rows that run together; longer lists run batch after batch.
            load_s: seconds that loading took, for the results.
            on_compile: called with a description before something compiles, and with None behind it.
            kernels: "triton", "xla" or "interpret"; None takes triton on NVIDIA GPUs and xla elsewhere.
            mesh: the devices that the weights lie on (`jaxspec.sharding`); None for one. Batches are filled up to a multiple of its `data`
                axis.

        Raises:
            InputError: max_batch_size below 1, or kernels that do not run here.
        """
        check_kernels(kernels)
        if max_batch_size < 1:
            raise InputError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        self.config = config
        self.tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._max_batch_size = max_batch_size
        self._load_s = load_s
        self._programs = Programs(config, decoder, drafter, plan, on_compile, kernels, mesh)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        drafter: str | Path | None = None,
        *,
        speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
        dtype: DTypeLike | None = None,
        mesh: str | Mesh | None = None,
        max_batch_size: int = 8,
        on_load: Callable[[int, int], None] | None = None,
        on_compile: Callable[[str | None], None] | None = None,
        kernels: Implementation | None = None,
    ) -> "Engine":
        """Load a model directory, hub id or .gguf file.

        Compiled programs are kept on disk for the next process (`jaxspec.compilation_cache`).

        Args:
            model: where the verifier is.
            drafter: where the drafter is; "none" decodes plainly, None also, unless the speculative config names one.
            speculative_config: vLLM's keys, as a mapping, a JSON text, a JSON file's path, or parsed (`SpeculativeConfig`).
            mesh: the devices to run on, as "data=2,tensor=4" or a `jax.sharding.Mesh` (`jaxspec.sharding.make_mesh`); None: one device, or
                with several processes all of them along `data`.
            dtype: float32 or bfloat16 for weights and cache; None takes float32 on CPUs, else the checkpoint's own.
            max_batch_size, on_compile, kernels: as for the constructor.
            on_load: called with bytes done and bytes in all while the weights load.

        Raises:
            InputError: a model that cannot be loaded, or an argument that is not supported.
        """
        devices = mesh_of(mesh)
        check_kernels(kernels)
        asked = _speculative_config(speculative_config)
        if drafter is None:
            drafter = asked.model
        if drafter == "none":
            drafter, asked = None, SpeculativeConfig(max_model_len=asked.max_model_len)
        if drafter is None and asked != SpeculativeConfig(max_model_len=asked.max_model_len):
            raise InputError(
                "speculation is asked for, but there is no drafter: give --drafter, or model in the config"
            )

        compilation_cache.enable()
        start = time.perf_counter()
        loaded = load_verifier(model, dtype=dtype, progress=on_load, mesh=devices)
        config, module, plan = loaded.config, None, None
        if asked.max_model_len is not None:
            config = replace(config, max_positions=min(config.max_positions, asked.max_model_len))
        if drafter is not None:
            opened = load_drafter(drafter, verifier=loaded, dtype=dtype, revision=asked.revision, mesh=devices)
            module, plan = opened.module, make_plan(asked, opened.config)
            if asked.enable_adaptive_verification:
                rows = power_of_two(max_batch_size)
                curve = measure_steps_per_s(
                    config, loaded.module, module, plan.drafts, plan.widths, rows, kernels, devices
                )
                plan = replace(plan, steps_per_s=curve)
        return cls(
            config,
            loaded.module,
            module,
            plan,
            tokenizer=load_tokenizer(loaded.tokenizer_source),
            eos_ids=loaded.eos_ids,
            max_batch_size=max_batch_size,
            load_s=time.perf_counter() - start,
            on_compile=on_compile,
            kernels=kernels,
            mesh=devices,
        )

    @property
    def compiled_programs(self) -> tuple[Key, ...]:
        """One tuple for each program compiled so far: its name and its sizes."""
        return tuple(self._programs.compiled)

    @property
    def programs(self) -> Programs:
        """The compiled programs, for measurements."""
        return self._programs

    def start(self, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[DecodeState, Requests]:
        """The state of one batch in front of its first cycle, for measurements.

        Args and errors: as for `generate`; at most max_batch_size prompts.
        """
        requests = self._requests(prompts, params)
        assert len(requests) <= self._max_batch_size
        return self._batch(requests).start()

    def warm_up(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Compile what `generate` needs for these arguments, and run each program once.

        Args and errors: as for `generate`.
        """
        batches = [self._batch(members) for members in self._in_batches(self._requests(prompts, params))]
        for batch in {batch.shapes(): batch for batch in batches}.values():
            next(batch.run(1))

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answer every prompt.

        Args:
            prompts: each a text (taken as it is, no chat template), a list of token ids, or a mapping with one key: "prompt",
                "prompt_ids" or "messages" (through the chat template).
            params: for all prompts, or one a prompt; None is greedy.

        Returns:
            Results in input order.

        Raises:
            InputError: a prompt or parameter that cannot be served; nothing is generated then.
            GenerationInterrupted: on Ctrl-C, with what there is.
        """
        requests = self._requests(prompts, params)
        results: list[Result | None] = [None] * len(requests)
        for number, members in enumerate(self._in_batches(requests)):
            batch = self._batch(members)
            try:
                for _ in batch.run(MAX_CYCLES):
                    pass
            except KeyboardInterrupt:
                self._collect(results, members, batch, number)
                raise GenerationInterrupted(results) from None
            self._collect(results, members, batch, number)
        return [result for result in results if result is not None]

    def generate_refilled(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int], rows: int | None = None
    ) -> Iterator[Finished]:
        """Answer every prompt and yield each answer as soon as it has ended; its row takes up the next prompt.

        Faster than `generate` for many prompts whose answers differ in length. Each answer is the one that `generate` would give.

        Args:
            prompts: as for `generate`.
            params: of all prompts, but for the seed; without stop strings and logprobs.
            seeds: one a prompt.
            rows: most prompts that run together; None takes max_batch_size.

        Raises:
            InputError: as `generate`, by this call and not by the first answer.
        """
        if params.stop or params.logprobs is not None:
            raise InputError("stop strings and logprobs are not supported where rows are refilled; leave them out")
        if len(seeds) != len(prompts):
            raise InputError(f"seeds has {len(seeds)} entries for {len(prompts)} prompts; one for each is wanted")
        rows = rows or self._max_batch_size
        if self._programs.plan.steps_per_s is not None and rows > self._max_batch_size:
            raise InputError(
                f"rows is {rows}; adaptive verification knows the costs of at most max_batch_size {self._max_batch_size}"
            )
        requests = self._requests(prompts, [replace(params, seed=seed) for seed in seeds])
        return run_refilled(self._programs, requests, rows)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Answer one prompt piece by piece; the last event holds the result.

        The pieces' texts add up to the result's text. No piece ends within a character or within what may become a stop string.

        Args and errors: as for `generate`; raised by this call, not by the first piece.
        """
        requests = self._requests([prompt], params)
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Iterator[StreamEvent]:
        batch = self._batch(requests)
        held: list[int] = []
        for (tokens,) in batch.run(STREAM_CYCLES):
            held += tokens
            text = batch.new_text(0)
            if not batch.running(0):
                yield StreamEvent(text, tuple(held), batch.results(self._load_s, 0)[0])
            elif text or self.tokenizer is None:
                yield StreamEvent(text, tuple(held))
                held = []

    def _in_batches(self, requests: list[Request]) -> list[list[Request]]:
        """Prompts of like length share a batch: padding costs as much as tokens."""
        requests = sorted(requests, key=lambda request: len(request.prompt))
        return [
            requests[start : start + self._max_batch_size] for start in range(0, len(requests), self._max_batch_size)
        ]

    def _batch(self, requests: list[Request]) -> Batch:
        rows = self._programs.rows(min(power_of_two(len(requests)), self._max_batch_size))
        return Batch(self._programs, requests, rows, self._text)

    def _collect(self, results: list[Result | None], requests: list[Request], batch: Batch, number: int) -> None:
        for request, result in zip(requests, batch.results(self._load_s, number), strict=True):
            results[request.index] = result

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if isinstance(prompts, str | Mapping):
            raise InputError("prompts is a single prompt; it must be a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(
                f"params has {len(params)} entries for {len(prompts)} prompts; one SamplingParams or a list of as many is wanted"
            )
        # Where none is given one is drawn, the same in every process.
        seeds = distributed.same(np.array([secrets.randbits(32) for _ in (*prompts, *prompts)], np.uint32)).tolist()
        requests = [
            self._request(index, prompt, wanted, seeds[2 * index] << 32 | seeds[2 * index + 1])
            for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]
        self._warn_past_the_drafter(requests)
        return requests

    def _warn_past_the_drafter(self, requests: Sequence[Request]) -> None:
        """Positions past what the drafter was made for are computed like any others: output stays right, acceptance may fall."""
        drafter = self._programs.drafter_config
        longest = max((len(request.prompt) + request.limit for request in requests), default=0)
        if drafter is not None and longest > drafter.max_positions:
            warnings.warn(
                f"sequences of up to {longest} tokens pass the {drafter.max_positions} that the drafter was made for; "
                "output is unaffected, but fewer drafts may be accepted there",
                stacklevel=4,
            )

    def _request(self, index: int, prompt: Prompt, params: SamplingParams, seed: int) -> Request:
        where = f"prompt {index + 1}"
        tokens = self._prompt_ids(where, prompt)
        vocab, longest = self.config.vocab_size, self.config.max_positions
        if not tokens:
            raise InputError(f"{where} is empty; it must hold at least one token")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise InputError(f"{where} holds token id {token!r}; the model's ids run from 0 to {vocab - 1}")
        if len(tokens) >= longest:
            raise InputError(
                f"{where} has {len(tokens)} tokens; the model takes at most {longest} for prompt and answer together"
            )
        for token in params.stop_token_ids:
            if token >= vocab:
                raise InputError(f"stop_token_ids holds {token}; the model's ids run from 0 to {vocab - 1}")
        for token in params.logit_bias:
            if token >= vocab:
                raise InputError(f"logit_bias holds {token}; the model's ids run from 0 to {vocab - 1}")
        if params.stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and the model has none; use stop_token_ids")
        return Request(
            index=index,
            prompt=tuple(tokens),
            params=params,
            seed=seed if params.seed is None else params.seed,
            limit=min(params.max_new_tokens, longest - len(tokens)),
            stop_ids=tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)})),
        )

    def _prompt_ids(self, where: str, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or (key := next(iter(prompt))) not in PROMPT_KEYS:
                raise InputError(
                    f"{where} has the keys {sorted(map(str, prompt))}; it must have exactly one of {', '.join(PROMPT_KEYS)}"
                )
            if key == "messages":
                return self._require_tokenizer(where).encode_chat(prompt[key])
            prompt = prompt[key]
            if isinstance(prompt, str) != (key == "prompt"):
                raise InputError(
                    f"{where}: {key} is {prompt!r}; {'a text' if key == 'prompt' else 'a list of token ids'} is wanted"
                )
        if isinstance(prompt, str):
            # Some tokenizers put a BOS before nothing: an empty text is empty all the same.
            return self._require_tokenizer(where).encode(prompt) if prompt else ()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InputError(f"{where} is {prompt!r}; it must be a text, a list of token ids, or a mapping")
        return prompt

    def _require_tokenizer(self, where: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{where} is text, and the model has no tokenizer; give token ids")
        return self.tokenizer


def _speculative_config(given: str | Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
    if given is None:
        return SpeculativeConfig()
    return given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.parse(given)

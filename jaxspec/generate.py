"""`python -m jaxspec.generate`: text from a model, by one command."""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec import demo, distributed
from jaxspec.cli import Parser, ShowProgress, leave, progress, run, writable, writable_folder
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.speculative import METHODS, SpeculativeConfig
from jaxspec.errors import InputError
from jaxspec.prompts import PromptItem, apply_chat, collect_prompts

if TYPE_CHECKING:
    from jaxspec.decoding.engine import Engine
    from jaxspec.decoding.result import Result

NAME = "jaxspec.generate"


def main(argv: list[str]) -> None:
    """Parse, generate, print.

    Raises:
        InputError: a flag, prompt or model that is not right.
        KeyboardInterrupt: Ctrl-C, after what there is has been printed.
    """
    args = _parser().parse_args(argv)
    distributed.start(args)
    params = _sampling_params(args)
    items = collect_prompts(args.prompts, args.prompt_ids, args.prompt_file)
    if args.stream and args.output == "json":
        raise InputError("--stream works with --output text; leave one of the two out")
    if args.logprobs is not None and args.output != "json":
        raise InputError("--logprobs shows in --output json only; add that flag")
    speculation = _speculation(args)
    distributed.agree(args, prompts=items)
    trace = writable("--trace", args.trace) if args.trace is not None and distributed.first() else None
    profile = None
    if args.profile_dir is not None:
        profile = writable_folder("--profile-dir", distributed.own_folder(args.profile_dir))
    with progress() as show:
        engine = _load(args, speculation, show)
        if engine.tokenizer is None and args.output == "text":
            raise InputError("the model has no tokenizer, so there is no text to print; use --output json")
        chat = args.chat
        if chat is None:
            chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
        prompts = apply_chat(items, chat, args.system)
        with _profiler(engine, prompts, params, args.stream, profile):
            results = (
                _stream(engine, prompts, params, show)
                if args.stream
                else _generate(engine, prompts, params, args, show)
            )
    if trace is not None:
        _write_trace(trace, results)
    if args.stats and distributed.first():
        _print_stats(results)


def _parser() -> Parser:
    parser = Parser(NAME, "Generate text with a model. Prompts come from arguments, a file, or stdin.")
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a prompt; without any, stdin is one")
    add("--model", metavar="DIR|HUB_ID|FILE.gguf", help="the model (default: the demo model, fetched the first time)")
    add(
        "--drafter",
        metavar="DIR|HUB_ID|none",
        help="the drafter (default: the speculative config's model, else the demo's with the demo model, else none)",
    )
    add("--speculative-config", metavar="JSON|FILE", help="vLLM's keys; an explicit flag wins over a key")
    add("--method", choices=METHODS, help="what the drafter must be (default: what its checkpoint is)")
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts a cycle (default: the checkpoint's)")
    add("--draft-sample-method", choices=["greedy", "probabilistic"], help="how drafts are chosen (default: greedy)")
    add(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="stop drafting before the first draft of confidence below it (DSpark; default: 0, never)",
    )
    add(
        "--prompt-file",
        metavar="FILE.jsonl",
        help='one object a line: {"prompt": TEXT}, {"messages": [...]} or {"prompt_ids": [...]}',
    )
    add("--prompt-ids", type=_token_ids, metavar="1,2,3", help="a prompt of token ids")
    add("--chat", action="store_true", default=None, help="use the chat template (default: where the model has one)")
    add("--no-chat", action="store_false", dest="chat", help="take prompts as they are")
    add("--system", metavar="TEXT", help="system message of every conversation that has none")
    add("--max-new-tokens", type=int, default=SamplingParams.max_new_tokens, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=float,
        default=SamplingParams.temperature,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    add("--top-p", type=float, default=SamplingParams.top_p, metavar="P", help="default: %(default)s (off)")
    add("--top-k", type=int, default=SamplingParams.top_k, metavar="K", help="default: %(default)s (off)")
    add("--min-p", type=float, default=SamplingParams.min_p, metavar="P", help="default: %(default)s (off)")
    add(
        "--repetition-penalty",
        type=float,
        default=SamplingParams.repetition_penalty,
        metavar="R",
        help="default: %(default)s (off)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=SamplingParams.presence_penalty,
        metavar="R",
        help="default: %(default)s (off)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=SamplingParams.frequency_penalty,
        metavar="R",
        help="default: %(default)s (off)",
    )
    add(
        "--logit-bias",
        type=_logit_bias,
        default={},
        metavar="JSON",
        help='added to the logits of token ids, such as {"11": -5}',
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --output json: log-probabilities of each token and the N likeliest",
    )
    add("--seed", type=int, help="makes sampling repeatable (default: another seed every time)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; repeatable")
    add("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence tokens")
    add("--max-batch-size", type=int, default=8, metavar="B", help="prompts that run together (default: %(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPUs, else the checkpoint's own")
    add("--mesh", metavar="data=D,tensor=T,expert=E", help="devices to share rows, matrices and experts (default: one)")
    distributed.add_flags(add)
    add("--kernels", choices=["xla", "triton", "interpret"], help="default: triton on NVIDIA GPUs, else xla")
    add("--output", choices=["text", "json"], default="text", help="json: one object a prompt (default: %(default)s)")
    add("--stream", action="store_true", help="print text as it comes, one prompt after the other")
    add("--stats", action="store_true", help="print times and tokens/s on stderr")
    add("--trace", metavar="FILE", help="write what happened in each cycle of each prompt, one JSON object a line")
    add("--profile-dir", metavar="DIR", help="compile first, then write a jax.profiler trace of the answers there")
    return parser


def _speculation(args: Namespace) -> SpeculativeConfig:
    """The speculative config, with the explicit flags over it."""
    asked = SpeculativeConfig() if args.speculative_config is None else SpeculativeConfig.parse(args.speculative_config)
    flags = {
        "model": args.drafter,
        "method": args.method,
        "num_speculative_tokens": args.num_speculative_tokens,
        "draft_sample_method": args.draft_sample_method,
        "confidence_threshold": args.confidence_threshold,
    }
    asked = replace(asked, **{name: value for name, value in flags.items() if value is not None})
    return replace(asked, model=demo.DEFAULT_DRAFTER) if args.model is None and asked.model is None else asked


def _sampling_params(args: Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logit_bias=args.logit_bias,
        logprobs=args.logprobs,
    )


def _logit_bias(text: str) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in json.loads(text).items()}
    except (ValueError, AttributeError):
        raise ArgumentTypeError(f"{text!r} is no JSON object of token ids and numbers") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from None


def _load(args: Namespace, speculation: SpeculativeConfig, show: ShowProgress) -> "Engine":
    from jaxspec.decoding.engine import Engine

    model = args.model
    if model is None:
        model = str(demo.ensure(report=show))
    show(f"loading {model}")
    engine = Engine.from_pretrained(
        model,
        speculative_config=speculation,
        dtype=args.dtype,
        mesh=args.mesh,
        max_batch_size=args.max_batch_size,
        kernels=args.kernels,
        on_load=lambda done, total: show(f"loading {model}: {done / total:.0%}"),
        on_compile=lambda program: show(None if program is None else f"compiling {program}"),
    )
    show(None)
    return engine


def _profiler(
    engine: "Engine", prompts: Sequence[PromptItem], params: SamplingParams, streamed: bool, folder: Path | None
) -> AbstractContextManager[None]:
    """Traces what runs inside into the folder, if there is one; everything is compiled, and has run once, before it begins."""
    if folder is None:
        return nullcontext()
    import jax

    for together in [[prompt] for prompt in prompts] if streamed else [prompts]:
        engine.warm_up(together, params)
    return jax.profiler.trace(folder)


def _generate(
    engine: "Engine", prompts: Sequence[PromptItem], params: SamplingParams, args: Namespace, show: ShowProgress
) -> "list[Result]":
    from jaxspec.decoding.result import GenerationInterrupted

    try:
        results = engine.generate(prompts, params)
    except GenerationInterrupted as interrupted:
        show(None)
        _print_results([result for result in interrupted.results if result is not None], args.output)
        raise
    _print_results(results, args.output)
    return results


def _print_results(results: "Sequence[Result]", output: str) -> None:
    for number, result in enumerate(results):
        if output == "json":
            _print(json.dumps(result.as_json(), ensure_ascii=False))
        else:
            _print(f"{_gap(number)}{result.text}")


def _stream(
    engine: "Engine", prompts: Sequence[PromptItem], params: SamplingParams, show: ShowProgress
) -> "list[Result]":
    results = []
    # Every prompt is checked before the first one is answered.
    for number, events in enumerate([engine.stream(prompt, params) for prompt in prompts]):
        show(None)
        _print(_gap(number), end="")
        try:
            for event in events:
                _print(event.text, end="")
                if event.result is not None:
                    results.append(replace(event.result, batch=number))
        finally:
            show(None)
            _print("")
    return results


def _print(text: str, end: str = "\n") -> None:
    if distributed.first():
        print(text, end=end, flush=True)


def _gap(number: int) -> str:
    """A blank line before every answer but the first."""
    return "\n" if number else ""


def _write_trace(path: Path, results: "Sequence[Result]") -> None:
    """One line a cycle and row."""
    with path.open("w", encoding="utf-8") as file:
        for row, result in enumerate(results):
            for cycle in result.cycles:
                file.write(json.dumps({"row": row, **cycle.as_json()}) + "\n")


def _print_stats(results: "Sequence[Result]") -> None:
    batches = {result.batch: result.timing for result in results}.values()
    prefill, decode = sum(timing.prefill_s for timing in batches), sum(timing.decode_s for timing in batches)
    prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    tokens = sum(result.usage.completion_tokens for result in results)
    lines = (
        ("load", results[0].timing.load_s, ""),
        ("compile", sum(timing.compile_s for timing in batches), ""),
        ("prefill", prefill, f"{prompt_tokens} tokens"),
        ("decode", decode, f"{tokens} tokens, {tokens / decode:.1f} tokens/s"),
    )
    for name, seconds, what in lines:
        print(f"{name:<8} {seconds:9.3f} s  {what}".rstrip(), file=sys.stderr)
    drafting = [result.speculative for result in results if result.speculative is not None]
    if drafting:
        cycles = sum(one.cycles for one in drafting)
        accepted, drafted = (sum(getattr(one, name) for one in drafting) for name in ("accepted", "drafted"))
        length = 1 + accepted / max(cycles, 1)
        print(
            f"drafting {drafting[0].method}: acceptance length {length:.2f} over {cycles} cycles, "
            f"{accepted} of {drafted} drafts accepted",
            file=sys.stderr,
        )


if __name__ == "__main__":
    leave(run(NAME, main))

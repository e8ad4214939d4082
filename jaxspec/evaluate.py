"""`python -m jaxspec.evaluate`: acceptance, speed and exactness of drafters, by one command."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec import demo, distributed
from jaxspec.cli import Parser, ShowProgress, leave, progress, run, warn, writable, writable_folder
from jaxspec.decoding.params import SamplingParams
from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.errors import CheckFailed, InputError
from jaxspec.evaluation.plot import FORMATS, plot
from jaxspec.evaluation.prompt_sets import encode, read_prompts, set_file, spread
from jaxspec.prompts import PromptItem, apply_chat

if TYPE_CHECKING:
    from jaxspec.evaluation.models import Models, Run

NAME = "jaxspec.evaluate"


def main(argv: list[str]) -> None:
    """Parse, evaluate, print.

    Raises:
        InputError: a flag, prompt or model that is not right.
        CheckFailed: --check-lossless has found a difference; everything has been printed.
    """
    args = _parser().parse_args(argv)
    distributed.start(args)
    asked, drafters, drafts = _speculation(args)
    params = _sampling_params(args)
    _check_mode(args, asked, drafters)
    items = _prompts(args)
    distributed.agree(args, prompts=items)
    writes = distributed.first()
    files = {flag: writable(flag, name) for flag, name in _files(args) if name is not None and writes}
    if args.profile_dir is not None:
        files["--profile-dir"] = writable_folder("--profile-dir", distributed.own_folder(args.profile_dir))
    with progress() as show:
        models = _load(args, asked, drafters, show)
        chat = models.tokenizer is not None and models.tokenizer.has_chat_template if args.chat is None else args.chat
        prompts = encode(models.tokenizer, apply_chat(items, chat, args.system))
        runs = _runs(args, models, asked, drafts, show)
        failure = None
        if args.check_lossless:
            found, lines, failure = _check_lossless(args, models, runs, prompts, params, show)
        elif args.doctor:
            found, lines = _doctor(args, models, runs, items, chat, asked, params, show)
        else:
            found, lines = _measure(args, runs, prompts, params, files, show)
    found = {**_settings(args, models, prompts), **found}
    if "--json" in files:
        files["--json"].write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if distributed.first():
        print(json.dumps(found) if args.output == "json" else "\n".join(lines), flush=True)
    if failure is not None:
        raise CheckFailed(failure)


def _parser() -> Parser:
    parser = Parser(
        NAME, "Measure drafters against plain decoding, check that they lose nothing, or find what ails them."
    )
    add = parser.add_argument
    add("--model", metavar="DIR|HUB_ID|FILE.gguf", help="the verifier (default: the demo model)")
    add("--drafter", action="append", default=[], metavar="DIR|HUB_ID", help="a drafter; repeatable")
    add("--speculative-config", metavar="JSON|FILE", help="vLLM's keys, for every drafter; a flag wins over a key")
    add(
        "--num-speculative-tokens",
        action="append",
        default=[],
        metavar="K,...",
        help="drafts a cycle, several for a sweep; repeatable (default: each checkpoint's)",
    )
    add("--draft-sample-method", choices=["greedy", "probabilistic"], help="how drafts are chosen (default: greedy)")
    add("--confidence-threshold", type=float, metavar="C", help="stop drafting below this confidence (DSpark)")
    add(
        "--prompt-file", metavar="FILE.jsonl", help="one prompt a line: prompt, messages, prompt_ids, question or turns"
    )
    add("--set", metavar="NAME", help="the prompts of NAME.jsonl in --data-dir")
    add("--data-dir", default="data", metavar="DIR", help="where sets are (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="N prompts, evenly spaced over the file (default: all)")
    add("--max-new-tokens", type=int, default=SamplingParams.max_new_tokens, metavar="N", help="default: %(default)s")
    add("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence tokens")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=SamplingParams.top_p, metavar="P", help="default: %(default)s (off)")
    add("--top-k", type=int, default=SamplingParams.top_k, metavar="K", help="default: %(default)s (off)")
    add("--seed", type=int, default=0, help="of every prompt (default: %(default)s)")
    add("--chat", action="store_true", default=None, help="use the chat template (default: where the model has one)")
    add("--no-chat", action="store_false", dest="chat", help="take prompts as they are")
    add("--system", metavar="TEXT", help="system message of every conversation that has none")
    add("--max-batch-size", type=int, metavar="B", help="prompts that run together (default: 1; for the checks 8)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPUs, else the checkpoint's own")
    add("--kernels", choices=["xla", "triton", "interpret"], help="default: triton on NVIDIA GPUs, else xla")
    add("--mesh", metavar="data=D,tensor=T,expert=E", help="devices to share rows, matrices and experts (default: one)")
    distributed.add_flags(add)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check-lossless", action="store_true", help="compare with plain decoding; status 1 if it differs"
    )
    mode.add_argument("--doctor", action="store_true", help="try what makes acceptance low, one thing at a time")
    add(
        "--draws",
        type=int,
        metavar="N",
        help="with --check-lossless: test N sampled answers of the shortest prompt too",
    )
    add("--output", choices=["table", "json"], default="table", help="on stdout (default: %(default)s)")
    add("--json", metavar="FILE", help="write the JSON there as well")
    add("--plot", metavar="FILE.png", help="draw acceptance per position and tokens/s by K")
    add("--trace", metavar="FILE", help="write what happened in each cycle, one JSON object a line")
    add("--profile-dir", metavar="DIR", help="write a jax.profiler trace of one batch of every run there")
    return parser


def _speculation(args: Namespace) -> tuple[SpeculativeConfig, list[str], list[int]]:
    """What is asked of every drafter, the drafters, and the numbers of drafts."""
    asked = SpeculativeConfig() if args.speculative_config is None else SpeculativeConfig.parse(args.speculative_config)
    flags = {"draft_sample_method": args.draft_sample_method, "confidence_threshold": args.confidence_threshold}
    asked = replace(asked, **{name: value for name, value in flags.items() if value is not None})
    drafts = []
    for part in ",".join(args.num_speculative_tokens).split(",") if args.num_speculative_tokens else []:
        try:
            drafts.append(int(part))
        except ValueError:
            raise InputError(f"--num-speculative-tokens {part!r} is no whole number; give K or K,K,...") from None
        replace(asked, num_speculative_tokens=drafts[-1])  # checks it
    by_default = [demo.DEFAULT_DRAFTER] if args.model is None else []
    drafters = args.drafter or (by_default if asked.model is None else [asked.model])
    drafters = [drafter for drafter in drafters if drafter != "none"]
    if not drafters:
        given = [f"--{name.replace('_', '-')}" for name in (*flags, "num_speculative_tokens") if getattr(args, name)]
        if given or asked != SpeculativeConfig():
            raise InputError(f"{(given or ['--speculative-config'])[0]} needs --drafter, and there is none")
    return asked, list(dict.fromkeys(drafters)), list(dict.fromkeys(drafts))


def _sampling_params(args: Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def _check_mode(args: Namespace, asked: SpeculativeConfig, drafters: Sequence[str]) -> None:
    """Flags that don't go together."""
    if args.draws is not None and (not args.check_lossless or args.draws < 1):
        raise InputError(f"--draws {args.draws} must be at least 1, and goes with --check-lossless")
    if args.check_lossless and asked.rejection_sample_method == "synthetic":
        raise InputError("--check-lossless: rejection_sample_method synthetic is not lossless, by design")
    if args.doctor and asked.rejection_sample_method == "synthetic":
        raise InputError(
            "--doctor: rejection_sample_method synthetic accepts whatever the drafts are; leave one of them out"
        )
    if args.distributed and (args.check_lossless or args.doctor):
        raise InputError("--distributed goes with measuring; run --check-lossless and --doctor as one process")
    if args.doctor and not drafters:
        raise InputError("--doctor needs --drafter, and there is none")
    for flag, name in [*_files(args), ("--profile-dir", args.profile_dir)]:
        if name is not None and flag != "--json" and (args.check_lossless or args.doctor):
            raise InputError(f"{flag} goes with measuring; leave it out, or leave out --check-lossless and --doctor")
    if args.plot is not None and Path(args.plot).suffix not in FORMATS:
        raise InputError(f"--plot {args.plot}: the file's name must end in one of {', '.join(FORMATS)}")


def _files(args: Namespace) -> list[tuple[str, str | None]]:
    return [("--json", args.json), ("--plot", args.plot), ("--trace", args.trace)]


def _prompts(args: Namespace) -> list[PromptItem]:
    if (args.prompt_file is None) == (args.set is None):
        what = "there is no prompt" if args.set is None else "there are two sources of prompts"
        raise InputError(f"{what}; give --prompt-file or --set, one of them")
    if args.set is not None:
        return spread(read_prompts(set_file(Path(args.data_dir), args.set), "--set"), args.limit)
    return spread(read_prompts(Path(args.prompt_file), "--prompt-file"), args.limit)


def _batch_size(args: Namespace) -> int:
    if args.max_batch_size is not None:
        return args.max_batch_size
    return 8 if args.check_lossless or args.doctor else 1


def _load(args: Namespace, asked: SpeculativeConfig, drafters: Sequence[str], show: ShowProgress) -> "Models":
    from jaxspec.evaluation.models import load_models

    if args.model is None:
        args.model = str(demo.ensure(report=show))
    show(f"loading {args.model}")
    return load_models(
        args.model,
        drafters,
        asked,
        args.dtype,
        lambda done, total: show(f"loading {done / total:.0%}"),
        args.kernels,
        args.mesh,
    )


def _runs(
    args: Namespace, models: "Models", asked: SpeculativeConfig, drafts: Sequence[int], show: ShowProgress
) -> "list[Run]":
    from jaxspec.evaluation.models import make_runs

    return make_runs(
        models,
        asked,
        drafts,
        _batch_size(args),
        lambda program: show(None if program is None else f"compiling {program}"),
    )


def _settings(args: Namespace, models: "Models", prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the figures belong to."""
    import jax

    device = jax.local_devices()[0]
    return {
        "model": args.model,
        "dtype": models.verifier.module.embed.weight[...].dtype.name,
        "device": f"{device.platform} {device.device_kind}",
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "max_batch_size": _batch_size(args),
        "mesh": args.mesh,
    }


def _measure(
    args: Namespace,
    runs: "Sequence[Run]",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    files: dict[str, Path],
    show: ShowProgress,
) -> tuple[dict[str, Any], list[str]]:
    from jaxspec.evaluation.measure import measure, peak_memory, profile
    from jaxspec.evaluation.report import losses, measurement_json, measurement_lines, write_trace

    measured = measure(runs, prompts, params, _batch_size(args), show)
    if "--profile-dir" in files:
        profile(runs, prompts, params, _batch_size(args), files["--profile-dir"])
    if "--trace" in files:
        write_trace(files["--trace"], measured)
    if "--plot" in files:
        plot(files["--plot"], measured)
    for line in losses(measured) if distributed.first() else ():
        warn(NAME, line)
    memory = peak_memory()
    return measurement_json(measured, memory), measurement_lines(measured, memory)


def _check_lossless(
    args: Namespace,
    models: "Models",
    runs: "Sequence[Run]",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    show: ShowProgress,
) -> tuple[dict[str, Any], list[str], str | None]:
    from jaxspec.evaluation.check_report import lossless_failure, lossless_json, lossless_lines, lossless_summary
    from jaxspec.evaluation.distribution import check_drafters
    from jaxspec.evaluation.lossless import check_greedy

    exact = models.verifier.module.embed.weight[...].dtype == "float32"
    if args.draws is not None and not exact:
        raise InputError("--draws needs --dtype float32: bfloat16's rounding by itself shifts the probabilities")
    greedy = check_greedy(models, runs, prompts, replace(params, temperature=0.0), _batch_size(args), show)
    drawn = []
    if args.draws is not None:
        sampling = params if not params.greedy else replace(params, temperature=1.0)
        drawn = check_drafters(models, runs, min(prompts, key=len), sampling, args.draws, show)
    failure = lossless_failure(greedy, drawn)
    lines = lossless_lines(greedy, drawn, exact)
    if failure is None:
        lines += ["", lossless_summary(greedy, drawn)]
    return {"lossless": lossless_json(greedy, drawn)}, lines, failure


def _doctor(
    args: Namespace,
    models: "Models",
    runs: "Sequence[Run]",
    items: Sequence[PromptItem],
    chat: bool,
    asked: SpeculativeConfig,
    params: SamplingParams,
    show: ShowProgress,
) -> tuple[dict[str, Any], list[str]]:
    from jaxspec.evaluation.check_report import diagnosis_json, diagnosis_lines
    from jaxspec.evaluation.doctor import Subject, diagnose
    from jaxspec.evaluation.models import load_models

    here = models.verifier.module.embed.weight[...].dtype.name
    other = "bfloat16" if here == "float32" else "float32"
    found, lines = [], []
    for one in runs[1:]:
        assert one.module is not None and one.drafter is not None

        def reload(drafter: str = one.drafter):
            again = load_models(args.model, [drafter], asked, other, kernels=args.kernels, mesh=args.mesh)
            return again, again.drafters[0][1].module

        subject = Subject(
            models=models,
            drafter=one.module,
            plan=one.engine.programs.plan,
            items=items,
            chat=chat,
            system=args.system,
            params=params,
            batch_size=_batch_size(args),
            reload=(other, reload),
        )
        diagnosis = diagnose(subject, show)
        found.append(diagnosis_json(one.name, diagnosis))
        lines += [*([""] if lines else []), *diagnosis_lines(one.name, diagnosis)]
    return {"doctor": found}, lines


if __name__ == "__main__":
    leave(run(NAME, main))

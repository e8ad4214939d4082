"""`python -m jaxspec.plan`: what a model and its drafter need, and how fast they can be, before any weight is loaded."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxspec.cli import Parser, ShowProgress, leave, progress, run
from jaxspec.errors import InputError

if TYPE_CHECKING:
    from jaxspec.forecast.compiled import Memory
    from jaxspec.forecast.setup import Setup

NAME = "jaxspec.plan"
DEVICES = ("a100-40gb", "a100-80gb", "h100-80gb", "cpu")
SHARE = 0.8  # of the floor's speed


def main(argv: list[str]) -> None:
    """Parse, plan, print.

    Raises:
        InputError: a flag or a config that is not right.
    """
    args = _parser().parse_args(argv)
    _check(args)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX starts: a GPU that is here is left alone
    with progress() as show:
        show("reading the configs")
        setup = _setup(args)
        compiled, by = _compiled(args, setup, show) if args.compile else (None, "")
        show(None)
    from jaxspec.forecast.devices import find
    from jaxspec.forecast.report import forecast, forecast_json, forecast_lines

    device = find(args.device)
    found = forecast(setup, device, args.batch, args.context, args.acceptance_length, args.share_of_floor, compiled, by)
    if args.output == "json":
        asked = {
            "model": args.model,
            "drafter": args.drafter,
            "device": device.name,
            "mesh": setup.sizes,
            "dtype": setup.dtype.name,
            "batch": args.batch,
            "context": args.context,
            "num_speculative_tokens": setup.plan.drafts,
            "acceptance_length": args.acceptance_length,
        }
        print(json.dumps({**asked, **forecast_json(found, args.batch)}))
        return
    drafter = "no drafter" if setup.drafter is None else f"{args.drafter}, K = {setup.plan.drafts}"
    print("\n".join([f"{args.model} with {drafter}", *forecast_lines(found, setup, device, args.batch, args.context)]))


def _parser() -> Parser:
    parser = Parser(NAME, "Say what memory a model and its drafter need, and the speed that the devices allow.")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR|CONFIG.json|HUB_ID|FILE.gguf", help="the verifier; weights are not read")
    add("--drafter", default="none", metavar="DIR|FILE.json|HUB_ID|none", help="the drafter (default: none)")
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts a cycle (default: the checkpoint's)")
    add("--device", choices=DEVICES, default="a100-80gb", help="default: %(default)s")
    add("--mesh", default="data=1", metavar="data=1,tensor=2", help="devices along each axis (default: one device)")
    add("--batch", type=int, default=1, metavar="B", help="rows that run together (default: %(default)s)")
    add(
        "--context",
        type=int,
        default=4096,
        metavar="S",
        help="tokens of a row, prompt and answer (default: %(default)s)",
    )
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on the CPU, else bfloat16")
    add("--acceptance-length", type=float, metavar="A", help="tokens a cycle commits, for tokens/s with the drafter")
    add(
        "--share-of-floor",
        type=float,
        default=SHARE,
        metavar="X",
        help="share of the floor's speed to expect (default: %(default)s)",
    )
    add("--compile", action="store_true", help="take temporaries from compiled programs: minutes")
    add("--output", choices=["text", "json"], default="text", help="default: %(default)s")
    return parser


def _check(args: Namespace) -> None:
    for flag, value, good in (
        ("--batch", args.batch, args.batch >= 1),
        ("--share-of-floor", args.share_of_floor, 0 < args.share_of_floor <= 1),
        ("--acceptance-length", args.acceptance_length, args.acceptance_length is None or args.acceptance_length >= 1),
    ):
        if not good:
            wanted = "above 0 and at most 1" if flag == "--share-of-floor" else "at least 1"
            raise InputError(f"{flag} is {value}; it must be {wanted}")
    if args.drafter == "none" and (args.num_speculative_tokens is not None or args.acceptance_length is not None):
        flag = "--acceptance-length" if args.num_speculative_tokens is None else "--num-speculative-tokens"
        raise InputError(f"{flag} needs --drafter, and there is none")


def _setup(args: Namespace) -> "Setup":
    import numpy as np
    from jax.numpy import dtype

    from jaxspec.decoding.cycle import Plan
    from jaxspec.decoding.planning import make_plan
    from jaxspec.decoding.speculative import SpeculativeConfig
    from jaxspec.forecast.configs import drafter_config, verifier_config
    from jaxspec.forecast.setup import Setup, check_room
    from jaxspec.sharding import parse_mesh

    sizes = parse_mesh(args.mesh)
    if args.batch % sizes["data"]:
        raise InputError(f"--batch {args.batch} is no multiple of the {sizes['data']} devices along data")
    verifier = verifier_config(args.model)
    drafter = None if args.drafter == "none" else drafter_config(args.drafter, verifier)
    plan = Plan()
    if drafter is not None:
        plan = make_plan(SpeculativeConfig(num_speculative_tokens=args.num_speculative_tokens), drafter)
        if args.acceptance_length is not None and args.acceptance_length > plan.drafts + 1:
            raise InputError(
                f"--acceptance-length {args.acceptance_length:g} is more than the K + 1 = {plan.drafts + 1} tokens of a cycle"
            )
    wanted = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    setup = Setup(verifier, drafter, plan, np.dtype(dtype(wanted)), sizes)
    check_room(setup, args.context)
    return setup


def _compiled(args: Namespace, setup: "Setup", show: ShowProgress) -> "tuple[Mapping[str, Memory], str]":
    """Memory of the compiled programs, and what compiled them."""
    import jax

    from jaxspec.forecast.memory import compiled_memory
    from jaxspec.forecast.programs import lower_here
    from jaxspec.forecast.target import Target, missing
    from jaxspec.sharding import make_mesh

    if args.device == "cpu":
        if jax.default_backend() != "cpu":
            raise InputError("--compile for the CPU needs JAX_PLATFORMS=cpu")
        lower, mesh = lower_here, make_mesh(setup.sizes)
    else:
        reason = missing()
        if reason is not None:
            raise InputError(f"--compile: {reason}")
        target = Target.load(args.device, setup.sizes)
        lower, mesh = target.lower, target.mesh
    show("compiling")
    capacity = setup.programs.capacity(args.context)
    return compiled_memory(setup, args.batch, capacity, lower, mesh), f"compiled by JAX {jax.__version__}"


if __name__ == "__main__":
    leave(run(NAME, main))

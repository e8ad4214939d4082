"""`python -m jaxspec.convert`: drafters between formats, verifiers between safetensors, GGUF and orbax."""

import sys

from jaxspec.cli import Parser, progress, run

_FORMATS = ("speculators", "z-lab", "deepspec", "eagle3", "orbax", "safetensors")
_DESCRIPTION = (
    "Convert a drafter or a verifier to another format. Nothing is lost without being named: a format that cannot hold "
    "the drafter is an error, and --drop says what may go."
)


def parser() -> Parser:
    """The command's arguments."""
    made = Parser("python -m jaxspec.convert", _DESCRIPTION)
    made.add_argument("src", metavar="SRC", help="directory, hub id or .gguf file of a drafter or verifier")
    made.add_argument("dst", metavar="DST", help="directory to write; must not exist")
    made.add_argument(
        "--to",
        required=True,
        choices=_FORMATS,
        help="drafters: speculators, z-lab, deepspec, eagle3, orbax; verifiers: safetensors, orbax",
    )
    made.add_argument(
        "--verifier",
        metavar="DIR|HUB_ID",
        help="the drafter's verifier: lends embedding and head where the format wants them, shows where they are its own, "
        "and names itself in the config",
    )
    made.add_argument(
        "--mesh",
        metavar="data=D,tensor=T,expert=E",
        help="devices that hold a verifier's weights in between, split over them (default: host memory)",
    )
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of all weights (default: a drafter's as stored; a verifier's bfloat16 if all are, else float32)",
    )
    made.add_argument(
        "--drop",
        default="",
        metavar="PARTS",
        help="parts to leave out, separated by commas: markov, confidence, embed, head, window",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return run("jaxspec.convert", _convert, argv)


def _convert(argv: list[str]) -> None:
    arguments = parser().parse_args(argv)
    from jaxspec.checkpoint.convert import convert

    drop = tuple(part.strip() for part in arguments.drop.split(",") if part.strip())
    with progress() as show:
        show(f"converting {arguments.src}")
        report = convert(
            arguments.src,
            arguments.dst,
            arguments.to,
            verifier=arguments.verifier,
            dtype=arguments.dtype,
            drop=drop,
            mesh=arguments.mesh,
        )
    print("\n".join(report.lines()))


if __name__ == "__main__":
    sys.exit(main())

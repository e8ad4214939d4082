"""`python -m jaxspec`: the list of commands, and `python -m jaxspec COMMAND ...` for `python -m jaxspec.COMMAND ...`."""

import difflib
import runpy
import sys
from importlib.util import find_spec

from jaxspec.version import __version__

_DESCRIPTIONS = {
    "generate": "generate text with a verifier, and a drafter where there is one",
    "train": "train a drafter for a verifier",
    "convert": "convert verifiers and drafters between formats",
    "evaluate": "measure acceptance, speed and exactness",
    "plan": "say what memory a model needs, and the speed that the devices allow",
    "serve": "serve an OpenAI-compatible HTTP API",
}


def commands() -> dict[str, str]:
    """Name and one-line description of each command that this version has."""
    return {name: text for name, text in _DESCRIPTIONS.items() if find_spec(f"jaxspec.{name}") is not None}


def main(argv: list[str] | None = None) -> int:
    """Lists the commands, or runs the one that `argv` (default: the process's arguments) begins with; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    known = commands()
    if not argv or argv[0] in ("-h", "--help"):
        print(f"jaxspec {__version__}: lossless speculative decoding in JAX\n")
        for name, text in known.items():
            print(f"  python -m jaxspec.{name:<10} {text}")
        print("\nEach takes --help.")
        return 0
    if argv[0] == "--version":
        print(f"jaxspec {__version__}")
        return 0
    if argv[0] not in known:
        near = difflib.get_close_matches(argv[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known commands: {', '.join(known)}"
        print(f"jaxspec: unknown command {argv[0]!r}; {hint}", file=sys.stderr)
        return 2
    sys.argv = argv
    runpy.run_module(f"jaxspec.{argv[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

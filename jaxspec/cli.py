"""What every command shares: one-line errors, exit codes, quiet libraries, and a progress line on terminals.

Exit codes: 0 done; 2 bad input (one line on stderr); 1 internal failure (a traceback); 130 interrupted by Ctrl-C; 141 the reader of the
output went away.
"""

import argparse
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from jaxspec.errors import InputError

BAD_INPUT, INTERNAL, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

ShowProgress = Callable[[str | None], None]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors, so one line without the usage."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def run(name: str, main: Callable[[list[str]], None], argv: list[str] | None = None) -> int:
    """Run a command and turn what it raises into an exit code.

    Args:
        name: the command, as it begins every line on stderr.
        main: takes the arguments and prints its result.
        argv: the arguments; None takes the process's.
    """
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")

    def warn(message: Warning | str, *_: object) -> None:
        print(f"{name}: warning: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = warn
        try:
            main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except InputError as error:
            print(f"{name}: error: {one_line(error)}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # What is still buffered has no reader: point stdout elsewhere, so that Python's own flush at exit is silent.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except Exception:
            traceback.print_exc()
            print(f"{name}: internal failure, see the traceback above", file=sys.stderr)
            return INTERNAL
    return 0


def one_line(message: object) -> str:
    """The message with its line breaks, and the spaces round them, made single spaces."""
    return " ".join(line.strip() for line in str(message).splitlines())


@contextmanager
def progress() -> Iterator[ShowProgress]:
    """A spinner with a message on stderr, on terminals only. Call the yielded function to change the message; None hides it."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    status = Console(stderr=True).status("")

    def show(message: str | None) -> None:
        if message is None:
            status.stop()
        else:
            status.update(message)
            status.start()

    try:
        yield show
    finally:
        status.stop()

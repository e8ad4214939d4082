"""What every command shares: one-line errors, exit codes, quiet libraries, and a progress line on terminals.

Exit codes: 0 done; 2 bad input (one line on stderr); 1 internal failure (a traceback) or a failed check (one line); 130 interrupted by
Ctrl-C; 141 the reader of the output went away.
"""

import argparse
import io
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from jaxspec import distributed
from jaxspec.errors import CheckFailed, InputError

BAD_INPUT, INTERNAL, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 1, 130, 141
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

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: warn(name, message) if distributed.first() else None
        try:
            main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except InputError as error:
            print(f"{name}{distributed.label()}: error: {one_line(error)}", file=sys.stderr)
            return BAD_INPUT
        except CheckFailed as failure:
            print(f"{name}{distributed.label()}: failed: {one_line(failure)}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # What is still buffered has no reader: point stdout elsewhere, so that Python's own flush at exit is silent.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except Exception as error:
            if distributed.lost(error):
                print(
                    f"{name}{distributed.label()}: failed: another process has ended: {one_line(error)}",
                    file=sys.stderr,
                )
                return FAILED
            traceback.print_exc()
            print(f"{name}: internal failure, see the traceback above", file=sys.stderr)
            return INTERNAL
    return 0


def leave(status: int) -> NoReturn:
    """End the process with what `run` returned.

    After Ctrl-C a dispatched program may still be running on XLA's threads; taking the interpreter apart under it can crash the process,
    so that case skips the taking apart. So does one of several processes that has failed: it must not wait for the others, and they
    notice that it is gone.
    """
    if status == INTERRUPTED or (status and distributed.running()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def warn(name: str, message: object) -> None:
    """A warning on stderr, in one line that the command's name begins."""
    print(f"{name}: warning: {one_line(message)}", file=sys.stderr)


def one_line(message: object) -> str:
    """The message with its line breaks, and the spaces round them, made single spaces."""
    return " ".join(line.strip() for line in str(message).splitlines())


def writable(flag: str, name: str) -> Path:
    """The file that a flag names, made now if it isn't there, so that it is refused before the work and not after it."""
    path = Path(name)
    try:
        path.open("a").close()
    except OSError as error:
        raise InputError(f"{flag} {name}: cannot be written: {error.strerror}") from error
    return path


def writable_folder(flag: str, name: str) -> Path:
    """The folder that a flag names, made now, so that it is refused before the work and not after it."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise InputError(f"{flag} {name}: cannot be written: {error.strerror}") from error
    return path


@contextmanager
def progress() -> Iterator[ShowProgress]:
    """A spinner with a message on stderr, on terminals only. Call the yielded function to change the message; None hides it."""
    if not sys.stderr.isatty() or not distributed.first():
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

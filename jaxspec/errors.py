"""The exceptions that commands turn into one line on stderr; every other one means that jaxspec is wrong."""


class InputError(ValueError):
    """Bad input: one line that names the flag, file, tensor or field, the value seen and the value wanted.

    Commands print it to stderr without a traceback and exit with status 2.
    """


class CheckFailed(Exception):
    """A check that the user asked for has found something wrong: one line that says what. Commands exit with status 1."""

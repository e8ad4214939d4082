"""The one exception that means "the input is wrong", as opposed to "jaxspec is wrong"."""


class InputError(ValueError):
    """Bad input: one line that names the flag, file, tensor or field, the value seen and the value wanted.

    Commands print it to stderr without a traceback and exit with status 2.
    """

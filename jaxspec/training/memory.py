"""The process's memory."""

import ctypes


def hand_back() -> None:
    """Gives what has been freed, and the C library still holds, back to the system. Does nothing where it has no malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

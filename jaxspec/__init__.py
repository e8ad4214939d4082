"""jaxspec: lossless speculative decoding in JAX.

The names below are loaded on first use, so that `import jaxspec` and every command's --help stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InputError
from jaxspec.version import __version__

if TYPE_CHECKING:
    from jaxspec.checkpoint.drafters.load import load_drafter
    from jaxspec.checkpoint.load import load_verifier
    from jaxspec.decoding.engine import Engine
    from jaxspec.decoding.params import SamplingParams
    from jaxspec.decoding.result import GenerationInterrupted, Result, StreamEvent

__all__ = [
    "Engine",
    "GenerationInterrupted",
    "InputError",
    "Result",
    "SamplingParams",
    "StreamEvent",
    "__version__",
    "load_drafter",
    "load_verifier",
]

_HOMES = {
    "Engine": "jaxspec.decoding.engine",
    "GenerationInterrupted": "jaxspec.decoding.result",
    "Result": "jaxspec.decoding.result",
    "SamplingParams": "jaxspec.decoding.params",
    "StreamEvent": "jaxspec.decoding.result",
    "load_drafter": "jaxspec.checkpoint.drafters.load",
    "load_verifier": "jaxspec.checkpoint.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

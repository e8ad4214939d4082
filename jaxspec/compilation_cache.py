"""Compiled programs kept on disk, so that the next process does not compile them again."""

import tempfile
import warnings

import jax

from jaxspec.demo import CACHE_VARIABLE, cache_directory

_MAX_BYTES = 4 * 1024**3


def enable() -> None:
    """Turn JAX's persistent compilation cache on, in `xla` under $JAXSPEC_CACHE or the user's cache directory.

    Does nothing where one is set already (`JAX_COMPILATION_CACHE_DIR` or `jax_compilation_cache_dir`). Where the directory cannot be
    written it warns and compiles without. Programs of any compile time are kept: by default JAX leaves out what compiles in under a
    second, which is most of a small model. The directory holds at most 4 GiB, or what
    `JAX_COMPILATION_CACHE_MAX_SIZE` says; with a limit JAX also locks it round each read and write, so that processes started together do
    not read half a program.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_directory() / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        _warn_once(
            f"{directory}: compiled programs cannot be kept ({error.strerror}); set {CACHE_VARIABLE} to a writable directory"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if jax.config.values["jax_compilation_cache_max_size"] < 0:  # JAX's default: no limit
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)

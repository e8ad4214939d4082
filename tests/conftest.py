"""One setting for every test: the CPU (unless JAX_PLATFORMS names another platform), no network, strict promotion, and compiled programs
kept between runs.

All of it goes through environment variables, before any test module imports jax, so that processes that tests start have it too.
"""

import os
import tempfile
from pathlib import Path

import platformdirs


def _keep_compiled_programs(folder: Path) -> None:
    """Points JAX's persistent cache at `folder`, at most 2 GiB of it; without a writable folder every run compiles afresh.

    A size limit makes JAX take a file lock round each read and write, so that test runs at the same time never see half a program. Each
    write also looks at every entry, so what compiles in under a tenth of a second, single operations mostly, is left out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
_keep_compiled_programs(platformdirs.user_cache_path("jaxspec", appauthor=False) / "test-xla")

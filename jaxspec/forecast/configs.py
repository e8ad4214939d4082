"""The configs of a verifier and a drafter, without their weights where those are far away."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)

from jaxspec.checkpoint.drafters.checks import check_verifier
from jaxspec.checkpoint.drafters.formats import detect_format
from jaxspec.checkpoint.drafters.load import open_drafter
from jaxspec.checkpoint.drafters.parsed import Parsed
from jaxspec.checkpoint.drafters.table import canonical
from jaxspec.checkpoint.load import open_verifier
from jaxspec.checkpoint.orbax import is_orbax
from jaxspec.checkpoint.safetensors import read_json
from jaxspec.config import VerifierConfig
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.families import parse_config
from jaxspec.verifiers.hf import Fields

T = TypeVar("T")


def verifier_config(given: str) -> VerifierConfig:
    """Of a directory (its config.json is enough), a config.json of any name, a .gguf file, or a hub id, of which the config alone is
    downloaded.

    Raises:
        InputError: nothing of the kind is there, or the config is no supported verifier's.
    """
    path = Path(given).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and is_orbax(path)):
        return open_verifier(path).config
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        file = _from_hub("--model", given, _config_file)
    return parse_config(read_json(file), str(file))[0]


def drafter_config(given: str, verifier: VerifierConfig) -> DrafterConfig:
    """Of a checkpoint's directory, or a hub id, of which the config and the tensors' names alone are downloaded; or a .json file with its
    config.json under "config" and its tensors' names as the keys of "tensors".

    Raises:
        InputError: nothing of the kind is there, it is no drafter, or another verifier's.
    """
    path = Path(given).expanduser()
    layers = verifier.num_layers
    if path.is_dir():
        opened = open_drafter(path, layers)
        found = Parsed(opened.config, opened.verifier)
    elif path.exists():
        data = read_json(path)
        if not all(isinstance(data.get(key), dict) for key in ("config", "tensors")):
            raise InputError(
                f"--drafter {given}: a drafter's config doesn't say everything: give its directory, or a file with its config.json under "
                '"config" and its tensors\' names as the keys of "tensors"'
            )
        found = _parse(data["config"], data["tensors"], str(path), layers)
    else:
        cached = _in_cache(given)
        if cached is not None:
            return drafter_config(str(cached), verifier)
        file = _from_hub("--drafter", given, _config_file)
        files = _from_hub("--drafter", given, get_safetensors_metadata).files_metadata.values()
        found = _parse(read_json(file), {name for file in files for name in file.tensors}, given, layers)
    check_verifier(found.config, found.verifier.num_layers, verifier, given)
    return found.config


def _parse(config: dict[str, Any], tensors: Iterable[str], where: str, layers: int) -> Parsed:
    fields, names = Fields(config, where), {canonical(name) for name in tensors}
    return detect_format(fields, names).read(fields, names, layers)


def _in_cache(hub_id: str) -> Path | None:
    """The snapshot of a drafter that was downloaded before."""
    try:
        found = Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    return found if list(found.glob("*.safetensors")) else None


def _config_file(hub_id: str) -> Path:
    return Path(hf_hub_download(hub_id, "config.json"))


def _from_hub(flag: str, given: str, fetch: Callable[[str], T]) -> T:
    """What `fetch` brings of a hub id."""
    if len(Path(given).parts) != 2 or Path(given).is_absolute():
        raise InputError(f"{flag} {given}: no such directory or file, and not a hub id of the form owner/name")
    try:
        return fetch(given)
    except (OSError, ValueError, HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{flag} {given}: not a directory, and not found in the hub or its cache: {reason}") from error

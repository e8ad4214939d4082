"""Writing a verifier as an ordinary Hugging Face directory: the name tables read in the other direction."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxspec.checkpoint.load import LoadedVerifier, flat_parameters
from jaxspec.errors import InputError
from jaxspec.verifiers.families import FAMILIES, Family
from jaxspec.verifiers.names import Link, expand
from jaxspec.verifiers.names import Path as ParameterPath

MAX_SHARD_BYTES = 4_000_000_000

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}


def save_verifier(path: Path, loaded: LoadedVerifier, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes weights (in their dtype in memory), config.json, generation_config.json and the tokenizer's files to the
    new directory `path`.

    Everything is written beside `path` and renamed at the end, so that an interrupted run leaves no directory that
    looks complete. The tokenizer of a .gguf source is not written here (`checkpoint.gguf_tokenizer.write_tokenizer`).
    Raises InputError where `path` exists or cannot be written.
    """
    if path.exists():
        raise InputError(f"{path}: exists already")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        write_directory(work, loaded, max_shard_bytes)
        work.chmod(0o755)
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_directory(directory: Path, loaded: LoadedVerifier, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """The files of `save_verifier`, into an existing directory."""
    config = dict(loaded.hf_config)
    family = FAMILIES[config["model_type"]]
    dtype = _write_weights(directory, loaded, family, max_shard_bytes)
    config["architectures"] = [_ARCHITECTURES[config["model_type"]]]
    config["tie_word_embeddings"] = loaded.config.tied
    config["dtype"] = dtype
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    if loaded.eos_ids:
        ids["eos_token_id"] = list(loaded.eos_ids)
    _write_json(directory / "generation_config.json", ids)
    if loaded.tokenizer_source.is_dir():
        for name in _TOKENIZER_FILES:
            if (loaded.tokenizer_source / name).is_file():
                shutil.copyfile(loaded.tokenizer_source / name, directory / name)


def _write_weights(directory: Path, loaded: LoadedVerifier, family: Family, max_shard_bytes: int) -> str:
    """One file, or shards with an index; returns the dtype's name."""
    leaves = flat_parameters(nnx.state(loaded.module))
    shard: dict[str, np.ndarray] = {}
    files: list[list[str]] = []
    size = total = 0
    for name, value in _stored_tensors(leaves, family):
        if shard and size + value.nbytes > max_shard_bytes:
            files.append(_write_shard(directory, len(files), shard))
            shard, size = {}, 0
        shard[name] = value
        size += value.nbytes
        total += value.nbytes
    files.append(_write_shard(directory, len(files), shard))
    _name_shards(directory, files, total)
    return str(next(iter(leaves.values())).dtype)


def _stored_tensors(leaves: dict[ParameterPath, Any], family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """(full name, value) of every tensor of the file, in the table's first layout."""
    links = expand(family.table, {path: tuple(leaf.shape) for path, leaf in leaves.items()}, family.table.layouts[0])
    halves: dict[str, np.ndarray] = {}
    for link in links:
        value = _host_value(leaves, link)
        if link.half is None:
            yield _full_name(link.name), np.ascontiguousarray(value.reshape(link.shape))
        elif link.name in halves:
            yield _full_name(link.name), np.concatenate([halves.pop(link.name), value], axis=1)
        else:
            halves[link.name] = value


def _host_value(leaves: dict[ParameterPath, Any], link: Link) -> np.ndarray:
    value = np.asarray(jax.device_get(leaves[link.path][...]))
    return value if link.expert is None else value[link.expert]


def _full_name(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


def _write_shard(directory: Path, index: int, tensors: dict[str, np.ndarray]) -> list[str]:
    path = directory / f"{index}.part"
    path.touch()
    mode = path.stat().st_mode  # the user's umask; save_file would leave 0600
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    return list(tensors)


def _name_shards(directory: Path, files: list[list[str]], total: int) -> None:
    if len(files) == 1:
        (directory / "0.part").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        shard = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"{index}.part").rename(directory / shard)
        weight_map.update(dict.fromkeys(names, shard))
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")

"""Writing a verifier as an ordinary Hugging Face directory: the name tables read in the other direction."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.checkpoint.load import LoadedVerifier
from jaxspec.checkpoint.orbax import write_orbax
from jaxspec.checkpoint.safetensors import read_json
from jaxspec.checkpoint.write import MAX_SHARD_BYTES, new_directory, write_json, write_tensors
from jaxspec.verifiers.families import FAMILIES, Family
from jaxspec.verifiers.names import Link, expand
from jaxspec.verifiers.names import Path as ParameterPath

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
_GENERATION = "generation_config.json"
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
    with new_directory(path) as work:
        write_directory(work, loaded, max_shard_bytes)


def write_directory(directory: Path, loaded: LoadedVerifier, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """The files of `save_verifier`, into an existing directory."""
    leaves = flat_parameters(nnx.state(loaded.module))
    config = exported_config(loaded)
    write_tensors(directory, _stored_tensors(leaves, FAMILIES[config["model_type"]]), max_shard_bytes)
    write_json(directory / "config.json", config)
    given = loaded.path / _GENERATION
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    generation |= read_json(given) if given.is_file() else {}
    if loaded.eos_ids:
        generation["eos_token_id"] = list(loaded.eos_ids)
    write_json(directory / _GENERATION, generation)
    _copy_tokenizer(directory, loaded)


def write_orbax_directory(directory: Path, loaded: LoadedVerifier) -> None:
    """The same as an orbax checkpoint, with the tokenizer's files beside it, into an existing directory."""
    arrays = {path: leaf[...] for path, leaf in flat_parameters(nnx.state(loaded.module)).items()}
    manifest = {"config": exported_config(loaded), "eos_ids": list(loaded.eos_ids)}
    write_orbax(directory, "verifier", manifest, arrays)
    if (loaded.path / _GENERATION).is_file():
        shutil.copyfile(loaded.path / _GENERATION, directory / _GENERATION)
    _copy_tokenizer(directory, loaded)


def exported_config(loaded: LoadedVerifier) -> dict[str, Any]:
    """The text model's config.json."""
    config = dict(loaded.hf_config)
    config["architectures"] = [_ARCHITECTURES[config["model_type"]]]
    config["tie_word_embeddings"] = loaded.config.tied
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = str(loaded.module.embed.weight[...].dtype)
    return config


def _copy_tokenizer(directory: Path, loaded: LoadedVerifier) -> None:
    if loaded.tokenizer_source.is_dir():
        for name in _TOKENIZER_FILES:
            if (loaded.tokenizer_source / name).is_file():
                shutil.copyfile(loaded.tokenizer_source / name, directory / name)


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

"""The tokenizer inside a .gguf file: byte-level BPE rebuilt from its metadata.

transformers can do this too, but only beside torch, and it splits text as GPT-2 does for every pre-tokenizer name it
does not know, SmolLM2's among them (which keeps digits apart).
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxspec.checkpoint.gguf import GgufMetadata
from jaxspec.errors import InputError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a .gguf file, with its special tokens and chat template.

    Raises InputError for a tokenizer that is not byte-level BPE and for a pre-tokenizer that is not known.
    """
    metadata = GgufMetadata(path)
    model = metadata.field("tokenizer.ggml.model")
    if model != "gpt2":
        raise InputError(
            f"{path}: tokenizer.ggml.model is {model!r}; only gpt2 (byte-level BPE) is supported: put the model's "
            "tokenizer.json and tokenizer_config.json beside the file"
        )
    tokens = metadata.field("tokenizer.ggml.tokens")
    backend = _backend(metadata, tokens)
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.optional(f"tokenizer.ggml.{key}_token_id")
        special[f"{role}_token"] = None if index is None else tokens[index]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.optional("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def write_tokenizer(path: Path, directory: Path) -> None:
    """Writes the tokenizer of the .gguf file `path` as tokenizer.json and its companions into `directory`."""
    gguf_tokenizer(path).save_pretrained(directory)


def _backend(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.field("tokenizer.ggml.merges")]
    name = metadata.optional("tokenizer.ggml.pre") or "default"
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is in the vocabulary as it is, even where the merges would not lead to it
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(metadata.path, name)
    backend.decoder = decoders.ByteLevel()
    types = metadata.optional("tokenizer.ggml.token_type") or []
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    add_bos = metadata.optional("tokenizer.ggml.add_bos_token")
    if add_bos if add_bos is not None else name == "llama-bpe":
        index = metadata.field("tokenizer.ggml.bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[index]} $A", pair=f"{tokens[index]} $A $B", special_tokens=[(tokens[index], index)]
        )
    return backend


def _pre_tokenizer(path: Path, name: str) -> Any:
    """How text is cut into words before the merges, by llama.cpp's name for it."""
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    splits = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if name not in splits:
        known = ", ".join(["gpt-2", "default", "smollm", *splits])
        raise InputError(f"{path}: tokenizer.ggml.pre is {name!r}; supported: {known}")
    split = pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

"""Which stored tensor fills which parameter: name prefixes, what may be left over, and one error for all that does not
fit.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.checkpoint.safetensors import DTYPES
from jaxspec.checkpoint.source import Source
from jaxspec.config import VerifierConfig
from jaxspec.errors import InputError
from jaxspec.verifiers.names import Link, Path, Table, expand, layout_of

# The text model inside a checkpoint: multimodal now and before transformers 4.52, causal language model, bare model.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_TOWERS = re.compile(r"(vision_|audio_|multi_modal_projector|embed_vision|embed_audio)")
_LISTED = 4


@dataclass(frozen=True)
class Match:
    """For every parameter its links, each with the stored tensor's full name; and a summary of the tensors left out, ""
    for none.
    """

    links: Mapping[Path, Sequence[tuple[Link, str]]]
    left_out: str


def match(
    table: Table, config: VerifierConfig, shapes: Mapping[Path, tuple[int, ...]], source: Source, multimodal: bool
) -> Match:
    """Ties the parameters `shapes` (path -> shape) to the source's tensors.

    `multimodal`: the config nests the text model, so that tensors outside it are left out instead of being extra.
    Raises one InputError that lists everything missing, extra, of a wrong shape or of a wrong dtype.
    """
    links = expand(table, shapes, layout_of(table, source.tensors))
    prefix = max(_PREFIXES, key=lambda candidate: sum(candidate + link.name in source.tensors for link in links))
    return tie(
        [(link, _stored_name(link, prefix, source)) for link in links],
        source,
        ignored=lambda name: _ignored(name, config),
        outside=lambda name: _outside(name, prefix, multimodal),
    )


def tie(
    links: Sequence[tuple[Link, str]],
    source: Source,
    ignored: Callable[[str], bool],
    outside: Callable[[str], bool] = lambda name: False,
) -> Match:
    """Checks that the source has every link's tensor, given with its stored name, as it should be, and no tensor beside them.

    Tensors that are `ignored` carry nothing; those `outside` are no part of the model and are named as left out. Raises one
    InputError that lists everything missing, extra, of a wrong shape or of a wrong dtype.
    """
    tied: dict[Path, list[tuple[Link, str]]] = {}
    missing, shape_errors, dtype_errors = [], [], []
    used = set()
    for link, name in links:
        tied.setdefault(link.path, []).append((link, name))
        if name in used:
            continue
        stored = source.tensors.get(name)
        if stored is None:
            missing.append(name)
            continue
        used.add(name)
        if stored.shape != link.shape:
            shape_errors.append(f"{name} is {list(stored.shape)}, not {list(link.shape)}")
        if stored.dtype not in DTYPES:
            dtype_errors.append(f"{name} is {stored.dtype}, not {', '.join(DTYPES)}")
    unused = [name for name in source.tensors if name not in used and not ignored(name)]
    left_out = [name for name in unused if outside(name)]
    problems = [
        _listing("missing", list(dict.fromkeys(missing))),
        _listing("extra", sorted(set(unused) - set(left_out))),
        _listing("of a wrong shape", shape_errors),
        _listing("of a wrong dtype", dtype_errors),
    ]
    if any(problems):
        raise InputError(f"{source.where}: tensors {'; '.join(problem for problem in problems if problem)}")
    return Match(tied, _summary(left_out))


def head_is_embedding(source: Source) -> bool:
    """Whether an output head that is stored beside the embedding equals it; true where none is stored."""
    head = next((name for name in _HEADS if name in source.tensors), None)
    embed = next(
        (name for name in (f"{prefix}embed_tokens.weight" for prefix in _PREFIXES) if name in source.tensors), None
    )
    if head is None or embed is None:
        return True
    return source.tensors[head].shape == source.tensors[embed].shape and np.array_equal(
        source.read(head), source.read(embed)
    )


def _stored_name(link: Link, prefix: str, source: Source) -> str:
    if link.name in _HEADS:
        return next((name for name in _HEADS if name in source.tensors), link.name)
    return prefix + link.name


def _ignored(name: str, config: VerifierConfig) -> bool:
    """Tensors that carry nothing: rotary tables, the head of a tied model, keys and values of layers that share
    another's.
    """
    if re.search(r"rotary_emb\.\w*inv_freq$", name) or (config.tied and name in _HEADS):
        return True
    found = re.search(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.(weight|bias)$", name)
    if found is None or _TOWERS.search(name) or int(found[1]) >= config.num_layers:
        return False
    return config.layers[int(found[1])].attention.kv_source != int(found[1])


def _outside(name: str, prefix: str, multimodal: bool) -> bool:
    if "language_model" in prefix:
        return not name.startswith(prefix)
    return multimodal and _TOWERS.match(name.removeprefix("model.")) is not None


def _summary(names: Iterable[str]) -> str:
    parts = Counter(
        ".".join(name.split(".")[:2]) if name.startswith("model.") else name.split(".")[0] for name in names
    )
    return ", ".join(f"{part} ({count} tensors)" for part, count in sorted(parts.items()))


def _listing(what: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{what}: {', '.join(items[:_LISTED])}{more}"

"""The maps between draft and verifier ids, checked: d2t holds offsets, t2d marks the verifier's ids (SPEC 0.2)."""

import numpy as np

from jaxspec.checkpoint.drafters.table import D2T, T2D
from jaxspec.checkpoint.safetensors import MAP_DTYPES
from jaxspec.checkpoint.source import Source
from jaxspec.drafters.config import DrafterConfig
from jaxspec.errors import InputError


def read_target_ids(source: Source, config: DrafterConfig) -> np.ndarray | None:
    """The verifier id of every draft id, int32 [Vd]; None where the drafter has the whole vocabulary.

    Raises InputError for a reduced vocabulary without d2t, ids outside the verifier's vocabulary or out of order, and a t2d that
    says otherwise.
    """
    d2t, t2d = _read(source, D2T, config.draft_vocab_size), _read(source, T2D, config.vocab_size)
    if not config.reduced_vocab:
        if (d2t is not None and d2t.any()) or (t2d is not None and not t2d.all()):
            raise InputError(
                f"{source.where}: d2t or t2d maps ids, but draft_vocab_size equals vocab_size {config.vocab_size}"
            )
        return None
    if d2t is None:
        raise InputError(
            f"{source.where}: draft_vocab_size {config.draft_vocab_size} is less than vocab_size {config.vocab_size}, so "
            "the tensor d2t is wanted; it is missing"
        )
    ids = np.arange(config.draft_vocab_size) + d2t
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise InputError(
            f"{source.where}: d2t maps to verifier ids {ids.min()} to {ids.max()}; vocab_size is {config.vocab_size}"
        )
    if (np.diff(ids) <= 0).any():
        at = int(np.argmax(np.diff(ids) <= 0))
        raise InputError(
            f"{source.where}: d2t maps draft ids {at} and {at + 1} to verifier ids {ids[at]} and {ids[at + 1]}; they must "
            "increase"
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ids):
        raise InputError(f"{source.where}: t2d marks other verifier ids than d2t maps to")
    return ids.astype(np.int32)


def stored_maps(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """d2t int64 [Vd] and t2d bool [V] of the verifier ids int32 [Vd]."""
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[target_ids] = True
    return {D2T: target_ids.astype(np.int64) - np.arange(len(target_ids)), T2D: t2d}


def _read(source: Source, name: str, size: int) -> np.ndarray | None:
    stored = source.tensors.get(name)
    if stored is None:
        return None
    if stored.dtype not in MAP_DTYPES or stored.shape != (size,):
        raise InputError(
            f"{source.where}: tensor {name} is {stored.dtype} {list(stored.shape)}; whole numbers or bool [{size}] are wanted"
        )
    return source.read(name)

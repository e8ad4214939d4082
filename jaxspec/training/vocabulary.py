"""The draft vocabulary: the verifier's tokens that its answers hold most often."""

import json
import pickle
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.samples import Sample
from jaxspec.training.sources import Unusable, read_records, whole_text


def count_tokens(samples: Sequence[Sample], vocab_size: int) -> np.ndarray:
    """How often each of the verifier's V tokens is supervised: int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.loss_mask], minlength=vocab_size)
    return counts


def count_texts(source: str, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """How often each of the verifier's V tokens is in all that the lines of a source say, of any form: int64 [V].

    source: as `sources.read_records`. Raises InputError for a line that is not as it should be.
    """
    counts = np.zeros(vocab_size, np.int64)
    for where, record in read_records(source):
        try:
            tokens = tokenizer.encode(whole_text(record, where))
        except Unusable:
            continue
        if tokens and max(tokens) >= vocab_size:
            raise InputError(
                f"{where}: the tokenizer makes it {max(tokens)}, and the model's ids run from 0 to {vocab_size - 1}"
            )
        counts += np.bincount(np.array(tokens, np.int64), minlength=vocab_size)
    return counts


def ending_ids(samples: Sequence[Sample], special_ids: Collection[int]) -> tuple[int, ...]:
    """Those of the special ids that some answer ends with, in rising order."""
    found: set[int] = set()
    for sample in samples:
        last = sample.loss_mask & ~np.append(sample.loss_mask[1:], False)
        found.update(sample.tokens[last].tolist())
    return tuple(sorted(found & set(special_ids)))


def draft_vocabulary(counts: np.ndarray, size: int, required: Collection[int] = ()) -> np.ndarray:
    """The `required` ids and the most frequent others, of equally frequent ones the lowest; unused ids, the lowest first, where too few
    are used.

    Args:
        counts: int64 [V].
        size: Vd, 1 .. V.
        required: ids that must be in it, such as those that answers end with.

    Returns:
        int32 [Vd], verifier ids in rising order.

    Raises:
        InputError: a size that the vocabulary or the required ids do not allow.
    """
    vocab_size = len(counts)
    required = sorted(set(required))
    if not 1 <= size <= vocab_size:
        raise InputError(f"the draft vocabulary's size is {size}; it must be from 1 to the verifier's {vocab_size}")
    if required and not 0 <= required[0] <= required[-1] < vocab_size:
        outside = required[0] if required[0] < 0 else required[-1]
        raise InputError(f"required id {outside}: the verifier's ids run from 0 to {vocab_size - 1}")
    if len(required) > size:
        raise InputError(f"the draft vocabulary's size is {size}; the {len(required)} required ids need as much room")
    ranked = counts.copy()
    ranked[required] = np.iinfo(ranked.dtype).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)


def load_counts(path: Path, vocab_size: int) -> np.ndarray:
    """Token counts int64 [V]: from JSON, {"id": count}; numpy's .npz with an array `counts` [V]; or the token_freq.pt of speculators.

    Raises:
        InputError: the file is neither, or counts ids that a vocabulary of `vocab_size` does not have.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {int(token): int(file["counts"][token]) for token in np.flatnonzero(file["counts"])}
        elif path.suffix == ".pt":
            found = _torch_counts(path)
        else:
            found = json.loads(path.read_text())
        counts = _dense(found, vocab_size)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        pickle.PickleError,
    ) as error:
        raise InputError(f"{path} holds no token counts of a vocabulary of {vocab_size}: {error}") from error
    return counts


def _dense(found: Mapping[Any, Any], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for token, count in found.items():
        if not 0 <= int(token) < vocab_size or type(count) is not int or count < 0:
            raise ValueError(f"it gives token {token} the count {count!r}")
        counts[int(token)] = count
    return counts


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def _torch_counts(path: Path) -> Mapping[Any, Any]:
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("it is no file of torch.save")
        with archive.open(name) as file:
            return _Plain(file).load()

"""Features: the same as transformers' for every document however rows are packed, and the same from disk."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jitted import QUICK_COMPILE
from safetensors.numpy import save_file
from tiny import tiny_config, tiny_decoder, write_model

from jaxspec.checkpoint.load import load_verifier, open_verifier
from jaxspec.errors import InputError
from jaxspec.training import features as features_module
from jaxspec.training.batch import Batch, Features
from jaxspec.training.features import FeatureSource, FeatureStore, fingerprint, key_of, packed_features, write_features
from jaxspec.training.packing import batches
from jaxspec.training.samples import Sample
from jaxspec.verifiers.decoder import Decoder

GOLDENS = Path(__file__).parent / "goldens"
CASES = ["llama", "qwen3_window", "gemma3", "gemma4_dense", "gemma4_e", "qwen3_moe"]
TOLERANCE = 1e-4
TAPS, WIDTH = (0, 2), 32


class Compiled:
    """`packed_features` of a decoder, compiled."""

    def __init__(self, decoder: Decoder, taps: Sequence[int]):
        graph, state = nnx.split(decoder)

        def run(state: nnx.State, batch: Batch) -> Features:
            return packed_features(nnx.merge(graph, state), batch, taps)

        self._run, self._state = jax.jit(run, compiler_options=QUICK_COMPILE), state

    def __call__(self, batch: Batch) -> Features:
        return jax.device_get(self._run(self._state, batch))


def sample(tokens: Sequence[int], name: str = "a.jsonl:1") -> Sample:
    return Sample(np.array(tokens, np.int32), np.ones(len(tokens), bool), name)


def random_samples(number: int, longest: int = 20, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        sample(rng.integers(0, 259, rng.integers(2, longest)).tolist(), f"a.jsonl:{index + 1}")
        for index in range(number)
    ]


@pytest.mark.parametrize("case", [case for case in CASES if (GOLDENS / case).is_dir()])
def test_packed_documents_have_the_features_that_transformers_gives_each(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(features_module, "QUERY_BLOCK", 16)  # several blocks of queries, the last one not full
    loaded = load_verifier(GOLDENS / case, dtype=jnp.float32)
    with np.load(GOLDENS / case / "outputs.npz") as arrays:
        tokens, reference = arrays["tokens"].astype(np.int32), arrays["taps"]  # [B, T], [L + 1, B, T, D]
    every = tuple(range(loaded.config.num_layers + 1))
    length = tokens.shape[1]
    documents = [sample(row.tolist()) for row in tokens] + [sample(tokens[0, : length // 2].tolist())]
    packed = batches(documents, 1, 4 * length, shuffle=False)[0]
    found = Compiled(loaded.module, every)(packed.batch)
    at = 0
    for index in packed.indices[0]:
        row, count = index % len(tokens), len(documents[index].tokens)
        ours = found.taps[0, at : at + count].reshape(count, len(every), -1)
        for tap in every:
            theirs = reference[tap, row, :count]
            assert np.abs(ours[:, tap] - theirs).max() <= TOLERANCE * np.abs(reference[tap]).max(), (index, tap)
        np.testing.assert_array_equal(found.last[0, at : at + count], ours[:, -1])
        at += count
    assert at == sum(len(document.tokens) for document in documents)


@cache
def tiny() -> Compiled:
    return Compiled(tiny_decoder(tiny_config()), TAPS)


def test_packing_and_neighbours_change_nothing():
    samples = random_samples(9)
    alone = {}
    for packed in batches(samples, 1, 48, shuffle=False, pack=False):
        (index,) = packed.indices[0]
        alone[index] = tiny()(packed.batch).taps[0, : len(samples[index].tokens)]
    for packed in batches(samples, 1, 48, seed=3):
        found, at = tiny()(packed.batch), 0
        for index in packed.indices[0]:
            stop = at + len(samples[index].tokens)
            np.testing.assert_allclose(
                found.taps[0, at:stop], alone[index], rtol=0, atol=1e-5 * np.abs(alone[index]).max()
            )
            at = stop


SOURCE = FeatureSource("verifier", TAPS, WIDTH, "float32")


def write(samples: Sequence[Sample], directory: Path, source: FeatureSource = SOURCE) -> int:
    return write_features(samples, directory, source, tiny(), rows=1, length=48)


def join(directory: Path, samples: Sequence[Sample], source: FeatureSource = SOURCE) -> tuple[Features, Features]:
    """From disk, and computed in the same batch."""
    packed = batches(samples, 2, 48, seed=5)[0]
    return FeatureStore(directory, source).join(packed, samples), tiny()(packed.batch)


def test_features_from_disk_are_those_computed(tmp_path: Path):
    samples = random_samples(9)
    assert write(samples, tmp_path / "features") == 9
    stored, made = join(tmp_path / "features", samples)
    there = np.asarray(batches(samples, 2, 48, seed=5)[0].batch.documents) >= 0
    for ours, theirs in ((stored.taps, made.taps), (stored.last, made.last)):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours[there], theirs[there], rtol=0, atol=1e-5 * np.abs(theirs).max())
        assert not np.asarray(ours)[~there].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(tmp_path: Path, dtype: str):
    samples = random_samples(5)
    write(samples, tmp_path / "features", replace(SOURCE, dtype=dtype))
    stored, made = join(tmp_path / "features", samples, replace(SOURCE, dtype=dtype))
    assert stored.taps.dtype == jnp.dtype(dtype)
    there = np.asarray(batches(samples, 2, 48, seed=5)[0].batch.documents) >= 0
    wanted = np.asarray(made.taps)[there]
    np.testing.assert_allclose(
        np.asarray(stored.taps)[there].astype(np.float32), wanted, rtol=float(jnp.finfo(dtype).eps), atol=1e-4
    )


def test_more_samples_only_add_what_is_missing(tmp_path: Path):
    samples, calls = random_samples(8), []

    def counted(batch: Batch) -> Features:
        calls.append(int((np.asarray(batch.documents) >= 0).sum()))
        return tiny()(batch)

    def add(some: Sequence[Sample]) -> int:
        return write_features(some, tmp_path, SOURCE, counted, rows=1, length=48)

    assert add(samples[:5]) == 5
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    calls.clear()
    assert add([*samples, *samples[:2], replace(samples[7], source="again")]) == 3
    assert sum(calls) == sum(len(one.tokens) for one in samples[5:])
    assert before.items() <= {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}.items()
    calls.clear()
    assert add(samples) == 0 and not calls


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(features_module, "SHARD_BYTES", 3 * WIDTH * 4 * 20)  # two or three documents a file
    samples, done = random_samples(12), 0

    def fails(batch: Batch) -> Features:
        nonlocal done
        done += 1
        if done > 2:
            raise KeyboardInterrupt
        return tiny()(batch)

    with pytest.raises(KeyboardInterrupt):
        write_features(samples, tmp_path, SOURCE, fails, rows=1, length=48)
    files = list(tmp_path.glob("*.safetensors"))
    assert files and not list(tmp_path.glob(".*"))
    left = write(samples, tmp_path)
    assert 0 < left < 12
    FeatureStore(tmp_path, SOURCE).require(samples)


def test_a_drafter_of_fewer_taps_reads_its_columns(tmp_path: Path):
    samples = random_samples(4)
    write(samples, tmp_path)
    whole, _ = join(tmp_path, samples)
    part, _ = join(tmp_path, samples, replace(SOURCE, taps=(2,)))
    np.testing.assert_array_equal(part.taps, whole.taps[..., WIDTH:])
    np.testing.assert_array_equal(part.last, whole.last)


def test_a_process_reads_the_features_of_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    samples = random_samples(6)
    write(samples, tmp_path)
    packed, store = batches(samples, 2, 48, seed=5)[0], FeatureStore(tmp_path, SOURCE)
    whole, read = store.join(packed, samples), []
    monkeypatch.setattr(store, "read", lambda key: read.append(key) or FeatureStore.read(store, key))
    mine = store.join(packed, samples, [1])
    np.testing.assert_array_equal(mine.taps[1], whole.taps[1])
    np.testing.assert_array_equal(mine.last[1], whole.last[1])
    assert not np.asarray(mine.taps)[0].any() and len(read) == len(packed.indices[1]) > 0


def test_features_of_something_else_are_refused(tmp_path: Path):
    samples = random_samples(3)
    write(samples, tmp_path)
    with pytest.raises(InputError, match="another verifier's"):
        FeatureStore(tmp_path, replace(SOURCE, verifier="another"))
    with pytest.raises(InputError, match=r"of taps \[0, 2\]; the drafter's are \[1\]"):
        FeatureStore(tmp_path, replace(SOURCE, taps=(1,)))
    with pytest.raises(InputError, match="was made with taps"):
        write(samples, tmp_path, replace(SOURCE, dtype="bfloat16"))
    with pytest.raises(InputError, match=r"lacks 1 of 4 samples, the first of them b\.jsonl:9"):
        FeatureStore(tmp_path, SOURCE).require([*samples, sample([1, 2, 3], "b.jsonl:9")])
    with pytest.raises(InputError, match="--write-features writes features there"):
        FeatureStore(tmp_path / "nowhere", SOURCE)


def test_a_damaged_file_is_named(tmp_path: Path):
    write(random_samples(3), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"features-00000\.safetensors: truncated: 100 bytes"):
        FeatureStore(tmp_path, SOURCE)
    (tmp_path / "features.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(InputError, match=r"features\.json: is damaged"):
        FeatureStore(tmp_path, SOURCE)


def test_features_that_the_dtype_cannot_hold_are_refused(tmp_path: Path):
    def huge(batch: Batch) -> Features:
        return jax.tree.map(lambda x: x * 1e6, tiny()(batch))

    with pytest.raises(InputError, match=r"a\.jsonl:\d: its features don't fit into float16"):
        write_features(random_samples(2), tmp_path, replace(SOURCE, dtype="float16"), huge, rows=1, length=48)


def test_a_full_disk_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    samples = random_samples(6)
    write(samples[:3], tmp_path)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_module, "save_tensors", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        write(samples, tmp_path)
    FeatureStore(tmp_path, SOURCE).require(samples[:3])
    assert not list(tmp_path.glob(".*"))


def test_fingerprints_tell_fine_tuned_verifiers_apart(tmp_path: Path):
    first = fingerprint(open_verifier(write_model(tmp_path / "a")))
    assert fingerprint(open_verifier(write_model(tmp_path / "b"))) == first
    changed = write_model(tmp_path / "c") / "model.safetensors"
    from safetensors.numpy import load_file

    tensors = load_file(changed)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] += 1e-3
    save_file(tensors, changed)
    assert fingerprint(open_verifier(tmp_path / "c")) != first


def test_keys_depend_on_tokens_alone():
    assert key_of(np.array([1, 2], np.int64)) == key_of(np.array([1, 2], np.int32))
    assert key_of(np.array([1, 2])) != key_of(np.array([2, 1]))


def test_batches_are_filled_across_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Small files, large batches: the verifier must not run on padding."""
    monkeypatch.setattr(features_module, "SHARD_BYTES", 3 * WIDTH * 4 * 20)
    samples, filled = random_samples(60), []

    def counted(batch: Batch) -> Features:
        filled.append(float((np.asarray(batch.documents) >= 0).mean()))
        return tiny()(batch)

    write_features(samples, tmp_path, SOURCE, counted, rows=4, length=48)
    assert len(list(tmp_path.glob("*.safetensors"))) > len(filled) > 1
    assert min(filled[:-1]) > 0.85
    FeatureStore(tmp_path, SOURCE).require(samples)

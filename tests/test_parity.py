"""The decoder against transformers: the fixtures of tests/goldens, made by tools/make_goldens.py (each meta.json names the peers).

Everything is float32. Logits and every tap must agree to 1e-4 of their scale: the largest absolute difference over the largest absolute
value of the reference, for each tap on its own. `pytest tests/test_parity.py -rP` shows the errors.
"""

import json
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.load import load_verifier
from jaxspec.layers.cache import KVCache
from jaxspec.verifiers.decoder import Decoder

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/meta.json"))
CACHE_CASES = [
    "llama",
    "qwen3_window",
    "gemma4_e",
]  # full, mixed and shared caches: what depends on the capacity needs no more
TOLERANCE = 1e-4
CAPACITY = 64
QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # many shapes of tiny models: compiling is the cost; the same HLO
RAGGED = np.array([5, 11, 16], np.int32)  # real lengths of the rows of a right-padded batch
JUNK = 7  # what padding and abandoned drafts hold


class Model:
    """A fixture: the loaded verifier as a jitted step, and what transformers computed."""

    def __init__(self, name: str, directory: Path, outputs: Path):
        loaded = load_verifier(directory, dtype=jnp.float32)
        self.name = name
        self.config = loaded.config
        with np.load(outputs) as arrays:
            self.tokens = arrays["tokens"].astype(np.int32)  # [B, T]
            self.logits = arrays["logits"]  # [B, T, V]
            self.taps = arrays["taps"]  # [L+1, B, T, D]
            self.greedy = arrays["greedy"]  # [B, 32]
        self._graphdef, state = nnx.split(loaded.module)
        self._leaves, self._treedef = jax.tree.flatten(state)
        self.compile_afresh()

    def compile_afresh(self) -> None:
        """Forget compiled steps, so that the next ones see what a test has patched."""
        graphdef, treedef = self._graphdef, self._treedef
        every_tap = tuple(range(self.config.num_layers + 1))

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def step(leaves: list[jax.Array], tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, jax.Array, KVCache]:
            decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, features, cache = decoder(tokens, cache, taps=every_tap)
            return decoder.logits(hidden), features, cache

        self._step = partial(step, self._leaves)

    @property
    def length(self) -> int:
        """T of the reference."""
        return self.tokens.shape[1]

    def empty(self, capacity: int = CAPACITY, dtype: DTypeLike = jnp.float32) -> KVCache:
        layers = [layer.attention for layer in self.config.layers]
        return KVCache.empty(layers, len(self.tokens), capacity, dtype)

    def step(self, tokens: np.ndarray, cache: KVCache) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """Logits [B, T, V], taps [L+1, B, T, D] and the cache, whose length stays."""
        before = np.asarray(cache.length)
        logits, features, after = self._step(jnp.asarray(tokens, jnp.int32), cache)
        np.testing.assert_array_equal(after.length, before)
        taps = np.asarray(features).reshape(*tokens.shape, self.config.num_layers + 1, self.config.width)
        return np.asarray(logits), np.moveaxis(taps, 2, 0), after

    def ragged(self, capacity: int = CAPACITY) -> KVCache:
        """A cache that holds the first RAGGED tokens of each row, filled by one right-padded prefill."""
        tokens = np.where(np.arange(self.length) < RAGGED[:, None], self.tokens, JUNK)
        logits, taps, cache = self.step(tokens, self.empty(capacity))
        self.check("ragged prefill", logits, taps, np.zeros_like(RAGGED), RAGGED)
        return cache.advance(jnp.asarray(RAGGED))

    def block(self, cache: KVCache, size: int) -> tuple[np.ndarray, np.ndarray, KVCache, np.ndarray]:
        """The next `size` true tokens of each row, junk past the row's end; the last result is how many of them are true [B]."""
        start = np.asarray(cache.length)
        padded = np.pad(self.tokens, ((0, 0), (0, size)), constant_values=JUNK)
        positions = np.minimum(start[:, None] + np.arange(size), padded.shape[1] - 1)
        tokens = np.take_along_axis(padded, positions, axis=1)
        logits, taps, cache = self.step(tokens, cache)
        return logits, taps, cache, np.clip(self.length - start, 0, size)

    def finish(self, what: str, cache: KVCache, size: int) -> None:
        """Feed the rest of every row in blocks of `size` and check each."""
        while int(np.asarray(cache.length).min()) < self.length:
            start = np.asarray(cache.length)
            logits, taps, cache, count = self.block(cache, size)
            self.check(what, logits, taps, start, count)
            cache = cache.advance(jnp.asarray(count, jnp.int32))

    def check(self, what: str, logits: np.ndarray, taps: np.ndarray, start: np.ndarray, count: np.ndarray) -> None:
        """Row b's first count[b] outputs against the reference from position start[b]."""
        rows = [(b, slice(0, n), slice(s, s + n)) for b, (s, n) in enumerate(zip(start, count, strict=True)) if n]
        pairs = {"logits": [(logits[b, ours], self.logits[b, theirs], self.logits) for b, ours, theirs in rows]}
        for k in range(self.config.num_layers + 1):
            pairs[f"tap {k}"] = [(taps[k, b, ours], self.taps[k, b, theirs], self.taps[k]) for b, ours, theirs in rows]
        errors = {name: max(relative_error(*pair) for pair in found) for name, found in pairs.items()}
        worst = max(errors, key=lambda name: errors[name] if np.isfinite(errors[name]) else np.inf)
        print(f"{self.name}: {what}: logits {errors['logits']:.1e}, worst of all {errors[worst]:.1e} ({worst})")
        wrong = {name: f"{error:.2e}" for name, error in errors.items() if not error <= TOLERANCE}
        assert not wrong, f"{self.name}, {what}: relative errors {wrong}"


def relative_error(value: np.ndarray, reference: np.ndarray, scale: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value of `scale`; NaN where `value` holds one."""
    return float(np.abs(value - reference).max() / np.abs(scale).max())


def poison(cache: KVCache) -> KVCache:
    """NaN in every slot at or past the row's length, of every layer."""

    def stale(entry: jax.Array) -> jax.Array:  # [B, K, S, H]
        past = jnp.arange(cache.capacity)[None] >= cache.length[:, None]
        return jnp.where(past[:, None, :, None], jnp.nan, entry)

    return replace(cache, k=tuple(map(stale, cache.k)), v=tuple(map(stale, cache.v)))


def multimodal(directory: Path) -> None:
    """gemma4_dense as the text part of a multimodal checkpoint: nested config, names under model.language_model., vision tensors."""
    source = GOLDENS / "gemma4_dense"
    tensors = load_file(source / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    renamed["model.vision_tower.patch_embedder.input_proj.weight"] = np.ones((4, 6), np.float32)
    renamed["model.embed_vision.embedding_projection.weight"] = np.ones((32, 4), np.float32)
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": config,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 4},
        "tie_word_embeddings": config["tie_word_embeddings"],
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    directory = GOLDENS / request.param
    return Model(request.param, directory, directory / "outputs.npz")


every_case = pytest.mark.parametrize("model", CASES, indirect=True)
cache_cases = pytest.mark.parametrize("model", CACHE_CASES, indirect=True)


@every_case
def test_prefill(model: Model) -> None:
    logits, taps, _ = model.step(model.tokens, model.empty())
    start = np.zeros(len(model.tokens), np.int32)
    model.check("prefill", logits, taps, start, start + model.length)


@every_case
def test_token_by_token(model: Model) -> None:
    model.finish("token by token", model.empty(), 1)


@every_case
@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_blocks_on_a_ragged_batch(model: Model, size: int) -> None:
    model.finish(f"ragged blocks of {size}", model.ragged(), size)


@every_case
def test_rejected_block_leaves_no_trace(model: Model) -> None:
    cache = model.ragged()
    junk = np.full((len(model.tokens), 8), JUNK, np.int32)
    _, _, cache = model.step(junk, cache)  # rejected whole: length stays
    *_, cache, _ = model.block(cache, 8)
    cache = cache.advance(jnp.full(len(model.tokens), 3, jnp.int32))  # three of eight kept
    _, _, cache = model.step(junk, cache)
    model.finish("after a rollback", cache, 5)


@every_case
def test_rewound_cache_continues_from_there(model: Model) -> None:
    cache = model.ragged()
    _, _, cache = model.step(np.full((len(model.tokens), 8), JUNK, np.int32), cache)
    cache = cache.advance(jnp.full(len(model.tokens), 8, jnp.int32)).rewind(jnp.asarray(RAGGED - 2))
    model.finish("after a rewind", cache, 5)


@every_case
@pytest.mark.parametrize("size", [1, 8])
def test_slots_past_a_rows_length_are_never_read(model: Model, size: int) -> None:
    cache = poison(model.ragged())
    logits, taps, after, count = model.block(cache, size)
    assert np.isfinite(logits).all()
    assert np.isfinite(taps).all()
    model.check(f"block of {size}, NaN past every row", logits, taps, RAGGED, count)
    model.finish(f"blocks of {size}, NaN past every row", after.advance(jnp.asarray(count, jnp.int32)), size)


@cache_cases
def test_capacity_changes_nothing(model: Model) -> None:
    """8 tokens at a time; the last two steps' outputs agree to 1e-6 of their scale whatever the capacity."""
    found = {}
    for capacity in (CAPACITY, 100, 512):
        cache = model.empty(capacity)
        assert cache.capacity == capacity
        for _ in range(model.length // 8):
            logits, taps, cache, count = model.block(cache, 8)
            cache = cache.advance(jnp.asarray(count, jnp.int32))
        found[capacity] = logits, taps
    for capacity in (100, 512):
        for ours, reference in zip(found[capacity], found[CAPACITY], strict=True):
            assert relative_error(ours, reference, reference) <= 1e-6


@cache_cases
def test_writes_past_the_capacity_are_dropped(model: Model) -> None:
    """A cache just large enough, overrun by a block whose last tokens don't fit: what was in it stays right."""
    cache = model.empty(model.length)
    for _ in range(model.length // 8):
        *_, cache, count = model.block(cache, 8)
        cache = cache.advance(jnp.asarray(count, jnp.int32))
    cache = cache.rewind(jnp.asarray(model.length - np.array([1, 4, 0]), jnp.int32))
    _, _, cache = model.step(np.full((len(model.tokens), 8), JUNK, np.int32), cache)
    cache = cache.rewind(jnp.asarray(model.length - np.array([1, 4, 1]), jnp.int32))
    model.finish("after an overrun", cache, 8)


@every_case
def test_greedy_tokens_equal_transformers(model: Model) -> None:
    logits, _, cache = model.step(model.tokens, model.empty())
    cache = cache.advance(jnp.full(len(model.tokens), model.length, jnp.int32))
    produced = [logits[:, -1].argmax(-1)]
    while len(produced) < model.greedy.shape[1]:
        logits, _, cache = model.step(produced[-1][:, None].astype(np.int32), cache)
        cache = cache.advance(jnp.ones(len(model.tokens), jnp.int32))
        produced.append(logits[:, -1].argmax(-1))
    np.testing.assert_array_equal(np.stack(produced, axis=1), model.greedy)


@cache_cases
def test_cache_read_in_chunks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks much shorter than the rows, and no divisor of the capacity: sliding layers skip the first ones."""
    monkeypatch.setattr("jaxspec_kernels.block_attention.CPU_CHUNK", 6)
    chunked = copy(model)
    chunked.compile_afresh()
    chunked.finish("cache in chunks of 6", poison(chunked.ragged()), 5)


@every_case
def test_bfloat16_runs_in_bfloat16_with_float32_logits(model: Model) -> None:
    """Traced only: under strict promotion a forgotten cast is an error, and no result may drift to another dtype."""
    module = nnx.eval_shape(lambda: Decoder(model.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graphdef, state = nnx.split(module)

    def call(state: nnx.State, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None, KVCache]:
        decoder = nnx.merge(graphdef, state)
        hidden, features, cache = decoder(tokens, model.empty(dtype=jnp.bfloat16), taps=(0, 1))
        return decoder.logits(hidden), hidden, features, cache

    for size in (8, model.length):  # experts take another path for many tokens
        tokens = jax.ShapeDtypeStruct((len(model.tokens), size), jnp.int32)
        logits, hidden, features, cache = jax.eval_shape(call, state, tokens)
        assert logits.dtype == jnp.float32
        assert {hidden.dtype, features.dtype, *(entry.dtype for entry in (*cache.k, *cache.v))} == {jnp.bfloat16.dtype}


def test_multimodal_checkpoint_gives_its_text_model(tmp_path: Path) -> None:
    multimodal(tmp_path)
    model = Model("gemma4_multimodal", tmp_path, GOLDENS / "gemma4_dense" / "outputs.npz")
    logits, taps, _ = model.step(model.tokens, model.empty())
    start = np.zeros(len(model.tokens), np.int32)
    model.check("prefill", logits, taps, start, start + model.length)

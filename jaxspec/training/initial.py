"""The drafter that a run begins with: derived from the verifier, or taken from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpoint.drafters.checks import check_verifier
from jaxspec.checkpoint.drafters.content import Lender, Parameter, read_content
from jaxspec.checkpoint.drafters.load import (
    EMBED_PATH,
    HEAD_PATH,
    TARGET_IDS_PATH,
    OpenedDrafter,
    abstract_drafter,
    open_drafter,
)
from jaxspec.checkpoint.fill import flat_parameters
from jaxspec.config import AttentionConfig, LayerConfig, VerifierConfig
from jaxspec.drafters.config import (
    BlockConfig,
    ConfidenceConfig,
    DrafterConfig,
    EagleConfig,
    MarkovConfig,
    Method,
)
from jaxspec.errors import InputError
from jaxspec.layers.param import INIT_STDDEV
from jaxspec.training.recipe import ConfidenceRecipe, DrafterRecipe, MarkovRecipe
from jaxspec.verifiers.names import Path as ParameterPath
from jaxspec.verifiers.taps import aux_ids, default_aux_ids

WINDOW = 2048  # of a new drafter's sliding layers (SPEC 0.5)
BLOCK_METHODS = ("dflash", "dspark")
_LAYERS: Mapping[Method, int] = {"eagle3": 1, "peagle": 4, "dflash": 5, "dspark": 5}
_EXTENDS: Mapping[Method, tuple[Method, ...]] = {
    "eagle3": ("eagle3",),
    "peagle": ("peagle", "eagle3"),
    "dflash": ("dflash",),
    "dspark": ("dspark", "dflash"),
}
_HEADS = ("markov", "confidence")


@dataclass(frozen=True)
class InitialDrafter:
    """A drafter before its first step.

    Fields:
        config: what it is.
        values: every leaf of its module by path, float32 but for the map of the draft vocabulary; what it borrows is the verifier's.
        trainable: paths of the leaves that are learned.
        notes: what came from a checkpoint and what did not, in words.
    """

    config: DrafterConfig
    values: Mapping[ParameterPath, Parameter]
    trainable: frozenset[ParameterPath]
    notes: tuple[str, ...] = ()


def open_start(recipe: DrafterRecipe, verifier: Lender) -> OpenedDrafter | None:
    """The checkpoint of `init_from`, checked against the verifier and the method; None where there is none."""
    if recipe.init_from is None:
        return None
    try:
        opened = open_drafter(recipe.init_from, verifier.config.num_layers)
    except InputError as error:
        raise InputError(f"drafter.init_from {error}") from error
    check_verifier(opened.config, opened.verifier.num_layers, verifier.config, f"drafter.init_from {opened.path}")
    if opened.config.method not in _EXTENDS[recipe.method]:
        fitting = " or ".join(_EXTENDS[recipe.method])
        raise InputError(
            f"drafter.init_from {opened.path}: is a {opened.config.method} drafter; {recipe.method} begins from {fitting}"
        )
    size = opened.config.draft_vocab_size
    if recipe.draft_vocab_size not in (None, size):
        raise InputError(
            f"drafter.draft_vocab_size is {recipe.draft_vocab_size}, and the checkpoint of drafter.init_from has {size}; leave it out"
        )
    return opened


def drafter_config(
    recipe: DrafterRecipe,
    verifier: VerifierConfig,
    *,
    mask_token: int | None,
    drafts: int | None = None,
    start: DrafterConfig | None = None,
) -> DrafterConfig:
    """The config of a drafter for `verifier`.

    Args:
        recipe: what it says wins.
        mask_token: where neither the recipe nor `start` has one.
        drafts: the K to recommend; None: what the method's block gives.
        start: the config of the checkpoint it begins from; None: a new drafter (SPEC 0.5).

    Raises:
        InputError: values that don't go together.
    """
    base = _new(recipe, verifier) if start is None else _extended(recipe, start)
    size = recipe.draft_vocab_size or base.draft_vocab_size
    if size > verifier.vocab_size:
        raise InputError(f"drafter.draft_vocab_size is {size}, more than the verifier's {verifier.vocab_size} tokens")
    mask = recipe.mask_token if recipe.mask_token is not None else base.mask_token
    mask = mask_token if mask is None else mask
    if mask is not None and mask >= verifier.vocab_size:
        raise InputError(f"drafter.mask_token is {mask}; the verifier's ids end at {verifier.vocab_size - 1}")
    block = _block(recipe, base.block) if recipe.method in BLOCK_METHODS else None
    if recipe.method != "eagle3" and mask is None:
        raise InputError("drafter.mask_token is wanted: the verifier's tokenizer has no token for it")
    return replace(
        base,
        method=recipe.method,
        draft_vocab_size=size,
        taps=base.taps if recipe.taps is None else _taps(recipe.taps, verifier.num_layers),
        layers=_layers(recipe, base),
        own_embed=base.own_embed or _trains_embed(recipe),
        own_head=base.own_head or bool(recipe.train_head) or size < verifier.vocab_size,
        mask_token=None if recipe.method == "eagle3" else mask,
        eagle=None if base.eagle is None else _eagle(recipe, base.eagle),
        block=block,
        speculative_tokens=drafts if block is None else block.max_drafts,
    )


def initial_drafter(
    recipe: DrafterRecipe,
    config: DrafterConfig,
    verifier: Lender,
    target_ids: np.ndarray | None,
    start: OpenedDrafter | None,
    seed: int,
) -> InitialDrafter:
    """The values of every leaf: the checkpoint's where path and shape agree, the verifier's for embedding and head, else random.

    target_ids int32 [Vd] of a reduced vocabulary.
    """
    values = _random(config, seed)
    known: dict[ParameterPath, Parameter] = {}
    if start is not None:
        known = dict(read_content(start).parameters)
    taken, unused = [], []
    for path, value in known.items():
        if path in values and tuple(values[path].shape) == tuple(value.shape):
            values[path] = np.asarray(value, np.float32)
            taken.append(path)
        else:
            unused.append(path)
    for path, rows in ((EMBED_PATH, None), (HEAD_PATH, target_ids)):
        if path not in taken:
            lent = verifier.read(path)
            values[path] = np.asarray(lent if rows is None else lent[rows], np.float32)
    if target_ids is not None:
        values[TARGET_IDS_PATH] = np.asarray(target_ids, np.int32)
    trainable = trainable_paths(recipe, config)
    notes = ()
    if start is not None:
        fresh = [path for path in trainable if path not in taken and path not in (EMBED_PATH, HEAD_PATH)]
        notes = (
            f"{start.path}: {len(taken)} parameters taken",
            *((f"new: {_names(fresh)}",) if fresh else ()),
            *((f"not used: {_names(unused)}",) if unused else ()),
        )
    return InitialDrafter(config, values, trainable, notes)


def _new(recipe: DrafterRecipe, verifier: VerifierConfig) -> DrafterConfig:
    """A new drafter with nothing overridden: the verifier's sizes, its sliding layers' rope where it has several."""
    like = next((layer for layer in verifier.layers if layer.attention.window is not None), verifier.layers[0])
    model = like.attention
    eagle = recipe.method not in BLOCK_METHODS
    attention = AttentionConfig(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        rope=replace(model.rope, partial=1.0, kind="default" if model.rope.kind == "proportional" else model.rope.kind),
        scale=model.head_dim**-0.5,
        kv_source=0,
        qk_norm=recipe.method != "eagle3",
    )
    width = verifier.width
    layer = LayerConfig(attention, like.mlp_width or 3 * width, "silu")
    count = recipe.layers or _LAYERS[recipe.method]
    layers = [replace(layer, attention=replace(attention, kv_source=index)) for index in range(count)]
    if eagle:
        layers[0] = replace(layers[0], attention=replace(layers[0].attention, in_width=2 * width))
    window = WINDOW if recipe.sliding_window is None else recipe.sliding_window
    return DrafterConfig(
        method=recipe.method,
        vocab_size=verifier.vocab_size,
        draft_vocab_size=verifier.vocab_size,
        width=width,
        taps=default_aux_ids(verifier.num_layers) if recipe.taps is None else recipe.taps,
        layers=_windowed(tuple(layers), window or None, recipe.full_layers or (), bool(recipe.window_both_ways), eagle),
        norm_eps=verifier.norm_eps,
        max_positions=verifier.max_positions,
        own_embed=False,
        own_head=False,
        eagle=_new_eagle(recipe.method) if eagle else None,
        block=None if eagle else BlockConfig(8, sample_from_anchor=recipe.method == "dspark"),
    )


def _new_eagle(method: Method) -> EagleConfig:
    """speculators' defaults for new runs (SPEC 1a), and those of its P-EAGLE example."""
    return EagleConfig(True, norm_before_fc=True, norm_output=True) if method == "eagle3" else EagleConfig(False)


def _extended(recipe: DrafterRecipe, start: DrafterConfig) -> DrafterConfig:
    """The checkpoint's config, with the recipe's number of layers and windows."""
    layers = list(start.layers)[: recipe.layers]
    for index in range(len(layers), recipe.layers or 0):
        attention = replace(start.layers[-1].attention, kv_source=index, in_width=None)
        layers.append(replace(start.layers[-1], attention=attention))
    asked = (recipe.sliding_window, recipe.full_layers, recipe.window_both_ways)
    if any(value is not None for value in asked):
        windows = [layer.attention.window for layer in start.layers]
        window = next((window for window in windows if window is not None), None)
        window = window if recipe.sliding_window is None else recipe.sliding_window or None
        layers = list(
            _windowed(
                tuple(layers), window, recipe.full_layers or (), bool(recipe.window_both_ways), start.block is None
            )
        )
    return replace(start, layers=tuple(layers))


def _windowed(
    layers: tuple[LayerConfig, ...], window: int | None, full: tuple[int, ...], both_ways: bool, eagle: bool
) -> tuple[LayerConfig, ...]:
    """The layers with their windows, and what a block sees of itself as speculators has it (SPEC 3c)."""
    if full and max(full) >= len(layers):
        raise InputError(f"drafter.full_layers has {max(full)}; the drafter's layers are 0 to {len(layers) - 1}")

    def sight(index: int, attention: AttentionConfig) -> AttentionConfig:
        own = None if index in full else window
        if eagle:
            return replace(attention, window=own)
        causal = own is not None and not both_ways
        return replace(attention, window=own, causal=causal, window_from_block=own is not None)

    return tuple(replace(layer, attention=sight(index, layer.attention)) for index, layer in enumerate(layers))


def _layers(recipe: DrafterRecipe, base: DrafterConfig) -> tuple[LayerConfig, ...]:
    """The base's layers with the recipe's sizes."""

    def sized(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        heads = recipe.heads or attention.heads
        kv_heads = recipe.kv_heads or (attention.kv_heads if heads % attention.kv_heads == 0 else heads)
        head_dim = recipe.head_dim or attention.head_dim
        if heads % kv_heads:
            raise InputError(f"drafter.heads is {heads}, no multiple of the {kv_heads} of drafter.kv_heads")
        if head_dim % 2:
            raise InputError(f"drafter.head_dim is {head_dim}; an even number is wanted")
        return replace(
            layer,
            attention=replace(
                attention,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rope=replace(attention.rope, head_dim=head_dim),
                scale=attention.scale if recipe.head_dim is None else head_dim**-0.5,
                qk_norm=attention.qk_norm if recipe.qk_norm is None else recipe.qk_norm,
            ),
            mlp_width=recipe.mlp_width or layer.mlp_width,
        )

    return tuple(sized(layer) for layer in base.layers)


def _block(recipe: DrafterRecipe, base: BlockConfig | None) -> BlockConfig:
    if base is None:
        raise ValueError("a block drafter's base config has no block")
    made = replace(
        base,
        size=recipe.block_size or base.size,
        sample_from_anchor=base.sample_from_anchor if recipe.sample_from_anchor is None else recipe.sample_from_anchor,
    )
    if recipe.method == "dflash":
        return made
    markov, confidence = base.markov, base.confidence
    headless = markov is None and confidence is None
    if recipe.markov is not None or headless:
        asked = recipe.markov or MarkovRecipe()
        markov = MarkovConfig(asked.kind, asked.rank) if asked.rank else None
    if recipe.confidence is not None or headless:
        wanted = recipe.confidence or ConfidenceRecipe()
        with_markov = markov is not None if wanted.with_markov is None else wanted.with_markov
        if wanted.enabled and with_markov and markov is None:
            raise InputError("drafter.confidence.with_markov is true, but drafter.markov.rank is 0")
        confidence = ConfidenceConfig(with_markov) if wanted.enabled else None
    elif confidence is not None:
        if confidence.with_markov and markov is None:
            raise InputError(
                "drafter.markov.rank is 0, but the confidence head of drafter.init_from sees that head; give drafter.confidence too"
            )
        confidence = replace(confidence, temperatures=())  # calibrated for weights that are about to change
    return replace(made, markov=markov, confidence=confidence)


def _eagle(recipe: DrafterRecipe, base: EagleConfig) -> EagleConfig:
    given = {name: value for name, value in vars(recipe.eagle).items() if value is not None}
    made = replace(base, **given)
    if made.fc_norm and made.norm_before_fc:
        if "norm_before_fc" in given:
            raise InputError("drafter.eagle.fc_norm and norm_before_fc cannot both be true")
        made = replace(made, norm_before_fc=False)
    return made


def _taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    try:
        return aux_ids(taps, "aux", num_layers)
    except InputError as error:
        raise InputError(f"drafter.taps: {error}") from error


def _random(config: DrafterConfig, seed: int) -> dict[ParameterPath, Parameter]:
    """Every leaf by path: matrices from N(0, 0.02^2), norms 1, biases 0; embedding, head and vocabulary map are left for the verifier's.

    By numpy: drawing a hundred shapes with JAX would be a hundred programs to compile.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    values: dict[ParameterPath, Parameter] = {}
    for path, leaf in flat_parameters(nnx.state(abstract_drafter(config, jnp.float32))).items():
        shape = tuple(leaf.shape)
        if path in (EMBED_PATH, HEAD_PATH, TARGET_IDS_PATH):
            values[path] = np.broadcast_to(np.float32(0), shape)
        elif path == (
            "mask_hidden",
        ):  # it stands for features, whose scale is nearer to 1 than to a weight's (SPEC 2b)
            values[path] = rng.standard_normal(shape, np.float32)
        elif len(shape) > 1:
            values[path] = np.float32(INIT_STDDEV) * rng.standard_normal(shape, np.float32)
        else:
            values[path] = np.full(shape, 0 if path[-1] == "bias" else 1, np.float32)
    return values


def _trains_embed(recipe: DrafterRecipe) -> bool:
    if recipe.train_embed is None:
        return recipe.method == "peagle" and recipe.train == "all"
    return recipe.train_embed


def trainable_paths(recipe: DrafterRecipe, config: DrafterConfig) -> frozenset[ParameterPath]:
    """The leaves that are learned. Raises InputError where there are none."""
    frozen = {TARGET_IDS_PATH}
    frozen |= set() if _trains_embed(recipe) else {EMBED_PATH}
    frozen |= set() if recipe.train_head else {HEAD_PATH}
    every = flat_parameters(nnx.state(abstract_drafter(config, jnp.float32)))
    # Gemma-4's layer scalars are constants of the model, not weights
    paths = {path for path in every if path not in frozen and path[-1] != "scalar"}
    if recipe.train == "heads":
        paths = {path for path in paths if path[0] in _HEADS or path == HEAD_PATH}
        if not paths:
            raise InputError(
                f"drafter.train is heads, but this {config.method} drafter has none to train; drafter.train_head trains its output head"
            )
    return frozenset(paths)


def _names(paths: list[ParameterPath]) -> str:
    return ", ".join(sorted(".".join(map(str, path)) for path in paths))

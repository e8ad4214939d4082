"""KV injection: context features made into every layer's keys and values, written into the caches.

The door that block drafters (DFlash, DSpark) go through. Unfused, each layer is two projections, a norm, a rotation and two scatters;
the kernel does all layers in one launch and reads each weight once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec_kernels.devices import HEADS, ROWS, each_device
from jaxspec_kernels.implementation import Implementation, resolve
from jaxspec_kernels.projection import project

Caches = tuple[jax.Array, ...]  # one [B, K, S, H] a layer


@dataclass(frozen=True)
class LayerKV:
    """What makes one layer's keys and values out of the features.

    Fields:
        k: [K, H, D], the key projection.
        v: [K, H, D], the value projection; None: the values are the projected keys, before their norm and rotation.
        k_bias, v_bias: [K, H], or None.
        k_norm: [H], the weight of the keys' RMS norm, or None for no norm.
        norm_offset: added to that weight.
        v_norm: the values get an RMS norm without a weight.
        frequencies: float32 [R/2], radians a position; entry j of the first half of the first R entries of a key turns with entry j of
            their second half.
        scaling: factor on cos and sin.
    """

    k: jax.Array
    v: jax.Array | None
    k_bias: jax.Array | None
    v_bias: jax.Array | None
    k_norm: jax.Array | None
    norm_offset: float
    v_norm: bool
    frequencies: np.ndarray
    scaling: float


def inject_kv(
    x: jax.Array,
    layers: Sequence[LayerKV],
    k: Caches,
    v: Caches,
    start: jax.Array,
    count: jax.Array,
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Caches, Caches]:
    """Write the keys and values of row b's first `count[b]` features at slots start[b] .. start[b] + count[b] - 1 of every layer.

    x [B, T, D]: the features; what follows the counted ones is padding and may hold anything. k, v: the caches, one entry a layer; slots
    past their end are dropped, all other slots stay. start int32 [B], not negative; count int32 [B], 0 .. T. eps: of the norms.
    Projections are rounded to the caches' dtype, then norms and rotations are computed in float32 and each rounded to it again. Returns
    the caches; the kernel writes them in place where they are not used afterwards.

    Layers that the kernel does not take (`kv_injection_pallas.supports`: biases, layers of different shapes, a rotation of less than
    the whole width) go the plain way whatever the implementation is. On several devices each writes its own rows and heads.
    """
    if len(layers) != len(k) or len(layers) != len(v):
        raise ValueError(f"{len(layers)} layers need as many caches, not {len(k)} and {len(v)}")
    weights = tuple((layer.k, layer.v, layer.k_bias, layer.v_bias) for layer in layers)
    norms = tuple(layer.k_norm for layer in layers)

    def inject(
        x: jax.Array, weights: Any, norms: Any, k: Caches, v: Caches, start: jax.Array, count: jax.Array
    ) -> tuple[Caches, Caches]:
        own = [
            replace(layer, k=own_k, v=own_v, k_bias=k_bias, v_bias=v_bias, k_norm=norm)
            for layer, (own_k, own_v, k_bias, v_bias), norm in zip(layers, weights, norms, strict=True)
        ]
        return _on_a_device(x, own, k, v, start, count, eps, resolve(implementation))

    cache = (ROWS, HEADS)
    axes = ((ROWS,), (HEADS,), (), cache, cache, (ROWS,), (ROWS,))
    return each_device(inject, axes, (cache, cache), k[0].shape[1])(x, weights, norms, k, v, start, count)


def _on_a_device(
    x: jax.Array,
    layers: Sequence[LayerKV],
    k: Caches,
    v: Caches,
    start: jax.Array,
    count: jax.Array,
    eps: float,
    chosen: Implementation,
) -> tuple[Caches, Caches]:
    if chosen != "xla":
        # Imported here: a process that runs no kernel needs no Pallas.
        from jaxspec_kernels import kv_injection_pallas as kernel

        interpret = chosen == "interpret"
        if kernel.supports(x, layers, k, interpret=interpret):
            return kernel.inject_kv(x, layers, k, v, start, count, eps=eps, interpret=interpret)
    return _inject_kv(x, layers, k, v, start, count, eps)


def _inject_kv(
    x: jax.Array, layers: Sequence[LayerKV], k: Caches, v: Caches, start: jax.Array, count: jax.Array, eps: float
) -> tuple[Caches, Caches]:
    """The same in plain jax.numpy: what the kernel has to equal."""
    steps = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    written_k, written_v = [], []
    for layer, k_cache, v_cache in zip(layers, k, v, strict=True):
        slots = jnp.where(steps < count[:, None], start[:, None] + steps, k_cache.shape[2])  # [B, T]
        keys, values = _keys_values(x, layer, slots, eps)
        written_k.append(_write(k_cache, keys, slots))
        written_v.append(_write(v_cache, values, slots))
    return tuple(written_k), tuple(written_v)


def _keys_values(x: jax.Array, layer: LayerKV, positions: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x [B, T, D] at positions int32 [B, T] -> keys, normed and rotated, and values, each [B, T, K, H]."""
    keys = _add(project(x, layer.k), layer.k_bias)
    values = keys if layer.v is None else _add(project(x, layer.v), layer.v_bias)
    if layer.k_norm is not None:
        weight = layer.k_norm.astype(jnp.float32) + layer.norm_offset
        keys = (_rms_normalize(keys, eps) * weight[None, None, None]).astype(x.dtype)
    if layer.v_norm:
        values = _rms_normalize(values, eps).astype(x.dtype)
    return _rotate(keys, positions, layer.frequencies, layer.scaling), values


def _add(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias[None, None]


def _rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x [..., H] -> float32 [..., H] with mean square 1."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray, scaling: float) -> jax.Array:
    """x [B, T, K, H] turned by the angles of positions int32 [B, T], in float32; x's dtype."""
    half = frequencies.shape[0]
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None, None]
    cos, sin = (jnp.cos(angles) * scaling)[:, :, None], (jnp.sin(angles) * scaling)[:, :, None]  # [B, T, 1, R/2]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _write(cache: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """values [B, T, K, H] into cache [B, K, S, H] at slots int32 [B, T]; slots past the end are dropped."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, :, slots].set(values.astype(cache.dtype), mode="drop", unique_indices=True)

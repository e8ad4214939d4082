"""Rotary position embedding: inverse frequencies of every supported kind, and the rotation itself.

Formulas and the order of their float32 roundings follow `modeling_rope_utils` of transformers 5.24: frequencies agree
to one unit in the last place, so that long positions turn by the same angle. Angles are computed from positions as they
come: there is no table that a position could run past.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Frequencies in radians a position, float32 [R/2], and the factor on cos and sin.

    R is the rotated width: H for kind "proportional" (its unrotated entries have frequency zero), int(H * partial) for
    the others.
    """
    if rope.kind == "proportional":
        rotated = int(rope.partial * rope.head_dim // 2)
        frequencies = np.zeros(rope.head_dim // 2, np.float32)
        frequencies[:rotated] = _plain_frequencies(rope.theta, rope.head_dim)[:rotated]
        return frequencies / np.float32(rope.factor), 1.0
    width = int(rope.head_dim * rope.partial)
    frequencies = _plain_frequencies(rope.theta, width)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, width), _yarn_attention_factor(rope)
    return frequencies, 1.0


def apply_rope(x: jax.Array, positions: jax.Array, rope: RopeConfig) -> jax.Array:
    """Rotates the heads `x` [B, T, N, H] by the angles of `positions` int32 [B, T]; same shape and dtype, computed in
    float32.

    Entry j of the first half of the rotated width pairs with entry j of its second half (transformers' `rotate_half`).
    """
    frequencies, scaling = inverse_frequencies(rope)
    half = frequencies.shape[0]
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None, None, :]  # [B, T, R/2]
    cos = (jnp.cos(angles) * scaling)[:, :, None, :]
    sin = (jnp.sin(angles) * scaling)[:, :, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _powers(theta: float, width: int) -> np.ndarray:
    """theta^(2j/width), float32 [width/2]."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _plain_frequencies(theta: float, width: int) -> np.ndarray:
    return np.float32(1.0) / _powers(theta, width)


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    assert rope.original_max_positions is not None
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > np.float32(context / low), frequencies / factor, frequencies)
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < np.float32(context / high)) & ~(wavelengths > np.float32(context / low))
    return np.where(between, smoothed, scaled)


def _yarn_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions from the plain frequencies to those divided by
    `factor`.
    """
    assert rope.original_max_positions is not None
    context = rope.original_max_positions

    def dimension_of(rotations: float) -> float:
        return (width * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = _powers(rope.theta, width)
    kept = np.float32(1) - ramp
    return np.float32(1) / (np.float32(rope.factor) * powers) * (np.float32(1) - kept) + np.float32(1) / powers * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The given factor, or the paper's 0.1 ln(factor) + 1, or the ratio of `mscale` and `mscale_all_dim`."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)

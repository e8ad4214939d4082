"""Rows worked on some at a time, so that what is large on the way is small, and made again in the backward pass, not kept."""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

# Most floats of the largest array that a part makes: on CPUs about what the caches hold, elsewhere enough to keep the device busy.
CPU_FLOATS, FLOATS = 1 << 21, 1 << 26

Out = TypeVar("Out")
Arrays = list[jax.Array]


def in_parts(f: Callable[..., Out], rows: tuple[Any, ...], size: int | None, floats: int) -> Out:
    """f(*rows), `size` rows at a time.

    Args:
        f: pytrees of arrays [B, n, ...] -> a pytree of arrays [B, n, ...], each row on its own. It gets rows of zeros, too.
        rows: f's arguments, arrays [B, N, ...].
        size: n; None: as many as make an array of CPU_FLOATS or FLOATS.
        floats: of the largest array that f makes, for each of the N rows.
    """
    count = _count(rows)
    size = _size(count, size, floats)
    if count <= size:
        return f(*rows)
    inner = jax.checkpoint(f, prevent_cse=False)  # a loop's two passes share nothing anyway
    return _joined(lax.map(lambda part: inner(*part), _split(rows, size)), count)


def sums_in_parts(
    f: Callable[..., tuple[tuple[jax.Array, ...], Out]],
    rows: tuple[Any, ...],
    size: int | None,
    floats: int,
    constants: tuple[Any, ...] = (),
) -> tuple[tuple[jax.Array, ...], Out]:
    """What f gives to each row, summed over all of them, `size` rows at a time; the rest of f's result as from `in_parts`.

    The gradient of a sum is known but for a factor, so each part's is made right behind its value: nothing of it is made twice, nor kept.

    Args:
        f: pytrees of arrays [B, n, ...] -> a tuple of float32 [B, n], and a pytree of arrays [B, n, ...] without a gradient, each row on
            its own. It gets rows of zeros, too. It may close over arrays; they get their gradients, too.
        rows, size, floats: as for `in_parts`.
        constants: more of f's arguments, behind the rows, which get no gradient.

    Returns:
        float32 scalars, and arrays [B, N, ...].
    """
    count = _count(rows)
    size = _size(count, size, floats)
    leaves, treedef = jax.tree.flatten(_split((rows, constants, jnp.ones(_lead(rows), jnp.bool_)), size))
    moves = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    moves[len(jax.tree.leaves(rows)) :] = [False] * (len(leaves) - len(jax.tree.leaves(rows)))
    moving = [leaf for leaf, each in zip(leaves, moves, strict=True) if each]
    fixed = [leaf for leaf, each in zip(leaves, moves, strict=True) if not each]

    def terms(moving: Sequence[jax.Array], fixed: Sequence[jax.Array]) -> tuple[tuple[jax.Array, ...], Out]:
        rest = {True: iter(moving), False: iter(fixed)}
        part, given, there = treedef.unflatten([next(rest[each]) for each in moves])
        made, beside = f(*part, *given)
        return tuple(jnp.sum(jnp.where(there, each, 0.0)) for each in made), beside

    # What f closes over becomes an argument.
    first = jax.tree.map(lambda x: x[0], (moving, fixed))
    closed, around = jax.closure_convert(terms, *first)
    number = len(jax.eval_shape(closed, *first, *around)[0])

    @jax.custom_vjp
    def total(moving: Arrays, fixed: Arrays, around: Arrays) -> tuple[tuple[jax.Array, ...], Out]:
        made, beside = lax.map(lambda part: closed(*part, *around), (moving, fixed))
        return tuple(jnp.sum(each) for each in made), beside

    def forward(moving: Arrays, fixed: Arrays, around: Arrays) -> Any:
        def one(sofar: Any, part: tuple[Arrays, Arrays]) -> tuple[Any, Any]:
            def term(moving: Arrays, around: Arrays, index: int) -> Any:
                made, beside = closed(moving, part[1], *around)
                return made[index], (made, beside)

            # One way back for each term; XLA finds that they share the way forward.
            passes = [jax.grad(partial(term, index=i), (0, 1), has_aux=True)(part[0], around) for i in range(number)]
            slopes, ((made, beside), *_) = zip(*passes, strict=True)
            of_moving, of_around = zip(*slopes, strict=True)
            return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sofar, (made, of_around)), (of_moving, beside)

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), [around] * number)
        start = (tuple(jnp.zeros((), jnp.float32) for _ in range(number)), tuple(nothing))
        (sums, of_around), (of_moving, beside) = lax.scan(one, start, (moving, fixed))
        return (sums, beside), (of_moving, of_around, [jnp.zeros((), x.dtype) for x in around])

    def backward(kept: Any, given: Any) -> Any:
        of_moving, of_around, like = kept

        def weighed(*slopes: jax.Array) -> jax.Array:
            return reduce(
                jnp.add, [share * slope.astype(jnp.float32) for share, slope in zip(given[0], slopes, strict=True)]
            )

        moved = jax.tree.map(lambda *slopes: weighed(*slopes).astype(slopes[0].dtype), *of_moving)
        turned = jax.tree.map(weighed, *of_around)
        return moved, None, [slope.astype(x.dtype) for slope, x in zip(turned, like, strict=True)]

    total.defvjp(forward, backward)
    sums, beside = total(moving, fixed, around)
    return sums, _joined(beside, count)


def _lead(rows: tuple[Any, ...]) -> tuple[int, int]:
    """B and N."""
    batch, count = jax.tree.leaves(rows)[0].shape[:2]
    return batch, count


def _count(rows: tuple[Any, ...]) -> int:
    return _lead(rows)[1]


def _size(count: int, size: int | None, floats: int) -> int:
    """Rows of a part."""
    if size is not None:
        return min(size, count)
    most = CPU_FLOATS if jax.default_backend() == "cpu" else FLOATS
    parts = math.ceil(count / max(1, most // floats))
    return math.ceil(count / parts)  # parts alike, so that little is padded


def _split(rows: Any, size: int) -> Any:
    """[B, N, ...] -> [N / n, B, n, ...], zeros behind the last row."""

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(split, rows)


def _joined(parts: Any, count: int) -> Any:
    """[N / n, B, n, ...] -> [B, N, ...]."""

    def joined(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :count]

    return jax.tree.map(joined, parts)

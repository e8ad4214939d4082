"""Losses and slot weights against speculators 0.9 (tests/goldens/training/losses.npz, made by tools/make_training_goldens.py)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.losses import LOSSES, ce_on_labels, dpace, fixed_decay, mixture_loss, position_loss

GOLDENS = Path(__file__).parent / "goldens" / "training" / "losses.npz"
GAMMA, ALPHA, MIXTURE = 4.0, 0.4, {"ce": 0.1, "tv": 0.9}  # of the tool


ROWS, VOCAB = 24, 40  # of the golden; elsewhere too, so that each loss is compiled once


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as arrays:
        return dict(arrays)


@partial(jax.jit, static_argnums=0)
def run(
    name: str, logits: jax.Array, target: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The losses, and the gradients of their weighted sum by both arguments."""

    def weighted(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = position_loss(name, logits, target)
        return jnp.sum(weights * loss), loss

    gradients, loss = jax.grad(weighted, argnums=(0, 1), has_aux=True)(logits, target)
    return loss, gradients


def random_pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits, target = (2 * rng.standard_normal((2, ROWS, VOCAB))).astype(np.float32)
    return logits, target


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def formulas(logits: np.ndarray, target: np.ndarray, held: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Every loss in float64; lk_hybrid with the acceptance in its blend `held`, if given."""
    p, q = softmax(target), softmax(logits)
    accepted, middle = np.minimum(p, q).sum(-1), (p + q) / 2
    kl = (p * np.log(p / q)).sum(-1)
    blend = np.exp(-3 * (accepted if held is None else held))
    return {
        "kl": kl,
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "js": 0.5 * (p * np.log(p / middle) + q * np.log(q / middle)).sum(-1),
        "ce": -np.log(np.take_along_axis(q, p.argmax(-1)[:, None], 1)[:, 0]),
        "tv": 0.5 * np.abs(p - q).sum(-1),
        "nla": -np.log(accepted),
        "lk_hybrid": blend * kl + (1 - blend) * (1 - accepted),
    }


def test_every_loss_has_a_golden(golden: dict[str, np.ndarray]) -> None:
    assert {f"{name}_gradient" for name in LOSSES} == {name for name in golden if name.endswith("_gradient")}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_speculators(name: str, golden: dict[str, np.ndarray]) -> None:
    loss, (gradient, of_target) = run(name, golden["logits"], golden["target"], golden["weights"])
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, golden[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, golden[f"{name}_gradient"], rtol=1e-5, atol=1e-5)
    assert not of_target.any()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_its_formula_and_the_gradient_its_slope(name: str) -> None:
    logits, target = random_pair(1)
    loss, (gradient, _) = run(name, logits, target, np.ones(ROWS, np.float32))
    np.testing.assert_allclose(loss, formulas(logits, target)[name], rtol=1e-5)
    direction = np.random.default_rng(2).standard_normal(logits.shape)
    held = np.minimum(softmax(logits), softmax(target)).sum(-1)  # lk_hybrid's blend carries no gradient
    up, down = (formulas(logits + step * direction, target, held)[name] for step in (1e-6, -1e-6))
    np.testing.assert_allclose((gradient * direction).sum(-1), (up - down) / 2e-6, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_logits_are_computed_in_float32(name: str) -> None:
    logits, target = (jnp.asarray(x, jnp.bfloat16) for x in random_pair(3))
    loss, (gradient, _) = run(name, logits, target, np.ones(ROWS, np.float32))
    assert loss.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float32) for x in (logits, target)]
    np.testing.assert_allclose(loss, run(name, *wide, np.ones(ROWS, np.float32))[0], rtol=1e-6)


def test_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="unknown loss 'kl_div'; one of kl, reverse_kl"):
        position_loss("kl_div", jnp.zeros((1, 2)), jnp.zeros((1, 2)))


@pytest.mark.parametrize("name", LOSSES)
def test_backward_keeps_only_the_logits(name: str) -> None:
    """What stays between the passes is the two arguments, so that a long batch costs no more."""
    shape = jax.ShapeDtypeStruct((ROWS, VOCAB), jnp.float32)

    def vjp(logits: jax.Array, target: jax.Array) -> Callable:
        return jax.vjp(lambda x: position_loss(name, x, target), logits)[1]

    kept = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(vjp, shape, shape)))
    assert kept <= 2 * ROWS * VOCAB


def test_mixture_is_the_weighted_sum(golden: dict[str, np.ndarray]) -> None:
    """And, with masks and decay, speculators' compound loss."""
    loss = np.asarray(jax.jit(partial(mixture_loss, MIXTURE))(golden["logits"], golden["target"]))
    np.testing.assert_allclose(loss, 0.1 * golden["ce"] + 0.9 * golden["tv"], rtol=1e-5, atol=1e-6)
    decay = np.tile(fixed_decay(6, GAMMA, 1), ROWS // 6)
    mean = (loss * decay)[golden["counts"]].sum() / golden["counts"].sum()
    np.testing.assert_allclose(mean, golden["mixture_mean"], rtol=1e-5)


def test_cross_entropy_on_labels() -> None:
    logits, target = random_pair(4)
    labels = target.argmax(-1).astype(np.int32)
    shaped = jax.jit(ce_on_labels)(logits.reshape(4, 6, VOCAB), labels.reshape(4, 6))
    np.testing.assert_allclose(shaped.reshape(-1), formulas(logits, target)["ce"], rtol=1e-5)


def test_cross_entropy_on_a_label_outside_the_vocabulary_is_finite() -> None:
    """Such a slot is masked out; its gradient must not poison the sum."""
    loss, gradient = jax.jit(jax.value_and_grad(lambda x: ce_on_labels(x, jnp.int32(-1))))(jnp.ones(4))
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("first", [0, 1])
def test_fixed_decay_equals_speculators(first: int, golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(fixed_decay(6, GAMMA, first), golden[f"decay_from_{first}"], rtol=1e-6)


def test_dpace_equals_speculators(golden: dict[str, np.ndarray]) -> None:
    weights = dpace(jnp.asarray(golden["ce_of_slots"]), jnp.asarray(golden["mask"]), ALPHA)
    np.testing.assert_allclose(weights, golden["dpace"], rtol=1e-5, atol=1e-6)


def test_dpace_of_certain_drafts_counts_the_slots_that_follow() -> None:
    mask = jnp.array([True, True, False, True, True])
    np.testing.assert_allclose(dpace(jnp.zeros(5), mask, 0.5), [4, 3, 0, 2, 1])


def test_dpace_of_hopeless_drafts_falls_with_alpha() -> None:
    weights = dpace(jnp.full((1, 3), 100.0), jnp.ones((1, 3), bool), 0.5)
    np.testing.assert_allclose(weights, [[0.5 + 0.25 + 0.125, 0.25 + 0.125, 0.125]])


def test_dpace_carries_no_gradient() -> None:
    assert not jax.grad(lambda ce: jnp.sum(dpace(ce, jnp.ones(4, bool), 0.5)))(jnp.ones(4)).any()

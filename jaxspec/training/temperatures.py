"""Sequential temperature scaling of DSpark's confidences (arXiv 2607.05147, section 3.2)."""

import numpy as np

BINS = 20
_GRID = np.geomspace(1 / 8, 8, 121).round(4)
GRID = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]
"""The temperatures that are tried, those next to 1 first."""


def calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """The expected calibration error (ECE) of probabilities [N] against outcomes bool [N]: how far each of BINS equal bins' mean prediction
    is from the share that happened, weighted by the bins' sizes."""
    gaps = np.bincount(_bins(predicted), happened - predicted, BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def survivals(logits: np.ndarray, temperatures: np.ndarray | None = None) -> np.ndarray:
    """Probabilities [N, K] that drafts 1 .. k are all accepted, of confidence logits [N, K] and each slot's temperature [K]; None: 1."""
    scaled = logits if temperatures is None else logits / temperatures
    return np.cumprod(_sigmoid(scaled), axis=1)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """A temperature for each slot's confidence, slot by slot, those before it held at theirs.

    The paper takes the one that makes the ECE of the survival least. Where about half of the drafts are accepted that is one so high that
    all confidences are alike; so, of those whose ECE is beyond the least by no more than chance would have it, it is the one that predicts
    best (in cross-entropy) where the slots before were accepted. A slot that no cycle reached keeps 1.

    Args:
        logits: [N, K], of N cycles.
        accepted: int [N], how many drafts in a row were accepted, 0 .. K.

    Returns:
        float64 [K].
    """
    before = np.ones(len(logits))
    found = np.ones(logits.shape[1])
    for slot in range(logits.shape[1]):
        happened, reached = accepted > slot, accepted >= slot
        if not reached.any():
            break
        survival = [before * _sigmoid(logits[:, slot] / temperature) for temperature in GRID]
        errors = np.array([calibration_error(each, happened) for each in survival])
        allowed = errors <= errors.min() + [_chance(each) for each in survival]
        signed = np.where(happened, logits[:, slot], -logits[:, slot])[reached]
        entropies = np.array([np.logaddexp(0, -signed / temperature).sum() for temperature in GRID])
        best = int(np.argmin(np.where(allowed, entropies, np.inf)))
        before, found[slot] = survival[best], GRID[best]
    return found


def _chance(predicted: np.ndarray) -> float:
    """The ECE to expect of probabilities [N] that are right: that of as many draws."""
    variance = np.bincount(_bins(predicted), predicted * (1 - predicted), BINS)
    return float(np.sqrt(2 / np.pi * variance).sum() / len(predicted))


def _bins(predicted: np.ndarray) -> np.ndarray:
    return np.minimum((predicted * BINS).astype(np.int64), BINS - 1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))

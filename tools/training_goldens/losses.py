"""Per-position losses, their gradients, and slot weights by speculators 0.9's eager implementation."""

import numpy as np
import torch
from speculators.losses import compound_loss, dflash_loss_decay, dpace_loss_decay, resolve_loss_config

SPECULATORS_NAMES = {
    "kl": "kl_div",
    "reverse_kl": "rkl",
    "js": "jsd",
    "ce": "ce",
    "tv": "tv",
    "nla": "nla",
    "lk_hybrid": "lk_hybrid",
}
VOCAB, ROWS = 40, 4
SLOTS, GAMMA, ALPHA = 6, 4.0, 0.4
MIXTURE = {"ce": 0.1, "tv": 0.9}


def pairs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and target [N, V]: wide apart, sharp, nearly equal, equal, with an offset, and without any overlap."""

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, VOCAB, generator=generator)

    base, far = noise(2.0), torch.zeros(ROWS, VOCAB)
    far[:, 3] = 30.0
    logits = [noise(2.0), noise(15.0), base, base, noise(2.0) + 1000.0, far]
    target = [noise(2.0), noise(15.0), base + noise(0.01), base, noise(2.0) - 500.0, far.roll(7, dims=1)]
    return torch.cat(logits), torch.cat(target)


def make(seed: int) -> dict[str, np.ndarray]:
    """The arrays of losses.npz."""
    generator = torch.Generator().manual_seed(seed)
    logits, target = pairs(generator)
    weights = torch.rand(len(logits), generator=generator) + 0.5
    arrays = {"logits": logits, "target": target, "weights": weights}
    for name, theirs in SPECULATORS_NAMES.items():
        variable = logits[None].clone().requires_grad_(True)
        loss = resolve_loss_config(theirs, "eager")[theirs][0](variable, target[None])[0]
        arrays[name] = loss.detach()
        (gradient,) = torch.autograd.grad((loss * weights).sum(), variable)
        arrays[f"{name}_gradient"] = gradient[0]

    slots = torch.arange(SLOTS, dtype=torch.float32)
    arrays |= {
        f"decay_from_{first}": dflash_loss_decay(slots, GAMMA, sample_from_anchor=first == 0) for first in (0, 1)
    }
    ce = 3.0 * torch.rand(5 * SLOTS, generator=generator)
    mask = torch.rand(5 * SLOTS, generator=generator) < 0.7
    mask[-SLOTS:] = False
    arrays |= {"ce_of_slots": ce.reshape(-1, SLOTS), "mask": mask.reshape(-1, SLOTS)}
    arrays["dpace"] = dpace_loss_decay(
        slots, loss_mask=mask[None], block_size=SLOTS, dpace_alpha=ALPHA, elementwise_loss=ce[None]
    ).reshape(-1, SLOTS)

    mixture = {name: (resolve_loss_config(name, "eager")[name][0], weight) for name, weight in MIXTURE.items()}
    counts = torch.rand(len(logits), generator=generator) < 0.8
    arrays["counts"] = counts
    position = torch.arange(len(logits))[None] % SLOTS
    arrays["mixture_mean"] = compound_loss(
        logits[None], target[None], counts[None], position, mixture, lambda at, **_: dflash_loss_decay(at, GAMMA)
    )[0]
    return {name: array.numpy() for name, array in arrays.items()}

"""What the training fixtures of all peers share: packed batches, the verifier's features of them, and the files of a case.

Drafters and verifiers are those of tests/goldens/drafters, which tools/make_drafter_goldens.py makes: their bfloat16 weights in
float32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from drafter_goldens.common import GOLDENS as DRAFTERS
from drafter_goldens.common import MASK, aux_features
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

GOLDENS = DRAFTERS.parent / "training"
MIN_GAP = 1e-3  # of the two largest logits wherever the most likely token matters: far above float32 noise


@dataclass(frozen=True)
class Packed:
    """A batch of B rows of T tokens, and the verifier's features of it, each document seen alone, rounded to bfloat16. Padding has zeros.

    tokens, documents (-1: padding), positions: int64 [B, T]; loss_mask: bool [B, T]; taps: [B, T, n * D]; last: [B, T, D], the stream
    before the final norm.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    taps: torch.Tensor
    last: torch.Tensor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """As stored."""
        stored = {torch.int64: torch.int32, torch.float32: torch.bfloat16, torch.bool: torch.bool}
        return {name: value.to(stored[value.dtype]) for name, value in vars(self).items()}


def pack(rows: Sequence[Sequence[str]], length: int, taps: list[int], verifier: PreTrainedModel, seed: int) -> Packed:
    """rows: documents, a character a token: "x" one that is supervised, "." one that is not. taps: aux ids (SPEC 0.1)."""
    generator = torch.Generator().manual_seed(seed)
    width = verifier.config.hidden_size
    made = Packed(
        torch.zeros(len(rows), length, dtype=torch.long),
        torch.full((len(rows), length), -1),
        torch.zeros(len(rows), length, dtype=torch.long),
        torch.zeros(len(rows), length, dtype=torch.bool),
        torch.zeros(len(rows), length, len(taps) * width),
        torch.zeros(len(rows), length, width),
    )
    streams = [*taps, verifier.config.num_hidden_layers]
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            place = (row, slice(start, start + len(document)))
            tokens = torch.randint(0, MASK, (1, len(document)), generator=generator)
            with torch.no_grad():
                features = aux_features(verifier, tokens, streams)[0].bfloat16().float()
            made.tokens[place] = tokens[0]
            made.documents[place] = number
            made.positions[place] = torch.arange(len(document))
            made.loss_mask[place] = torch.tensor([token == "x" for token in document])
            made.taps[place], made.last[place] = features[:, :-width], features[:, -width:]
            start += len(document)
    return made


def agree(packed: Packed, head: torch.Tensor, index: torch.Tensor, drafts: torch.Tensor, seed: int) -> Packed:
    """The batch with a verifier that agrees with some of the drafts, so that acceptance is not all zero.

    head [Vd, D] of the verifier; chains of draft ids [C, K] and the `index` [C, K] of the position whose stream `last` decides on each,
    in row 0. A random number of each chain's first drafts become the verifier's choice, where no other chain has settled it.
    """
    generator = torch.Generator().manual_seed(3000 + seed)
    last, settled = packed.last.clone(), set()
    for chain in torch.randperm(len(drafts), generator=generator).tolist():
        known = [(i, d) for i, d in zip(index[chain].tolist(), drafts[chain].tolist(), strict=True) if d >= 0]
        known = known[: int(torch.randint(0, len(known) + 1, (), generator=generator))]
        if settled.isdisjoint(i for i, _ in known):
            settled.update(i for i, _ in known)
            for i, draft in known:
                last[0, i] = last[0, i] / last[0, i].norm() + 1.5 * head[draft] / head[draft].norm()
    return replace(packed, last=last.detach().bfloat16().float())


def gap(case: str, what: str, logits: torch.Tensor) -> None:
    """Refuse logits [..., V] of which two compete for the most likely token."""
    top = logits.detach().topk(2, dim=-1).values
    smallest = float((top[..., 0] - top[..., 1]).min()) if len(logits) else float("inf")
    if smallest < MIN_GAP:
        raise RuntimeError(f"{case}: {what} are a near tie (gap {smallest:.2g}); try another seed")


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every parameter that the peer trains, by its name in checkpoints."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    made = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), made, strict=True)}


def write(
    directory: Path,
    case: str,
    packed: Packed,
    choices: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    meta: dict[str, object],
) -> None:
    """CASE.safetensors: the batch, the features, the choices, and "gradient." before every gradient. CASE.json: what made it, the loss
    and the metrics."""
    tensors = packed.tensors | {name: value.int() for name, value in choices.items()}
    tensors |= {f"gradient.{name}": value.contiguous() for name, value in grads.items()}
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise RuntimeError(f"{case}: {bad[0]} is not finite")
    save_file(tensors, directory / f"{case}.safetensors")
    peers = {"torch": torch.__version__, "transformers": transformers.__version__}
    meta = {"case": case, "dtype": "float32", **meta, "peers": peers | meta["peers"]}
    meta["tool"] = "tools/make_training_goldens.py"
    (directory / f"{case}.json").write_text(json.dumps(meta, indent=2) + "\n")
    size = sum((directory / f"{case}.{kind}").stat().st_size for kind in ("json", "safetensors"))
    largest = max(float(value.abs().max()) for value in grads.values())
    print(f"{case}: {size / 1000:.0f} kB, loss {meta['loss']:.4g}, |gradient| <= {largest:.3g}", flush=True)


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """A peer's metrics as plain numbers."""
    return {name: float(value) for name, value in sorted(metrics.items())}


def read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())

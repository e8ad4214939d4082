"""Whole greedy generations by the originals' own loops: what tests/test_cycle_parity.py follows cycle by cycle.

A loop.json stands beside the drafter's checkpoint. Drafters of random weights are accepted once in a while only; the cases here are
fitted to the verifier's own continuations, so that acceptance goes from none to the whole block.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from drafter_goldens import common
from drafter_goldens.common import BLOCK, MASK

PROMPT_LENGTHS = (1, 4, 9, 14)
NEW_TOKENS = 60
FITTING_PROMPTS = 12
FITTING_STEPS = 600
MIN_GAP = (
    5e-5  # of the two largest logits, and of a confidence's logit from its threshold's; float32 noise is about 1e-5
)


@dataclass(frozen=True)
class Run:
    """One prompt, and what the original did.

    Fields:
        prompt_ids: the prompt.
        stop_token_ids: what ends the answer.
        max_new_tokens: most tokens, the first one included.
        confidence_threshold: DeepSpec's; 0 for never.
        token_ids: the answer. Its first token comes from the prefill, before the first cycle.
        acceptance_lengths: tokens committed by each cycle.
        proposal_lengths: drafts verified by each cycle (DeepSpec).
    """

    prompt_ids: list[int]
    stop_token_ids: list[int]
    max_new_tokens: int
    confidence_threshold: float
    token_ids: list[int]
    acceptance_lengths: list[int]
    proposal_lengths: list[int] | None = None


class Gaps:
    """The smallest gap of the two largest logits that `watch`ed functions have returned."""

    def __init__(self) -> None:
        self.smallest = float("inf")

    def see(self, logits: torch.Tensor) -> None:
        self.smallest = min(self.smallest, common.gap(logits))

    @contextmanager
    def watch(self, owner: object, name: str, logits_of: Callable[[object], torch.Tensor]) -> Iterator[None]:
        """Look at every result of the method `name`."""
        method = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            result = method(*args, **kwargs)
            self.see(logits_of(result))
            return result

        with mock.patch.object(owner, name, watched):
            yield


def prompts(seed: int) -> list[torch.Tensor]:
    """Random prompts [1, T] of PROMPT_LENGTHS; no mask among them."""
    generator = torch.Generator().manual_seed(3000 + seed)
    return [torch.randint(0, MASK, (1, length), generator=generator) for length in PROMPT_LENGTHS]


def continuations(target: PreTrainedModel, seed: int) -> torch.Tensor:
    """Greedy text [FITTING_PROMPTS, T] to fit to: behind half of `prompts`, and behind random prompts. The rest stays unseen."""
    generator = torch.Generator().manual_seed(4000 + seed)
    starts = prompts(seed)[1::2]
    while len(starts) < FITTING_PROMPTS:
        starts.append(torch.randint(0, MASK, (1, len(starts)), generator=generator))
    length = max(PROMPT_LENGTHS) + NEW_TOKENS
    return torch.cat(
        [
            target.generate(start, max_length=length, do_sample=False, pad_token_id=0, eos_token_id=None)
            for start in starts
        ]
    )


def fit(model: nn.Module, seed: int, length: int, loss_of: Callable[[int], torch.Tensor]) -> None:
    """Adam on `loss_of(position of the anchor)`, at random positions of sequences of `length`; leaves bfloat16 values.

    The same on every run on one machine; another's instructions may sum in another order.
    """
    choose = random.Random(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    with torch.enable_grad():
        for _ in range(FITTING_STEPS):
            optimizer.zero_grad()
            loss_of(choose.randrange(min(PROMPT_LENGTHS), length - BLOCK)).backward()
            optimizer.step()
    for parameter in parameters:
        parameter.data.copy_(parameter.data.to(torch.bfloat16))


def stop_inside_a_block(runs: list[Run]) -> tuple[Run, int] | None:
    """A run, and a token in it that first comes up inside a block of which more was accepted; else as the first draft of such a block;
    None where no block has one."""
    for inside in (1, 0):
        for run in runs:
            start = 1
            for length in run.acceptance_lengths:
                for at in range(start + inside, start + length - 1):
                    if run.token_ids.index(run.token_ids[at]) == at:
                        return run, run.token_ids[at]
                start += length
    return None


def write(directory: Path, verifier: str, peers: dict[str, str], runs: list[Run], gaps: Gaps) -> None:
    """loop.json beside the checkpoint; refuses near ties, which float32 noise could turn round."""
    name = directory.name
    if gaps.smallest < MIN_GAP:
        raise RuntimeError(f"{name}: a near tie in the loop (gap {gaps.smallest:.2g}); try another seed")
    content = {
        "verifier": verifier,
        "peers": {"torch": torch.__version__, "transformers": transformers.__version__, **peers},
        "min_gap": round(gaps.smallest, 5),
        "runs": [asdict(run) for run in runs],
        "tool": "tools/make_drafter_goldens.py",
    }
    (directory / "loop.json").write_text(json.dumps(content) + "\n")
    lengths = [length for run in runs for length in run.acceptance_lengths]
    cut = [length for run in runs for length in run.proposal_lengths or ()]
    print(
        f"{name} loop: {len(lengths)} cycles of {sum(lengths) / len(lengths):.2f} tokens, "
        f"{sorted(set(lengths))}; verified {sorted(set(cut))}; gap {gaps.smallest:.2g}",
        flush=True,
    )

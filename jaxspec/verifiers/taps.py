"""Which verifier hidden states a drafter sees, and the two ways checkpoints number them (SPEC 0.1).

- An *aux id* k (vLLM, speculators) is the residual stream **entering** layer k: 0 the scaled embeddings, L the last residual before the
  final norm. The decoder takes aux ids only.
- An *output id* t (z-lab, DeepSpec: `target_layer_ids`) is the **output** of layer t, t from 0; -1 the embeddings. aux id = t + 1.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from jaxspec.errors import InputError

TapConvention = Literal["aux", "output"]


def aux_ids(ids: Sequence[int], convention: TapConvention, num_layers: int) -> tuple[int, ...]:
    """Layer ids of either convention as aux ids.

    `num_layers` is the verifier's L. Raises InputError where `ids` is empty, not strictly increasing (features are concatenated in
    increasing order, so any other order means a drafter trained on something else) or outside the convention's range: 0..L for "aux",
    -1..L-1 for "output".
    """
    if convention not in ("aux", "output"):
        raise InputError(f"tap convention {convention!r} is unknown; use 'aux' or 'output'")
    name, shift = ("aux layer ids", 0) if convention == "aux" else ("target_layer_ids", 1)
    shown = list(ids)
    if not shown:
        raise InputError(f"{name} are empty; a drafter needs at least one verifier layer")
    if any(isinstance(k, bool) or not isinstance(k, int) for k in shown):
        raise InputError(f"{name} {shown} must be integers")
    if any(later <= earlier for earlier, later in pairwise(shown)):
        raise InputError(f"{name} {shown} must be distinct and increasing")
    if shown[0] + shift < 0 or shown[-1] + shift > num_layers:
        raise InputError(
            f"{name} {shown} must lie in {-shift}..{num_layers - shift} for a verifier of {num_layers} layers"
        )
    return tuple(k + shift for k in shown)


def default_aux_ids(num_layers: int) -> tuple[int, ...]:
    """The aux ids that vLLM and speculators take where a checkpoint names none: 2, L // 2 and L - 3.

    Raises InputError for verifiers of fewer than 7 layers, where these are not three increasing ids (speculators refuses them too).
    """
    if num_layers < 7:
        raise InputError(f"a verifier of {num_layers} layers has no default tap layers (7 or more have); name them")
    return (2, num_layers // 2, num_layers - 3)


def default_output_ids(num_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The output ids (`target_layer_ids`) that z-lab takes for a drafter of m = `draft_layers` layers: evenly spaced from 1 to L - 3.

    One layer gives L // 2. Halves round to the even id, as in dflash 0.1.0. Raises InputError where the verifier has too few layers for
    m distinct ids.
    """
    if draft_layers < 1:
        raise InputError(f"a drafter of {draft_layers} layers is impossible; it needs at least 1")
    if draft_layers == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))
    if num_layers < 4 or len(set(ids)) < draft_layers:
        raise InputError(
            f"a verifier of {num_layers} layers has too few for the default tap layers of a drafter of {draft_layers}; "
            "name them"
        )
    return ids

"""The declarative tables that tie our parameters to Hugging Face tensor names, and their expansion for one model.

A table is read in both directions: import takes each link's source tensor into our parameter, export writes the
parameter back under the source's name. Weights keep PyTorch's [out, in] order in ours, so a link is at most a reshape
and a slice.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""A parameter's place in the module: ('layers', 0, 'attention', 'q', 'weight')."""


@dataclass(frozen=True)
class Rule:
    """Our parameter `path` is stored as tensor `name`; {i} is the layer and {e} the expert in both.

    `merge`: our axes merge and merge + 1 are one axis of the stored tensor. `half`: only the first (0) or second (1)
    half of the stored axis 1 is this parameter. A name with {e} holds one row of our axis 0 each. `leading`: the stored
    tensor has that many axes of length 1 before ours. `layout`: the form of a tensor that is stored in more than one
    way; "" for all others.
    """

    path: str
    name: str
    merge: int | None = None
    half: int | None = None
    leading: int = 0
    layout: str = ""


@dataclass(frozen=True)
class Table:
    """A family's rules. `layouts`: the forms its experts are stored in; the first is the one written on export."""

    rules: tuple[Rule, ...]
    layouts: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Link:
    """One stored tensor that fills a parameter, or part of it.

    `shape`: the stored tensor's whole shape. `expert`: the row of the parameter's axis 0 it fills, None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    half: int | None = None
    expert: int | None = None


ATTENTION = (
    Rule("layers.{i}.attention.q.weight", "layers.{i}.self_attn.q_proj.weight", merge=0),
    Rule("layers.{i}.attention.q.bias", "layers.{i}.self_attn.q_proj.bias", merge=0),
    Rule("layers.{i}.attention.k.weight", "layers.{i}.self_attn.k_proj.weight", merge=0),
    Rule("layers.{i}.attention.k.bias", "layers.{i}.self_attn.k_proj.bias", merge=0),
    Rule("layers.{i}.attention.v.weight", "layers.{i}.self_attn.v_proj.weight", merge=0),
    Rule("layers.{i}.attention.v.bias", "layers.{i}.self_attn.v_proj.bias", merge=0),
    Rule("layers.{i}.attention.o.weight", "layers.{i}.self_attn.o_proj.weight", merge=1),
    Rule("layers.{i}.attention.o.bias", "layers.{i}.self_attn.o_proj.bias"),
)

QK_NORMS = (
    Rule("layers.{i}.attention.q_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    Rule("layers.{i}.attention.k_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
)

MLP = (
    Rule("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.gate_proj.weight"),
    Rule("layers.{i}.mlp.gate.bias", "layers.{i}.mlp.gate_proj.bias"),
    Rule("layers.{i}.mlp.up.weight", "layers.{i}.mlp.up_proj.weight"),
    Rule("layers.{i}.mlp.up.bias", "layers.{i}.mlp.up_proj.bias"),
    Rule("layers.{i}.mlp.down.weight", "layers.{i}.mlp.down_proj.weight"),
    Rule("layers.{i}.mlp.down.bias", "layers.{i}.mlp.down_proj.bias"),
)

ENDS = (
    Rule("embed.weight", "embed_tokens.weight"),
    Rule("norm.weight", "norm.weight"),
    Rule("head.weight", "lm_head.weight"),
)

PRE_NORMS = (
    Rule("layers.{i}.input_norm.weight", "layers.{i}.input_layernorm.weight"),
    Rule("layers.{i}.mlp_norm.weight", "layers.{i}.post_attention_layernorm.weight"),
)

SANDWICH_NORMS = (
    Rule("layers.{i}.input_norm.weight", "layers.{i}.input_layernorm.weight"),
    Rule("layers.{i}.post_attention_norm.weight", "layers.{i}.post_attention_layernorm.weight"),
    Rule("layers.{i}.mlp_norm.weight", "layers.{i}.pre_feedforward_layernorm.weight"),
    Rule("layers.{i}.post_mlp_norm.weight", "layers.{i}.post_feedforward_layernorm.weight"),
)


def expand(table: Table, shapes: Mapping[Path, tuple[int, ...]], layout: str) -> list[Link]:
    """The links that fill the parameters `shapes` (path -> shape), in order, where experts are stored in `layout`.

    Raises KeyError for a parameter the table has no rule for: the table is wrong, not the input.
    """
    rules = {rule.path: rule for rule in table.rules if rule.layout in ("", layout)}
    links = []
    for path, shape in shapes.items():
        layer = next((part for part in path if isinstance(part, int)), None)
        pattern = ".".join("{i}" if isinstance(part, int) else part for part in path)
        rule = rules[pattern]
        name = rule.name.replace("{i}", str(layer))
        if "{e}" in name:
            links.extend(
                Link(name.replace("{e}", str(expert)), shape[1:], path, expert=expert) for expert in range(shape[0])
            )
        else:
            links.append(Link(name, _stored_shape(rule, shape), path, half=rule.half))
    return links


def layout_of(table: Table, names: Iterable[str]) -> str:
    """Which of the table's layouts the stored `names` are in: the one with most of its patterns seen, the first of
    equals.
    """
    seen = {re.sub(r"(?<=\.)\d+(?=\.)", "{n}", name) for name in names}

    def score(layout: str) -> int:
        patterns = {
            rule.name.replace("{i}", "{n}").replace("{e}", "{n}") for rule in table.rules if rule.layout == layout
        }
        return sum(any(name.endswith(pattern) for name in seen) for pattern in patterns)

    return max(table.layouts, key=score)


def _stored_shape(rule: Rule, shape: tuple[int, ...]) -> tuple[int, ...]:
    if rule.merge is not None:
        axis = rule.merge
        return (*shape[:axis], math.prod(shape[axis : axis + 2]), *shape[axis + 2 :])
    if rule.half is not None:
        return (shape[0], 2 * shape[1], *shape[2:])
    return (1,) * rule.leading + shape

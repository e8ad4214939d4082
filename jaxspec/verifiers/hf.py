"""Reading a Hugging Face `config.json`: typed fields with errors that name the field and the file, and the parts
families share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from jaxspec.config import Activation, RopeConfig, RopeKind
from jaxspec.errors import InputError

SLIDING = "sliding_attention"
FULL = "full_attention"

_REQUIRED: Any = object()
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object. `where` names the file, and the key inside it, in errors.

    The typed readers treat null as absent and raise InputError for a missing field without a default and for a value of
    another type.
    """

    data: dict[str, Any]
    where: str

    def error(self, name: str, problem: str) -> InputError:
        """An InputError about field `name`, to be raised by the caller."""
        return InputError(f"{self.where}: {name} {problem}")

    def get(self, name: str) -> Any:
        """The raw value; None where it is absent."""
        return self.data.get(name)

    def integer(self, name: str, default: int | None = _REQUIRED) -> int:
        """A positive whole number."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"is {value!r}; a positive whole number is wanted")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number that may be zero; null is zero."""
        value = self.data.get(name, default) or 0
        return 0 if value == 0 else Fields({name: value}, self.where).integer(name)

    def number(self, name: str, default: float | None = _REQUIRED) -> float:
        """A number, as float."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            raise self.error(name, f"is {str(value)[:40]}; a number is wanted")
        return float(value)

    def positive(self, name: str, default: float | None = _REQUIRED) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.error(name, f"is {value:g}; a number above 0 is wanted")
        return value

    def optional_number(self, name: str) -> float | None:
        """A number, or None where the field is absent or null."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}; true or false is wanted")
        return value

    def section(self, name: str) -> "Fields":
        """A nested object."""
        value = self._value(name, _REQUIRED)
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}; an object is wanted")
        return Fields(value, f"{self.where} {name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise InputError(f"{self.where}: required field {name} is missing")
        return default


def architectures(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes that a config names; none where it names them in no known form."""
    value = data.get("architectures")
    return tuple(name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def activation(fields: Fields, name: str, default: Activation) -> Activation:
    """The MLP's activation."""
    value = fields.get(name) or default
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise fields.error(name, f"is {value!r}; supported: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[value]


def heads(fields: Fields) -> tuple[int, int]:
    """N and K; K = N where `num_key_value_heads` is absent."""
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", query_heads)
    check_groups(fields, query_heads, kv_heads)
    return query_heads, kv_heads


def check_groups(fields: Fields, query_heads: int, kv_heads: int) -> None:
    """Raises unless every key/value head serves the same number of query heads."""
    if query_heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads {query_heads}"
        )


def layer_types(fields: Fields, default: list[str]) -> list[str]:
    """One of "full_attention" and "sliding_attention" a layer; `default` where the config lists none."""
    value = fields.get("layer_types")
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != len(default):
        raise fields.error("layer_types", f"must list one type for each of the {len(default)} layers")
    for entry in value:
        if entry not in (FULL, SLIDING):
            raise fields.error("layer_types", f"has {entry!r}; supported: {FULL}, {SLIDING}")
    return list(value)


def refuse_bidirectional(fields: Fields) -> None:
    """Raises for a model that is not causal on text ("vision" concerns image tokens only)."""
    value = fields.get("use_bidirectional_attention")
    if value and value != "vision":
        raise fields.error("use_bidirectional_attention", f"is {value!r}; only causal models are supported")


def flat_rope(fields: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    """The one rope of a Llama or Qwen config, in any of its layouts.

    `rope_parameters` (transformers 5) or `rope_scaling` (older) hold the kind and its numbers; theta is in there or at
    top level. Where neither has it, a default of 10000 would make most models speak garbage, so that is an error.
    """
    parameters: dict[str, Any] = {}
    where = "rope_parameters"
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(name, f"is {value!r}; an object is wanted")
        if FULL in value or SLIDING in value:
            raise fields.error(name, "differs by layer type, which is not supported here")
        parameters.update(value)
        where = name
    top, nested = fields.optional_number("rope_theta"), parameters.get("rope_theta")
    if top is None and nested is None:
        raise fields.error("rope_theta", "is missing, both at top level and in rope_parameters")
    if top is not None and nested is not None and top != nested:
        raise fields.error("rope_theta", f"is {top} at top level but {nested} in {where}")
    parameters.setdefault("rope_theta", top)
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if fields.get(name) is not None:
            parameters.setdefault(name, fields.get(name))
    return rope_config(Fields(parameters, f"{fields.where} {where}"), head_dim, max_positions)


def rope_config(parameters: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    """A RopeConfig from the fields of one `rope_parameters` object, theta included."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise parameters.error("rope_type", f"is {kind!r}; supported: {', '.join(get_args(RopeKind))}")
    theta = parameters.positive("rope_theta")
    partial = parameters.number("partial_rotary_factor", 1.0)
    if not 0.0 < partial <= 1.0:
        raise parameters.error("partial_rotary_factor", f"is {partial}; a share above 0 and up to 1 is wanted")
    rotated = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotated % 2:
        raise parameters.error(
            "partial_rotary_factor", f"is {partial}: it rotates {rotated} of {head_dim}, an odd number"
        )
    if kind == "default":
        return RopeConfig(theta, head_dim, partial=partial)
    if kind == "proportional":
        return RopeConfig(theta, head_dim, kind, partial, parameters.number("factor", 1.0))
    factor = parameters.number("factor")
    if kind == "linear":
        return RopeConfig(theta, head_dim, kind, partial, factor)
    original = parameters.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if high <= low:
            raise parameters.error("high_freq_factor", f"is {high}; above low_freq_factor {low} is wanted")
        return RopeConfig(theta, head_dim, kind, partial, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        theta,
        head_dim,
        kind,
        partial,
        factor,
        original,
        attention_factor=parameters.optional_number("attention_factor"),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        mscale=parameters.optional_number("mscale"),
        mscale_all_dim=parameters.optional_number("mscale_all_dim"),
        truncate=parameters.flag("truncate", True),
    )


def rope_by_layer_type(
    fields: Fields, defaults: dict[str, dict[str, Any]], head_dims: dict[str, int], max_positions: int
) -> dict[str, RopeConfig]:
    """The rope of each layer type from nested `rope_parameters` (Gemma). A type without an object is as in
    `defaults`; an object without a theta has that of `defaults`, as in transformers.
    """
    given = fields.get("rope_parameters") or {}
    if not isinstance(given, dict) or set(given) - {FULL, SLIDING}:
        raise fields.error("rope_parameters", f"must hold the objects {FULL} and {SLIDING} and nothing else")
    ropes = {}
    for layer_type, default in defaults.items():
        own = given.get(layer_type)
        if own is not None and not isinstance(own, dict):
            raise fields.error("rope_parameters", f"has {own!r} as {layer_type}; an object is wanted")
        parameters = dict(default) if own is None else {"rope_theta": default["rope_theta"], **own}
        section = Fields(parameters, f"{fields.where} rope_parameters {layer_type}")
        ropes[layer_type] = rope_config(section, head_dims[layer_type], max_positions)
    return ropes

"""YAML into frozen dataclasses, by their type hints: every problem is one line that names the field."""

import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from jaxspec.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Bounds of a number, in `Annotated`: `low` and `high` are allowed themselves, `above` is not."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value lies within the bounds; nan never does."""
        return (
            value == value
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def wanted(self) -> str:
        """The bounds in words."""
        if self.above is not None:
            return (
                f"more than {self.above:g}" if self.high is None else f"more than {self.above:g}, at most {self.high:g}"
            )
        if self.high is None:
            return f"at least {self.low:g}"
        return f"{self.low:.10g} to {self.high:.10g}"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, where plain YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merged = "tag:yaml.org,2002:merge"  # what comes by `<<` may be set again
        keys = [None if key.tag == merged else self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = next((at for at, key in enumerate(keys) if key is not None and key in keys[:at]), None)
        if twice is not None:
            mark = node.value[twice][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"{keys[twice]} is there twice", mark)
        return super().construct_mapping(node, deep)


def read_settings(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The dataclass `kind` from a YAML file, with `overrides` such as "optimizer.lr=1e-3" over it.

    Values of overrides are YAML too and typed by the field that they name. Raises InputError, one line, for a file that cannot be read,
    an unknown key (with the nearest known one), a missing field, a wrong type and a value out of range.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise InputError(f"{path}: cannot be read: {reason}") from error
    data = _parsed(text, str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no settings; sections such as {', '.join(_known(kind)[:3])} are wanted")
    for override in overrides:
        _override(kind, data, override)
    return _dataclass(kind, data, str(path), "")


def _override(kind: Any, data: dict[str, Any], override: str) -> None:
    """Puts one "a.b=value" into the parsed file; checks the value against the field's type first, to name the flag."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    where = f"--set {override}"
    if not equals or not all(keys):
        raise InputError(f"{where}: is not of the form section.field=value")
    at = data
    for depth, key in enumerate(keys):
        kind = _inner(kind)
        if is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            if key not in hints:
                raise _unknown(where, ".".join(keys[: depth + 1]), key, kind)
            kind = hints[key]
        elif get_origin(kind) is Mapping:
            kind = get_args(kind)[1]
        else:
            raise InputError(f"{where}: {'.'.join(keys[:depth])} has no fields of its own")
        if depth < len(keys) - 1:
            if not isinstance(at.get(key), dict):
                at[key] = {}
            at = at[key]
    value = _parsed(text, where)
    if not is_dataclass(_inner(kind)):
        _value(kind, value, where, name.strip())
    at[keys[-1]] = value


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        known = "" if isinstance(error, yaml.constructor.ConstructorError) else "is not YAML: "
        raise InputError(f"{where}{line}: {known}{problem}") from error


def _dataclass(kind: Any, data: Any, where: str, name: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(f"{where}: {name} is {data!r}; the fields of the section are wanted")
    hints = get_type_hints(kind, include_extras=True)
    for key in data:
        if key not in hints:
            raise _unknown(where, _joined(name, key), key, kind)
    for field in fields(kind):
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where}: {_joined(name, field.name)} is missing")
    given = {key: _value(hints[key], value, where, _joined(name, key)) for key, value in data.items()}
    try:
        return kind(**given)
    except InputError as error:
        raise InputError(f"{where}: {_joined(name, str(error))}") from error


def _value(kind: Any, data: Any, where: str, name: str) -> Any:
    """`data` as a value of the type `kind`: a dataclass, scalar, Literal, tuple, mapping, or one of these or None."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _value(arguments[0], data, where, name)
        for bounds in arguments[1:]:
            if value is not None and not bounds.holds(value):
                raise InputError(f"{where}: {name} is {value!r}; {bounds.wanted()} is wanted")
        return value
    if origin in (Union, types.UnionType):
        if data is None and types.NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _value(kind, data, where, name)
    if is_dataclass(kind):
        return _dataclass(kind, data, where, name)
    if origin is Literal:
        if isinstance(data, bool) or data not in arguments:
            raise InputError(f"{where}: {name} is {data!r}; one of {', '.join(map(str, arguments))} is wanted")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise InputError(f"{where}: {name} is {data!r}; a list is wanted")
        return tuple(_value(arguments[0], entry, where, f"{name}[{at}]") for at, entry in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise InputError(f"{where}: {name} is {data!r}; keys with values are wanted")
        return {
            _value(arguments[0], key, where, f"{name} key"): _value(arguments[1], value, where, _joined(name, str(key)))
            for key, value in data.items()
        }
    return _scalar(kind, data, where, name)


def _scalar(kind: type, data: Any, where: str, name: str) -> Any:
    if kind is float:
        if isinstance(data, str):  # YAML 1.1 takes 1e-3, without a point, for text
            try:
                return float(data)
            except ValueError:
                pass
        elif isinstance(data, int | float) and not isinstance(data, bool):
            return float(data)
    elif isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
        return data
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    raise InputError(f"{where}: {name} is {data!r}; {wanted} is wanted")


def _unknown(where: str, name: str, key: Any, kind: Any) -> InputError:
    near = difflib.get_close_matches(str(key), _known(kind), 1, 0.0)[0]
    return InputError(f"{where}: unknown key {name}; the nearest known one is {near}")


def _known(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _inner(kind: Any) -> Any:
    """Without Annotated and without the None of an optional field."""
    if get_origin(kind) is Annotated:
        return _inner(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return _inner(next(argument for argument in get_args(kind) if argument is not types.NoneType))
    return kind


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)

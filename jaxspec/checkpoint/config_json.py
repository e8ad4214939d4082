"""Frozen config dataclasses as JSON and back, by their type hints."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxspec.errors import InputError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """A dataclass of plain values, tuples and dataclasses as JSON values."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return [to_json(entry) for entry in value] if isinstance(value, tuple) else value


def from_json(kind: type[T], data: Any, where: str) -> T:
    """The dataclass `kind` that `to_json` made `data` from. Raises InputError, which names `where`, for anything else."""
    return _read(kind, data, where)


def _read(kind: Any, data: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and types.NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _read(kind, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise InputError(f"{where} is {data!r}; a list is wanted")
        return tuple(_read(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(data))
    if origin is Literal:
        if data not in arguments:
            raise InputError(f"{where} is {data!r}; supported: {', '.join(map(str, arguments))}")
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise InputError(f"{where} is {data!r}; {kind.__name__} is wanted")
    return data


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() - hints.keys():
        raise InputError(f"{where} is {data!r}; the fields of {kind.__name__} are wanted")
    try:
        return kind(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in data.items()})
    except TypeError as error:
        raise InputError(f"{where}: {error}") from error

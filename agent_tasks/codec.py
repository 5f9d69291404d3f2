"""Dataclasses to plain JSON and back: the form of the journal and of event payloads. Bytes travel as base64, paths as text."""

from __future__ import annotations

import base64
import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: object) -> Any:
    """Keys are the field names; enums become their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (Enum, Path)):
        return value.value if isinstance(value, Enum) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any) -> T:
    """The dataclass `kind` from what `to_json` made of it. Raises TypeError, ValueError or KeyError on anything else."""
    return _decode(kind, data)  # type: ignore[no-any-return]


def _decode(kind: Any, data: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        option = next(option for option in get_args(kind) if option is not type(None))
        return None if data is None else _decode(option, data)
    if get_origin(kind) is tuple:
        return tuple(_decode(get_args(kind)[0], item) for item in data)
    if kind is bytes:
        return base64.b64decode(data, validate=True)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: _decode(hints[field.name], data[field.name]) for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, (Path, Enum)):
        return kind(data)
    return data

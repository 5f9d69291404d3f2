"""Checks a tool's arguments against the part of JSON schema that tools use. Other keywords are left to the grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def violations(value: object, schema: object, where: str = "arguments") -> list[str]:
    """What is wrong with `value`, one sentence each, or nothing. Unknown properties are wrong unless the schema allows them."""
    return list(_violations(value, schema, where))


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in `type`, which may be one, several or none."""
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else tuple(types) if isinstance(types, list | tuple) else ()


def _violations(value: object, schema: object, where: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    types = types_of(schema)
    if types and not any(_is(value, name) for name in types):
        yield f"{where} is not of type {' or '.join(types)}"
        return
    if "enum" in schema and not any(_equal(value, item) for item in schema["enum"]):
        yield f"{where} is not one of {list(schema['enum'])}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{where} is longer than {schema['maxLength']} characters"
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _violations(item, schema.get("items"), f"{where}[{i}]")
    if isinstance(value, dict) and ("object" in types or "properties" in schema):
        yield from _object_violations(value, schema, where)


def _object_violations(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    for name, item in value.items():
        if name in properties:
            yield from _violations(item, properties[name], f"{where}.{name}")
        elif schema.get("additionalProperties", False) is False:
            yield f"{where}.{name} is not known"


def _is(value: object, name: str) -> bool:
    """JSON's own types: a boolean is no number."""
    return isinstance(value, _TYPES.get(name, ())) and (name == "boolean" or not isinstance(value, bool))


def _equal(value: object, item: object) -> bool:
    """Equality of JSON values: Python's own says that True is 1."""
    return value == item and isinstance(value, bool) == isinstance(item, bool)

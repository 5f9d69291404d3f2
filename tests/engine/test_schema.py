"""The check of tool arguments: one violation for each rule, none for what fits."""

from __future__ import annotations

from typing import Any

import pytest
from quadjet.engine.schema import violations

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 5},
        "line": {"type": "integer"},
        "mode": {"enum": ["r", 1]},
        "argv": {"type": "array", "items": {"type": "string"}},
        "where": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "any": {},
    },
    "required": ["path"],
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a"},
        {"path": "abcde", "line": -3, "mode": "r", "argv": [], "where": None, "any": [1, {"z": None}]},
        {"path": "", "mode": 1, "argv": ["a", "b"], "where": {"x": 1.5}},
    ],
)
def test_fits(arguments: dict[str, Any]) -> None:
    assert violations(arguments, SCHEMA) == []


@pytest.mark.parametrize(
    ("arguments", "violation"),
    [
        ({}, "arguments.path is missing"),
        ({"path": 1}, "arguments.path is not of type string"),
        ({"path": "abcdef"}, "arguments.path is longer than 5 characters"),
        ({"path": "a", "line": True}, "arguments.line is not of type integer"),
        ({"path": "a", "line": 1.0}, "arguments.line is not of type integer"),
        ({"path": "a", "line": "1"}, "arguments.line is not of type integer"),
        ({"path": "a", "mode": True}, "arguments.mode is not one of ['r', 1]"),
        ({"path": "a", "argv": "ls"}, "arguments.argv is not of type array"),
        ({"path": "a", "argv": ["ls", 1]}, "arguments.argv[1] is not of type string"),
        ({"path": "a", "where": {}}, "arguments.where.x is missing"),
        ({"path": "a", "where": []}, "arguments.where is not of type object or null"),
        ({"path": "a", "extra": 1}, "arguments.extra is not known"),
        ("path", "arguments is not of type object"),
    ],
)
def test_violates(arguments: object, violation: str) -> None:
    assert violations(arguments, SCHEMA) == [violation]


def test_unknown_properties_are_allowed_where_the_schema_says_so() -> None:
    assert violations({"a": 1}, {"type": "object", "additionalProperties": True}) == []

"""The extension's mirror of the wire protocol has the names of the original, no more and no fewer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import pytest
from quadjet.agent_tasks import task as tasks
from quadjet.agent_tasks.edits import make_hunks
from quadjet.agent_tasks.proposal import AcceptResult, Conflict
from quadjet.lsp import messages

MIRROR = (Path(__file__).parents[1] / "vscode-ext" / "src" / "protocol.ts").read_text("utf-8")

ROOT = Path("/shop")
CARD = tasks.Card("title", verified=True, evidence=(tasks.Evidence("ruff", passed=True),))
CHANGE = make_hunks(ROOT / "cart.py", b"a\n", b"b\n")
PROPOSAL = tasks.Proposal((CHANGE,))
SPEC = tasks.TaskSpec(tasks.TaskKind.CLEANUP, ROOT / "cart.py", ROOT, range=tasks.LineRange(1, 2))
TASK = tasks.Task("t1", SPEC, tasks.TaskState.PROPOSED, 0.0, card=CARD, proposal=PROPOSAL)
EVENT = tasks.TaskEvent("t1", 1, 0.0, "state", {"state": "queued"})
ACCEPTED = AcceptResult(TASK, conflicts=(Conflict(ROOT / "cart.py", "changed"),))

SHAPES: dict[str, dict[str, Any]] = {
    "Task": messages.describe_task(TASK),
    "LineRange": messages.describe_task(TASK)["range"],
    "Card": messages.describe_card(CARD),
    "Evidence": messages.describe_card(CARD)["evidence"][0],
    "Hunk": messages.describe_hunk(CHANGE.hunks[0]),
    "Proposal": messages.describe_proposal(PROPOSAL, ROOT),
    "ChangedFile": messages.describe_proposal(PROPOSAL, ROOT)["files"][0],
    "AcceptResult": messages.describe_accept(ACCEPTED),
    "Conflict": messages.describe_accept(ACCEPTED)["conflicts"][0],
    "TaskEvent": messages.describe_event(EVENT),
}
PARAMS = (messages.SendToAgent, messages.TaskParams, messages.SubscribeParams, messages.AcceptParams, messages.RejectParams)
ENUMS = (tasks.TaskKind, tasks.TaskState, tasks.NeedsYou, tasks.HunkState, tasks.ChangeKind)


def test_constants() -> None:
    mirrored = dict(re.findall(r"^export const (\w+) = (.+);$", MIRROR, re.MULTILINE))
    original = {name: value for name, value in vars(messages).items() if name.isupper() and isinstance(value, (str, int))}
    assert mirrored == {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in original.items()}


def test_every_method_is_among_the_constants() -> None:
    assert set(messages.METHODS) <= set(re.findall(r'"((?:agent|quadjet)/\w+)"', MIRROR))


@pytest.mark.parametrize("name", SHAPES)
def test_fields(name: str) -> None:
    assert _fields(name) == dict.fromkeys(SHAPES[name], True)


@pytest.mark.parametrize("kind", PARAMS, ids=lambda kind: kind.__name__)
def test_parameters(kind: type[attrs.AttrsInstance]) -> None:
    original = {_camel(field.name): field.default is attrs.NOTHING for field in attrs.fields(kind)}
    mirrored = _fields(kind.__name__)
    assert mirrored.keys() == original.keys()
    # The extension may always send what is optional, never leave out what is not.
    assert all(mirrored[name] for name, is_required in original.items() if is_required)


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_values(kind: type[StrEnum]) -> None:
    union = re.search(rf"^export type {kind.__name__} =([^;]+);", MIRROR, re.MULTILINE)
    assert union is not None
    assert re.findall(r'"([^"]+)"', union[1]) == [member.value for member in kind]


def _fields(name: str) -> dict[str, bool]:
    """Field of an interface -> whether it is required."""
    body = re.search(rf"^export interface {name} {{\n(.*?)^}}", MIRROR, re.MULTILINE | re.DOTALL)
    assert body is not None, f"protocol.ts has no interface {name}"
    found: Iterable[tuple[str, str]] = re.findall(r"^  (\w+)(\??): ", body[1], re.MULTILINE)
    return {field: not mark for field, mark in found}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)

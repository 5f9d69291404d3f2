from __future__ import annotations

from pathlib import Path

import pytest
from lsprotocol import types
from quadjet.agent_tasks.task import (
    Card,
    ChangeKind,
    Evidence,
    FileChange,
    Hunk,
    HunkState,
    LineRange,
    NeedsYou,
    Proposal,
    Task,
    TaskEvent,
    TaskKind,
    TaskSpec,
    TaskState,
)  # fmt: skip
from quadjet.lsp import messages
from quadjet.lsp.messages import AcceptParams, ParamsError, SendToAgent, SubscribeParams, TaskParams, decode

HUNK = Hunk("h1", Path("/r/a b.py"), 3, 10, 2, 10, 3, "x\r\ny\r\nz\r\n")
CARD = Card("t", True, "s", (Evidence("ruff", None, "ruff check", "no sandbox"),), {"line_count": 3}, ("n",), 2, 10, 4, 5, 1.5)
WIRE_HUNK = {
    "id": "h1", "uri": "file:///r/a%20b.py", "baseVersion": 3, "oldStart": 10, "oldLines": 2, "newStart": 10, "newLines": 3,
    "text": "x\r\ny\r\nz\r\n", "state": "pending",
}  # fmt: skip


def test_send_to_agent_with_everything() -> None:
    span = {"start": {"line": 1, "character": 2}, "end": {"line": 3, "character": 0}}
    params = decode(
        SendToAgent,
        {
            "kind": "triage",
            "uri": "file:///a",
            "range": span,
            "instruction": "i",
            "diagnostics": [{"range": span, "message": "m", "code": 7}],
        },
    )
    assert params.kind is TaskKind.TRIAGE
    assert params.range == types.Range(types.Position(1, 2), types.Position(3, 0))
    assert [(d.message, d.code) for d in params.diagnostics] == [("m", 7)]


def test_nulls_and_unknown_fields_are_no_fields() -> None:
    assert decode(
        SendToAgent, {"kind": "cleanup", "uri": "u", "range": None, "diagnostics": None, "x": {"jsonrpc": "2.0"}}
    ) == SendToAgent(TaskKind.CLEANUP, "u")
    assert decode(SubscribeParams, None) == SubscribeParams(None, 0)


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        (SendToAgent, {"kind": "bogus", "uri": "u"}, "known are cleanup, triage @ params.kind"),
        (SendToAgent, {"uri": 5}, "got int @ params.uri"),
        (SendToAgent, {"kind": "cleanup", "uri": "u", "range": {"start": {}}}, "params.range"),
        (SendToAgent, {"kind": "cleanup", "uri": "u", "diagnostics": 5}, "params.diagnostics"),
        (TaskParams, {}, "taskId is missing"),
        (TaskParams, {"taskId": 5}, "expected a text, got int @ params.taskId"),
        (TaskParams, ["x"], "must be an object"),
        (TaskParams, "x", "must be an object"),
        (SubscribeParams, {"afterSeq": -1}, "afterSeq"),
        (SubscribeParams, {"afterSeq": True}, "got bool @ params.afterSeq"),
        (SubscribeParams, {"afterSeq": "1"}, "got str @ params.afterSeq"),
        (AcceptParams, {"taskId": "x", "hunkIds": "abc"}, "array of texts @ params.hunkIds"),
        (AcceptParams, {"taskId": "x", "hunkIds": [1]}, "array of texts @ params.hunkIds"),
    ],
)
def test_wrong_params_are_named(kind: type[TaskParams], params: object, text: str) -> None:
    with pytest.raises(ParamsError) as error:
        decode(kind, params)
    assert text in str(error.value)


def test_shape_of_a_hunk() -> None:
    assert messages.describe_hunk(HUNK) == WIRE_HUNK


def test_shape_of_a_task() -> None:
    spec = TaskSpec(TaskKind.CLEANUP, Path("/r/a b.py"), Path("/r"), LineRange(2, 4), (), "please")
    change = FileChange(HUNK.path, ChangeKind.MODIFY, b"", b"", "utf-8", (HUNK,), "a build script")
    task = Task("t1", spec, TaskState.NEEDS_YOU, 5.0, NeedsYou.CONFLICT, "m", CARD, Proposal((change,)), 2, 9)
    assert messages.describe_task(task) == {
        "taskId": "t1", "kind": "cleanup", "uri": "file:///r/a%20b.py", "rootUri": "file:///r", "range": {"first": 2, "last": 4},
        "instruction": "please", "state": "needs-you", "reason": "conflict", "message": "m", "created": 5.0, "turns": 2,
        "lastSeq": 9, "card": messages.describe_card(CARD), "hunkCounts": {"pending": 1},
    }  # fmt: skip


def test_shape_of_a_proposal() -> None:
    change = FileChange(HUNK.path, ChangeKind.MODIFY, b"a\n", b"b\n", "utf-8", (HUNK,), "a build script")
    wire = messages.describe_proposal(Proposal((change,)), Path("/r"))
    assert wire["hunks"] == [WIRE_HUNK]
    (file,) = wire["files"]
    assert "+x\r\n+y\r\n" in file.pop("diff")
    assert file == {"uri": "file:///r/a%20b.py", "kind": "modify", "flagged": "a build script"}
    assert messages.describe_proposal(None, Path("/r")) == {"hunks": [], "files": []}


def test_shape_of_a_card() -> None:
    assert messages.describe_card(CARD) == {
        "title": "t", "verified": True, "summary": "s", "findings": {"line_count": 3}, "notes": ["n"], "turns": 2,
        "evidence": [{"name": "ruff", "passed": None, "command": "ruff check", "detail": "no sandbox"}],
        "promptTokens": 10, "cachedTokens": 4, "completionTokens": 5, "elapsedS": 1.5,
    }  # fmt: skip


def test_shape_of_events_with_the_journals_cards_and_hunks() -> None:
    from quadjet.agent_tasks.codec import to_json

    def data(kind: str, fields: dict[str, object]) -> object:
        event = messages.describe_event(TaskEvent("t1", 4, 2.5, kind, fields))
        assert {name: event[name] for name in ("taskId", "seq", "time", "type")} == {
            "taskId": "t1",
            "seq": 4,
            "time": 2.5,
            "type": kind,
        }
        return event["data"]

    assert data("hunks", {"hunks": to_json((HUNK,))}) == {"hunks": [WIRE_HUNK]}
    assert data("card", {"card": to_json(CARD)}) == {"card": messages.describe_card(CARD)}
    assert data("turn", {"number": 1, "prompt_tokens": 5}) == {"number": 1, "promptTokens": 5}
    assert data("tool_call", {"id": "c", "name": "edit", "arguments": {"old_text": 1}}) == {
        "id": "c", "name": "edit", "arguments": {"old_text": 1},
    }  # fmt: skip
    assert data("state", {"state": HunkState.PENDING}) == {"state": "pending"}

"""Every name and shape on the wire that is not LSP's own: methods under `agent/`, the one command, and what they carry.

Field names are written here as in Python and travel in camelCase. `vscode-ext/src/protocol.ts` mirrors this file.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override
from lsprotocol import converters, types

from ..agent_tasks.edits import diff_text
from ..agent_tasks.proposal import AcceptResult
from ..agent_tasks.task import Card, Evidence, FileChange, Hunk, Proposal, Task, TaskEvent, TaskKind
from .protocol import Json

PROTOCOL_VERSION = 1

SEND_TO_AGENT = "quadjet.sendToAgent"
"""workspace/executeCommand with one SendToAgent; answers {taskId} at once."""

SUBSCRIBE = "agent/subscribe"
TASKS = "agent/tasks"
TASK = "agent/task"
HUNKS = "agent/hunks"
ACCEPT = "agent/accept"
REJECT = "agent/reject"
STOP_TASK = "agent/stop"
PAUSE = "agent/pause"
RESUME = "agent/resume"
STATUS = "agent/status"
STOP_DAEMON = "quadjet/stop"
"""Ends the daemon after the answer; tasks are parked and go on at the next start."""
METHODS = (SUBSCRIBE, TASKS, TASK, HUNKS, ACCEPT, REJECT, STOP_TASK, PAUSE, RESUME, STATUS, STOP_DAEMON)

TASK_EVENT = "agent/taskEvent"
"""Notification {taskId, seq, time, type, data} to sessions that subscribed."""

REQUEST_FAILED = -32803
"""LSP's code for a request that was well formed but could not be done; data is {fix}."""


def capabilities() -> dict[str, Any]:
    """What `initialize` tells of us under capabilities.experimental."""
    return {
        "quadjet": {
            "protocolVersion": PROTOCOL_VERSION,
            "kinds": [kind.value for kind in TaskKind],
            "methods": list(METHODS),
            "notifications": [TASK_EVENT],
        }
    }


@attrs.frozen
class SendToAgent:
    """`range` in the negotiated encoding; without one the whole file is meant."""

    kind: TaskKind
    uri: str
    range: types.Range | None = None
    diagnostics: Sequence[types.Diagnostic] = ()
    instruction: str = ""


@attrs.frozen
class NoParams:
    pass


@attrs.frozen
class TaskParams:
    task_id: str


@attrs.frozen
class SubscribeParams:
    """Without `task_id`: all tasks, those to come included."""

    task_id: str | None = None
    after_seq: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.le(2**31 - 1)])


@attrs.frozen
class AcceptParams:
    """Without `hunk_ids`: all pending hunks."""

    task_id: str
    hunk_ids: Sequence[str] | None = None


@attrs.frozen
class RejectParams:
    task_id: str
    hunk_ids: Sequence[str] | None = None
    comment: str = ""


class ParamsError(ValueError):
    """What a client sent does not have the shape of the method's parameters."""


P = TypeVar("P", SendToAgent, NoParams, TaskParams, SubscribeParams, AcceptParams, RejectParams)


def decode(kind: type[P], params: object) -> P:
    """A method's parameters. Unknown fields and nulls are ignored; ParamsError names what is missing or of the wrong type."""
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ParamsError("params must be an object")
    given = {name: value for name, value in params.items() if value is not None}
    try:
        return _converter().structure(given, kind)
    except Exception as error:  # cattrs raises whatever its hooks raise
        text = "; ".join(cattrs.transform_error(error, path="params", format_exception=_explain))
        for field in attrs.fields(kind):
            text = text.replace(field.name, _camel(field.name))
        raise ParamsError(text) from None


def describe_task(task: Task) -> dict[str, Any]:
    """Task: {taskId, kind, uri, rootUri, range, instruction, state, reason, message, created, turns, lastSeq, card, hunkCounts}.

    `range` is {first, last}, lines counted from 1; `created` is seconds since the epoch; `hunkCounts` is {state: count}.
    """
    spec = task.spec
    counts: dict[str, int] = {}
    for hunk in task.proposal.hunks if task.proposal else ():
        counts[hunk.state.value] = counts.get(hunk.state.value, 0) + 1
    return {
        "taskId": task.id,
        "kind": spec.kind.value,
        "uri": spec.path.as_uri(),
        "rootUri": spec.root.as_uri(),
        "range": {"first": spec.range.first, "last": spec.range.last} if spec.range else None,
        "instruction": spec.instruction,
        "state": task.state.value,
        "reason": task.reason.value if task.reason else None,
        "message": task.message,
        "created": task.created,
        "turns": task.turns,
        "lastSeq": task.last_seq,
        "card": describe_card(task.card) if task.card else None,
        "hunkCounts": counts,
    }


def describe_card(card: Card) -> dict[str, Any]:
    """Card: {title, verified, summary, evidence, findings, notes, turns, promptTokens, cachedTokens, completionTokens, elapsedS}.

    The names inside `findings` belong to the kind and travel as they are.
    """
    return {
        **{_camel(field): getattr(card, field) for field in _PLAIN_CARD_FIELDS},
        "evidence": [_describe_evidence(item) for item in card.evidence],
        "findings": dict(card.findings),
        "notes": list(card.notes),
    }


def describe_hunk(hunk: Hunk) -> dict[str, Any]:
    """Hunk: {id, uri, baseVersion, oldStart, oldLines, newStart, newLines, text, state}; lines counted from 1."""
    return {
        "id": hunk.id,
        "uri": hunk.path.as_uri(),
        "baseVersion": hunk.base_version,
        "oldStart": hunk.old_start,
        "oldLines": hunk.old_lines,
        "newStart": hunk.new_start,
        "newLines": hunk.new_lines,
        "text": hunk.text,
        "state": hunk.state.value,
    }


def describe_proposal(proposal: Proposal | None, root: Path) -> dict[str, Any]:
    """{hunks: [Hunk], files: [{uri, kind, flagged, diff}]}, both empty without a proposal.

    `flagged`: why to look twice, or empty. `diff`: against the snapshot, in unified form, with paths relative to `root`.
    """
    changes = proposal.changes if proposal else ()
    return {
        "hunks": [describe_hunk(hunk) for change in changes for hunk in change.hunks],
        "files": [_describe_change(change, root) for change in changes],
    }


def _describe_change(change: FileChange, root: Path) -> dict[str, Any]:
    return {"uri": change.path.as_uri(), "kind": change.kind.value, "flagged": change.flagged, "diff": diff_text(change, root)}


def describe_accept(result: AcceptResult) -> dict[str, Any]:
    """{task, applied: [hunk id], conflicts: [{uri, message}]}."""
    return {
        "task": describe_task(result.task),
        "applied": list(result.applied),
        "conflicts": [{"uri": item.path.as_uri(), "message": item.message} for item in result.conflicts],
    }


def describe_event(event: TaskEvent) -> dict[str, Any]:
    """TaskEvent: {taskId, seq, time, type, data}. Cards and hunks inside `data` have the shapes above."""
    return {
        "taskId": event.task_id,
        "seq": event.seq,
        "time": event.time,
        "type": event.type,
        "data": {_camel(key): _describe_payload(key, value) for key, value in event.data.items()},
    }


_PLAIN_CARD_FIELDS = (
    "title", "verified", "summary", "turns", "prompt_tokens", "cached_tokens", "completion_tokens", "elapsed_s",
)  # fmt: skip


def _describe_evidence(item: Evidence) -> dict[str, Any]:
    return {"name": item.name, "passed": item.passed, "command": item.command, "detail": item.detail}


def _describe_payload(key: str, value: Json) -> Json:
    """The journal holds cards and hunks as JSON with the names of their fields."""
    if key == "card" and isinstance(value, Mapping):
        return {_camel(name): item for name, item in value.items()}
    if key == "hunks":
        return [_describe_journaled_hunk(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _describe_journaled_hunk(hunk: Mapping[str, Any]) -> dict[str, Any]:
    wire = {_camel(name): item for name, item in hunk.items() if name != "path"}
    return {**wire, "uri": Path(hunk["path"]).as_uri()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


@functools.cache
def _converter() -> cattrs.Converter:
    converter = converters.get_converter()
    # cattrs would turn 5 into "5" and "yes" into an int's error far from here: a wrong type is the client's mistake.
    for plain in (str, int):
        converter.register_structure_hook(plain, _strict)
    converter.register_structure_hook_func(lambda kind: kind == Sequence[str], _texts)
    for kind in (SendToAgent, NoParams, TaskParams, SubscribeParams, AcceptParams, RejectParams):
        renames = {field.name: override(rename=_camel(field.name)) for field in attrs.fields(kind)}
        converter.register_structure_hook(kind, make_dict_structure_fn(kind, converter, **renames))  # type: ignore[arg-type]
    return converter


def _strict(value: Json, kind: type) -> Json:
    if issubclass(kind, Enum):  # enums of texts and numbers come here too, as subclasses
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"expected {'a text' if kind is str else 'a whole number'}, got {type(value).__name__}")
    return value


def _texts(value: Json, kind: object) -> list[str]:
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise TypeError("expected an array of texts")
    return value


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, ValueError) and isinstance(kind, type) and issubclass(kind, Enum):
        return f"{error.args[0]}; known are {', '.join(str(item.value) for item in kind)}"
    return str(error)

"""A background task as plain data: what was asked, where it stands, what happened, what it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class TaskKind(StrEnum):
    CLEANUP = "cleanup"
    TRIAGE = "triage"


class TaskState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    WAITING_TOOL = "waiting-tool"
    NEEDS_YOU = "needs-you"
    PAUSED = "paused"
    VERIFYING = "verifying"
    PROPOSED = "proposed"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({TaskState.ACCEPTED, TaskState.REJECTED, TaskState.FAILED, TaskState.STOPPED})
_ACTIVE = frozenset({TaskState.RUNNING, TaskState.WAITING_TOOL, TaskState.VERIFYING})

TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.QUEUED: frozenset({TaskState.RUNNING, TaskState.PAUSED}),
    TaskState.RUNNING: frozenset({TaskState.WAITING_TOOL, TaskState.NEEDS_YOU, TaskState.PAUSED, TaskState.VERIFYING}),
    TaskState.WAITING_TOOL: frozenset({TaskState.RUNNING}),
    TaskState.NEEDS_YOU: frozenset(
        {TaskState.RUNNING, TaskState.QUEUED, TaskState.PROPOSED, TaskState.ACCEPTED, TaskState.REJECTED}
    ),
    TaskState.PAUSED: frozenset({TaskState.RUNNING, TaskState.QUEUED}),
    TaskState.VERIFYING: frozenset({TaskState.RUNNING, TaskState.PROPOSED}),
    TaskState.PROPOSED: frozenset({TaskState.ACCEPTED, TaskState.REJECTED, TaskState.NEEDS_YOU, TaskState.QUEUED}),
    TaskState.ACCEPTED: frozenset(),
    TaskState.REJECTED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.STOPPED: frozenset(),
}
"""Beside these, FAILED and STOPPED follow every state that is not final."""


def can_follow(before: TaskState, after: TaskState) -> bool:
    if before.is_final:
        return False
    return after in (TaskState.FAILED, TaskState.STOPPED) or after in TRANSITIONS[before]


class NeedsYou(StrEnum):
    """Why a task is parked."""

    APPROVAL = "approval"
    QUESTION = "question"
    STUCK = "stuck"
    BUDGET = "budget"
    RESTART = "restart"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class LineRange:
    """Lines first..last, both included, counted from 1."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A finding of a linter, compiler or test that the sender saw. `line` counts from 1."""

    path: str
    line: int
    message: str
    source: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a person asked for. `path` is the absolute file or folder clicked; `root` the workspace folder that holds it."""

    kind: TaskKind
    path: Path
    root: Path
    range: LineRange | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One check and how it ended. `passed` None: it could not be run, and `detail` says why."""

    name: str
    passed: bool | None
    command: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """The honest result of a task. `verified` is True only if every check of the kind's gate passed in the worktree."""

    title: str
    verified: bool
    summary: str = ""
    evidence: tuple[Evidence, ...] = ()
    findings: dict[str, Any] = field(default_factory=dict)
    """Facts of the kind: triage gives test, exception, message, file, line, cause; cleanup gives counts before and after."""
    notes: tuple[str, ...] = ()
    """What limits the result: "not verified: no sandbox", flagged files, checks that were left out."""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0


class HunkState(StrEnum):
    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One changed region of one file: `old_lines` lines of the snapshot from `old_start` (counted from 1) become `text`.

    old_lines 0 inserts before line old_start.
    """

    id: str
    path: Path
    """Absolute path in the user's tree."""
    base_version: int | None
    """Document version that the snapshot took from an editor, None if it came from disk."""
    old_start: int
    old_lines: int
    new_start: int
    new_lines: int
    text: str
    """The new lines, decoded, with the file's own line endings."""
    state: HunkState = HunkState.PENDING


class ChangeKind(StrEnum):
    MODIFY = "modify"
    CREATE = "create"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a proposal: bytes in the snapshot, bytes the agent left, and the hunks between them."""

    path: Path
    kind: ChangeKind
    base: bytes | None
    """None for a created file."""
    proposed: bytes | None
    """None for a deleted file."""
    encoding: str
    hunks: tuple[Hunk, ...]
    flagged: str = ""
    """Why the file deserves a second look (conftest.py, a build script, ...), or empty."""


@dataclass(frozen=True, slots=True)
class Proposal:
    changes: tuple[FileChange, ...]

    @property
    def hunks(self) -> tuple[Hunk, ...]:
        return tuple(hunk for change in self.changes for hunk in change.hunks)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One entry of a task's journal. `seq` counts from 1 without gaps per task; `time` is seconds since the epoch.

    type and data:
      state       {state, reason, message}
      turn        {number, prompt_tokens, cached_tokens, completion_tokens, prefill_s, decode_s}
      text        {text}                        what the model wrote outside a call
      tool_call   {id, name, arguments}
      tool_result {id, name, ok, text}
      progress    {message, done, total}        long work of the harness (model load, snapshot, tests)
      card        {card}
      hunks       {hunks}                       the proposal, and again after each accept or reject
      comment     {text, hunk_ids}              what a person wrote when rejecting
    """

    task_id: str
    seq: int
    time: float
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it stands. Replaced, never changed in place."""

    id: str
    spec: TaskSpec
    state: TaskState
    created: float
    reason: NeedsYou | None = None
    message: str = ""
    """One line for a person: what it is doing, why it is parked or failed."""
    card: Card | None = None
    proposal: Proposal | None = None
    turns: int = 0
    last_seq: int = 0

"""What an editor shows of the tasks it sent: a progress bar while one works, a message when it is done, failed or needs you."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lsprotocol import types

from ..agent_tasks.task import NeedsYou, Task, TaskEvent, TaskState
from .progress import Spawn, TaskProgress
from .protocol import ConnectionProtocol

_WORKING = frozenset({TaskState.QUEUED, TaskState.RUNNING, TaskState.WAITING_TOOL, TaskState.VERIFYING})


class TaskNotices:
    def __init__(self, protocol: ConnectionProtocol, spawn: Spawn) -> None:
        self._protocol = protocol
        self._progress = TaskProgress(protocol, spawn)
        self._working: dict[str, bool] = {}
        """For each task shown here, whether it worked when last heard of: what a person does to it afterwards is no news."""
        self.shows_progress = False

    def own(self, task: Task, *, is_new: bool = False) -> None:
        """Show this task from here on. `is_new`: it was sent just now, and how it ended is news even if it has."""
        self._working[task.id] = task.state in _WORKING
        self._show_progress(task, task.message)
        if is_new and task.state not in _WORKING:
            self._show_message(task, task.state, task.reason, task.message)

    def owns(self, task_id: str) -> bool:
        return task_id in self._working

    def task_of(self, token: int | str) -> str | None:
        """The task whose bar has this token."""
        return self._progress.task_of(token)

    def publish(self, task: Task, event: TaskEvent) -> None:
        """An event of a task shown here."""
        if event.type == "progress":
            self._show_progress(task, f"{event.data.get('message', '')}{_share(event.data)}")
        elif event.type == "turn":
            self._show_progress(task, f"turn {event.data.get('number', task.turns)}")
        elif event.type == "state":
            self._on_state(task, event)

    def close(self) -> None:
        self._progress.close()

    def _on_state(self, task: Task, event: TaskEvent) -> None:
        state = TaskState(event.data["state"])
        was_working, self._working[task.id] = self._working[task.id], state in _WORKING
        if state in _WORKING:
            # "running" between two turns says less than the turn that is shown.
            if message := event.data.get("message") or ("" if was_working else state.value):
                self._show_progress(task, message)
            return
        self._progress.end(task.id, state.value)
        if was_working:
            self._show_message(task, state, event.data.get("reason"), event.data.get("message", ""))

    def _show_progress(self, task: Task, message: str) -> None:
        if self.shows_progress and task.state in _WORKING:
            self._progress.show(task.id, _title(task), message)

    def _show_message(self, task: Task, state: TaskState, reason: str | None, text: str) -> None:
        if state is TaskState.PROPOSED:
            kind, what = types.MessageType.Info, f"done: {task.card.title if task.card else text}"
        elif state is TaskState.NEEDS_YOU and reason != NeedsYou.RESTART:
            kind, what = types.MessageType.Warning, f"needs you ({reason}): {text}"
        elif state is TaskState.FAILED:
            kind, what = types.MessageType.Error, f"failed: {text}"
        else:
            return
        self._protocol.notify(types.WINDOW_SHOW_MESSAGE, types.ShowMessageParams(kind, f"{_title(task)}: {what}"))


def _share(data: Mapping[str, Any]) -> str:
    """How far a step is: counts that a person can read as such, else a percentage."""
    done, total = data.get("done"), data.get("total")
    if not total or done is None:
        return ""
    return f" ({done}/{total})" if total < 1000 else f" ({100 * done // total} %)"


def _title(task: Task) -> str:
    return f"Quadjet {task.spec.kind} {task.spec.path.name}"

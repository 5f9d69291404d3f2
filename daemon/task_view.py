"""Tasks as a person watches them: a live line each on a terminal, a line per change in a pipe; both on stderr."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ..agent_tasks.card import card_text
from ..agent_tasks.codec import from_json
from ..agent_tasks.task import Card
from ..agent_tasks.text import neutralise
from . import cli_output as out
from .task_client import IN_PROGRESS, TaskClient

_MAX_CHARS = 100
_MAX_PLAIN_CHARS = 300
_PLAIN_STEP_S = 10.0
_MARKS = {"proposed": "✓", "accepted": "✓", "rejected": "·", "failed": "✗", "stopped": "✗", "needs-you": "!", "paused": "‖"}
_SNAKE = re.compile(r"(?<=[a-z])(?=[A-Z])")


async def follow(client: TaskClient, titles: dict[str, str]) -> None:
    """Show these tasks, named by their ids, until none of them is in progress."""
    with TaskView(titles) as view:
        reminder = asyncio.create_task(view.remind())
        try:
            await client.watch(list(titles), view.show)
        finally:
            reminder.cancel()


class TaskView:
    """Feed it every event; it shows the tasks that were named to it. Use as a context manager."""

    def __init__(self, titles: dict[str, str], silence_s: float = 30.0) -> None:
        self._titles = titles
        self._silence_s = silence_s
        self._states = dict.fromkeys(titles, "queued")
        self._messages = dict.fromkeys(titles, "")
        self._said: dict[str, tuple[str, float]] = {}
        self._spinner = Spinner("dots")
        self._start = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._live = Live(get_renderable=self._table, console=Console(stderr=True), refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Take in one agent/taskEvent."""
        task_id, data = event["taskId"], event["data"]
        message = _describe(event["type"], data)
        if event["type"] == "state":
            self._states[task_id] = data["state"]
            if self._live is None:
                message = f"{data['state']}: {message}" if message else data["state"]
        if message:
            limit = _MAX_CHARS if self._live else _MAX_PLAIN_CHARS
            self._messages[task_id] = neutralise(message).replace("\n", " ")[:limit]
            if self._live is None:
                self._say(task_id, is_step=event["type"] == "progress")

    async def remind(self) -> None:
        """In a pipe: repeat after a long silence what a task is at, until cancelled. One answer of a model can take minutes."""
        while True:
            await asyncio.sleep(self._silence_s)
            for task_id, state in self._states.items():
                when = self._said.get(task_id, ("", self._start))[1]
                if self._live is None and state in IN_PROGRESS and time.monotonic() - when >= self._silence_s:
                    self._said[task_id] = ("", time.monotonic())
                    out.say(f"[{time.monotonic() - self._start:5.1f} s] {self._titles[task_id]}: still {state}")

    def _say(self, task_id: str, *, is_step: bool) -> None:
        """In a pipe: steps of the same work at most every few seconds."""
        label = self._messages[task_id].partition(":")[0]
        before, when = self._said.get(task_id, ("", 0.0))
        if is_step and label == before and time.monotonic() - when < _PLAIN_STEP_S:
            return
        self._said[task_id] = (label, time.monotonic())
        out.say(f"[{time.monotonic() - self._start:5.1f} s] {self._titles[task_id]}: {self._messages[task_id]}")

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for task_id, title in self._titles.items():
            state = self._states[task_id]
            mark = self._spinner if state in IN_PROGRESS else Text(_MARKS.get(state, " "))
            grid.add_row(
                mark, Text(title, style="bold"), Text(state), Text(self._messages[task_id], no_wrap=True, overflow="ellipsis")
            )
        grid.add_row("", Text(f"{time.monotonic() - self._start:.0f} s", style="dim"))
        return grid


def _share(done: int, total: int) -> str:
    """Small counts as they are, large ones as a percentage: they are bytes or values, which say nothing to a person."""
    if not total:
        return ""
    return f": {done / total:.0%}" if total > 1000 else f": {done} of {total}"


def _describe(kind: str, data: dict[str, Any]) -> str:
    """One line for an event, empty for those that say nothing to a person."""
    if kind == "state":
        return str(data.get("message") or "")
    if kind == "progress":
        return f"{data['message']}{_share(data.get('done', 0), data.get('total', 0))}"
    if kind == "turn":
        return f"turn {data['number']}: {data.get('promptTokens', 0)} tokens read, {data.get('completionTokens', 0)} written"
    if kind == "tool_call":
        return f"{data['name']} {json.dumps(data['arguments'], ensure_ascii=False)}"
    if kind == "tool_result":
        return "" if data["ok"] else f"{data['name']} failed: {data['text']}"
    return ""


def show_task(task: dict[str, Any]) -> None:
    """Where a task stands, and its card if it has one. `task` has the protocol's shape."""
    reason = f", {task['reason']}" if task["reason"] else ""
    out.result(f"{task['kind']} {out.path_of(task['uri'])} ({task['taskId']}): {task['state']}{reason}")
    if task["card"] is None:
        out.result(f"  {task['message']}")
    else:
        card = {_SNAKE.sub("_", name).lower(): value for name, value in task["card"].items()}
        out.result(card_text(from_json(Card, card)).rstrip("\n"))


def show_proposal(proposal: dict[str, Any]) -> None:
    """The diffs of a proposal, in the protocol's shape {hunks, files}."""
    for file in proposal["files"]:
        if file["flagged"]:
            out.say(f"look twice at {out.path_of(file['uri'])}: {file['flagged']}")
        out.diff(file["diff"])

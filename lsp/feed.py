"""The journals of tasks, sent to one client in order: first what it missed, then live, without gap or duplicate.

A client that reads slowly gets nothing pushed: what it missed is read from the journal once it caught up, so no queue grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..agent_tasks.task import TaskEvent
from .framing import ConnectionWriter

PAGE_EVENTS = 32
"""Events read from the journal at a time: a replay of a long task must not be in memory whole, once for each client."""

Journal = Callable[[str, int, int], Awaitable[list[TaskEvent]]]
"""(task id, seq, limit) -> the events after seq, at most limit."""


@dataclass(slots=True)
class _Cursor:
    sent: int


class EventFeed:
    def __init__(self, journal: Journal, send: Callable[[TaskEvent], None], writer: ConnectionWriter) -> None:
        self._journal = journal
        self._send = send
        self._writer = writer
        self._cursors: dict[str, _Cursor] = {}
        self._takes_new_tasks = False
        self._lagging: dict[str, None] = {}
        self._wake = asyncio.Event()

    def subscribe(self, task_id: str, after_seq: int) -> None:
        """Everything of one task after `after_seq`. Subscribing again starts again from there."""
        self._cursors[task_id] = _Cursor(after_seq)
        self._fall_back(task_id)

    def subscribe_new_tasks(self) -> None:
        """Tasks not subscribed so far are, from their first event."""
        self._takes_new_tasks = True

    def publish(self, event: TaskEvent) -> None:
        """A live event of any task."""
        cursor = self._cursors.get(event.task_id)
        if cursor is None:
            if not self._takes_new_tasks:
                return
            cursor = self._cursors[event.task_id] = _Cursor(0)
        if event.seq <= cursor.sent:
            return
        if event.seq == cursor.sent + 1 and event.task_id not in self._lagging and not self._writer.is_behind:
            self._deliver(cursor, event)
        else:
            self._fall_back(event.task_id)

    async def run(self) -> None:
        """Replays for whoever fell behind, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._lagging:
                await self._writer.drained()
                await self._catch_up(next(iter(self._lagging)))

    async def _catch_up(self, task_id: str) -> None:
        # Taken off first: an event published during the read below is not in its result and puts the task back.
        del self._lagging[task_id]
        cursor = self._cursors[task_id]
        page = await self._journal(task_id, cursor.sent, PAGE_EVENTS)
        for event in page:
            if self._cursors[task_id] is not cursor:
                return  # subscribed anew meanwhile
            if event.seq > cursor.sent:
                self._deliver(cursor, event)
            if self._writer.is_behind:
                await self._writer.drained()
        if len(page) == PAGE_EVENTS:
            self._fall_back(task_id)

    def _deliver(self, cursor: _Cursor, event: TaskEvent) -> None:
        cursor.sent = event.seq
        self._send(event)

    def _fall_back(self, task_id: str) -> None:
        self._lagging[task_id] = None
        self._wake.set()

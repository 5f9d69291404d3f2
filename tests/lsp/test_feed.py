"""Replay and live events on a real connection whose other end reads when the test says so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quadjet.agent_tasks.task import TaskEvent
from quadjet.lsp.feed import EventFeed
from quadjet.lsp.framing import HIGH_WATER_BYTES, ConnectionWriter

SIZE = 100_000


class Line:
    """A journal, a feed on it, and what the feed has sent."""

    def __init__(self, writer: ConnectionWriter) -> None:
        self.journal: dict[str, list[TaskEvent]] = {}
        self.sent: list[tuple[str, int]] = []
        self.progressed = asyncio.Event()
        self.writer = writer
        self.feed = EventFeed(self.read, self.send, writer)

    async def read(self, task_id: str, after: int, limit: int) -> list[TaskEvent]:
        await asyncio.sleep(0)
        return self.journal[task_id][after : after + limit]

    def send(self, event: TaskEvent) -> None:
        self.sent.append((event.task_id, event.seq))
        self.writer.write(bytes(SIZE))
        self.progressed.set()

    def happen(self, task_id: str, count: int = 1) -> None:
        events = self.journal.setdefault(task_id, [])
        for _ in range(count):
            events.append(TaskEvent(task_id, len(events) + 1, 0.0, "text", {}))
            self.feed.publish(events[-1])

    async def sent_all(self, *expected: tuple[str, int]) -> None:
        async with asyncio.timeout(10):
            while len(self.sent) < len(expected):
                self.progressed.clear()
                await self.progressed.wait()
        assert sorted(self.sent) == sorted(expected)


@asynccontextmanager
async def line() -> AsyncIterator[tuple[Line, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, stream = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        found = Line(ConnectionWriter(stream))
        running = asyncio.create_task(found.feed.run())
        yield found, theirs
        running.cancel()
        stream.transport.abort()


def seqs(task_id: str, first: int, last: int) -> list[tuple[str, int]]:
    return [(task_id, seq) for seq in range(first, last + 1)]


async def test_nothing_is_sent_unasked() -> None:
    async with line() as (feed, _):
        feed.happen("a", 3)
        assert feed.sent == []


async def test_replay_then_live_without_gap_or_duplicate() -> None:
    async with line() as (feed, _):
        feed.happen("a", 5)
        feed.feed.subscribe("a", 2)
        feed.happen("a", 3)  # while the replay has not begun
        await asyncio.sleep(0)
        feed.happen("a", 2)  # while it reads the journal
        await feed.sent_all(*seqs("a", 3, 10))
        feed.happen("a")
        assert feed.sent == seqs("a", 3, 11)


async def test_tasks_to_come_start_at_their_first_event() -> None:
    async with line() as (feed, _):
        feed.happen("old", 2)
        feed.feed.subscribe("old", 2)
        feed.feed.subscribe_new_tasks()
        feed.happen("new", 2)
        feed.happen("old")
        await feed.sent_all(("new", 1), ("new", 2), ("old", 3))


async def test_subscribing_again_starts_again() -> None:
    async with line() as (feed, _):
        feed.happen("a", 3)
        feed.feed.subscribe("a", 0)
        await feed.sent_all(*seqs("a", 1, 3))
        feed.feed.subscribe("a", 1)
        await feed.sent_all(*seqs("a", 1, 3), *seqs("a", 2, 3))


async def test_a_slow_reader_gets_everything_later_and_little_is_held_for_it() -> None:
    async with line() as (feed, theirs):
        feed.feed.subscribe_new_tasks()
        count = 100
        for _ in range(count):
            feed.happen("a")
            await asyncio.sleep(0)
        assert len(feed.sent) < count
        assert len(feed.sent) * SIZE < HIGH_WATER_BYTES + 4 * SIZE + 2**20  # what the kernel's buffers take comes on top
        loop = asyncio.get_running_loop()
        received = 0
        while received < count * SIZE:
            received += len(await loop.sock_recv(theirs, 2**20))
        assert feed.sent == seqs("a", 1, count)

"""The journal: one sqlite file with tasks, events, transcripts and checkpoints. All access runs on one thread, in order.

A write that fails (full disk) is kept and goes in with the next one, so a task's events have no gaps on disk either.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..engine.chat import Message
from .codec import from_json, to_json
from .errors import TaskError
from .task import Task, TaskEvent

T = TypeVar("T")

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE tasks (id TEXT PRIMARY KEY, created REAL NOT NULL, body TEXT NOT NULL) STRICT;
CREATE TABLE events (task_id TEXT NOT NULL, seq INTEGER NOT NULL, time REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (task_id, seq)) STRICT, WITHOUT ROWID;
CREATE TABLE messages (task_id TEXT NOT NULL, position INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (task_id, position)) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (task_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
"""

_CHECK_FILE = "free disk space, or check that the folder and file belong to you and are writable"
_MOVE_AWAY = "move the file away to start a new journal"

Statement = tuple[str, tuple[object, ...]]


class TaskStore:
    """Open with `await TaskStore.open(path)`. Methods raise TaskError when the journal cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._unwritten: list[Statement] = []

    @classmethod
    async def open(cls, path: Path) -> TaskStore:
        store = cls(path)
        try:
            await store._call(store._connect)
        except BaseException:
            store._thread.shutdown(wait=False)
            raise
        return store

    async def close(self) -> None:
        await self._call(self._connection.close)
        self._thread.shutdown()

    def save(self, task: Task, events: Sequence[TaskEvent] = ()) -> asyncio.Future[None]:
        """The task as it stands and the events that led here, in one transaction. Queued at once, in call order."""
        statements: list[Statement] = [
            (
                "INSERT INTO tasks VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                (task.id, task.created, _dump(task)),
            )
        ]
        statements += [
            ("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (task.id, event.seq, event.time, event.type, _dump(event.data)))
            for event in events
        ]
        return self._write(statements)

    async def append_messages(self, task_id: str, position: int, messages: Sequence[Message]) -> None:
        """More of a transcript, from `position` (counted from 0)."""
        await self._write(
            [
                ("INSERT INTO messages VALUES (?, ?, ?)", (task_id, position + offset, _dump(message)))
                for offset, message in enumerate(messages)
            ]
        )

    async def save_checkpoint(self, task_id: str, checkpoint: Any) -> None:
        """What a task needs, beside its transcript, to go on after a pause or a restart. None removes it and the transcript."""
        if checkpoint is None:
            await self._write(
                [
                    ("DELETE FROM checkpoints WHERE task_id = ?", (task_id,)),
                    ("DELETE FROM messages WHERE task_id = ?", (task_id,)),
                ]
            )
            return
        statement = "INSERT INTO checkpoints VALUES (?, ?) ON CONFLICT (task_id) DO UPDATE SET body = excluded.body"
        await self._write([(statement, (task_id, _dump(checkpoint)))])

    async def tasks(self) -> list[Task]:
        rows = await self._rows("SELECT body FROM tasks ORDER BY created, id")
        try:
            return [from_json(Task, json.loads(body)) for (body,) in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"the task journal {self.path} holds a task that cannot be read: {error!r}", _MOVE_AWAY) from error

    async def events(self, task_id: str, after_seq: int = 0, limit: int = -1) -> list[TaskEvent]:
        """At most `limit` events, -1 for all."""
        query = "SELECT seq, time, type, data FROM events WHERE task_id = ? AND seq > ? ORDER BY seq LIMIT ?"
        rows = await self._rows(query, (task_id, after_seq, limit))
        return [TaskEvent(task_id, seq, time, kind, json.loads(data)) for seq, time, kind, data in rows]

    async def messages(self, task_id: str) -> list[Message]:
        rows = await self._rows("SELECT body FROM messages WHERE task_id = ? ORDER BY position", (task_id,))
        return [from_json(Message, json.loads(body)) for (body,) in rows]

    async def checkpoint(self, task_id: str) -> Any:
        rows = await self._rows("SELECT body FROM checkpoints WHERE task_id = ?", (task_id,))
        return json.loads(rows[0][0]) if rows else None

    def _write(self, statements: list[Statement]) -> asyncio.Future[None]:
        # Shielded: a cancelled task must not take a queued write with it.
        return asyncio.shield(self._call(lambda: self._commit(statements)))

    async def _rows(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return await self._call(lambda: self._connection.execute(query, values).fetchall())

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._guarded(function))

    def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (OSError, sqlite3.Error) as error:
            raise TaskError(
                f"the task journal {self.path} cannot be used: {error}",
                _CHECK_FILE if isinstance(error, OSError | sqlite3.OperationalError) else _MOVE_AWAY,
            ) from error

    def _connect(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self.path.chmod(0o600)
        self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
        elif version != _SCHEMA_VERSION:
            self._connection.close()
            raise TaskError(
                f"the task journal {self.path} has format {version}, and this version reads {_SCHEMA_VERSION}",
                f"update quadjet, or {_MOVE_AWAY}",
            )

    def _commit(self, statements: list[Statement]) -> None:
        self._unwritten += statements
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for sql, values in self._unwritten:
                self._connection.execute(sql, values)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._unwritten.clear()


def _dump(value: object) -> str:
    return json.dumps(to_json(value), separators=(",", ":"))

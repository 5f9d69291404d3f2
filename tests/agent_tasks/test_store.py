"""The journal: what goes in comes out, in order, by one writer, in a private file."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.store import TaskStore
from quadjet.agent_tasks.task import (
    Card,
    ChangeKind,
    Diagnostic,
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
)
from quadjet.engine.chat import Message, ToolCall

PATH = Path("/w/a.py")
SPEC = TaskSpec(TaskKind.TRIAGE, PATH, Path("/w"), LineRange(1, 2), (Diagnostic("a.py", 3, "m", "s", "c"),), "do it")
CARD = Card("t", True, "s", (Evidence("e", None, "c", "d"),), {"n": 1, "list": ["x"]}, ("note",), 1, 2, 3, 4, 0.5)
HUNK = Hunk("h", PATH, 7, 1, 0, 1, 1, "é\r\n", HunkState.CONFLICT)
CHANGES = (
    FileChange(PATH, ChangeKind.MODIFY, b"\xff\x00", b"", "latin-1", (HUNK,), "flag"),
    FileChange(PATH, ChangeKind.CREATE, None, b"x", "utf-8", ()),
)
TASK = Task("1", SPEC, TaskState.NEEDS_YOU, 1.5, NeedsYou.STUCK, "why", CARD, Proposal(CHANGES), 3, 2)


def event(seq: int, task_id: str = "1") -> TaskEvent:
    return TaskEvent(task_id, seq, 2.5, "text", {"text": "\ud800 ünïcode \x00", "n": None})


async def test_everything_survives_reopening(tmp_path: Path) -> None:
    messages = [
        Message("system", "s"),
        Message("assistant", "", (ToolCall("f", {"a": [1, None]}, "id"),)),
        Message("tool", "r", (), "id"),
    ]
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    await store.save(TASK, [event(1), event(2)])
    await store.append_messages("1", 0, messages[:1])
    await store.append_messages("1", 1, messages[1:])
    await store.save_checkpoint("1", {"facts": {"a": 1}})
    await store.close()
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    assert await store.tasks() == [TASK]
    assert await store.events("1") == [event(1), event(2)]
    assert await store.events("1", 1) == [event(2)]
    assert await store.messages("1") == messages
    assert await store.checkpoint("1") == {"facts": {"a": 1}}
    await store.close()


async def test_dropping_the_checkpoint_drops_the_transcript(tmp_path: Path) -> None:
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    await store.save_checkpoint("1", {})
    await store.append_messages("1", 0, [Message("user", "x")])
    await store.save_checkpoint("1", None)
    assert await store.checkpoint("1") is None
    assert await store.messages("1") == []
    await store.close()


async def test_the_file_is_private(tmp_path: Path) -> None:
    store = await TaskStore.open(tmp_path / "new" / "j.sqlite3")
    await store.save(TASK)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    await store.close()
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


async def test_a_cancelled_writer_does_not_take_its_write_along(tmp_path: Path) -> None:
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    for seq in range(1, 50):
        writer = asyncio.ensure_future(store.save(TASK, [event(seq)]))
        writer.cancel()
    await store.save(TASK)
    assert [item.seq for item in await store.events("1")] == list(range(1, 50))
    await store.close()


async def test_a_failed_write_goes_in_with_the_next(tmp_path: Path) -> None:
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    other = sqlite3.connect(tmp_path / "j.sqlite3")
    other.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END")
    other.commit()
    with pytest.raises(TaskError, match="disk is full"):
        await store.save(TASK, [event(1)])
    other.execute("DROP TRIGGER full")
    other.commit()
    other.close()
    await store.save(replace(TASK, last_seq=3), [event(2)])
    assert [item.seq for item in await store.events("1")] == [1, 2]
    await store.close()


async def test_another_format_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "j.sqlite3") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(TaskError, match="format 99"):
        await TaskStore.open(tmp_path / "j.sqlite3")


@pytest.mark.parametrize("content", [b"this is no database, whatever it is called" * 100])
async def test_a_damaged_file_is_an_error_and_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j.sqlite3").write_bytes(content)
    with pytest.raises(TaskError, match="cannot be used") as caught:
        await TaskStore.open(tmp_path / "j.sqlite3")
    assert caught.value.fix == "move the file away to start a new journal"
    assert (tmp_path / "j.sqlite3").read_bytes() == content


@pytest.mark.parametrize("body", ["no JSON", "{}", "[]", '{"id": 5}', "null"])
async def test_a_damaged_task_is_an_error_with_a_way_out(tmp_path: Path, body: str) -> None:
    store = await TaskStore.open(tmp_path / "j.sqlite3")
    await store.save(TASK)
    with sqlite3.connect(tmp_path / "j.sqlite3") as other:
        other.execute("UPDATE tasks SET body = ?", (body,))
    other.close()
    with pytest.raises(TaskError, match="cannot be read") as caught:
        await store.tasks()
    assert caught.value.fix == "move the file away to start a new journal"
    await store.close()


async def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "j.sqlite3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskError):
        await TaskStore.open(tmp_path / "j.sqlite3")
    assert not (tmp_path / "elsewhere").exists()

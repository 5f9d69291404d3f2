"""A real manager over a real repository and journal, for tests of tasks."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadjet.agent_tasks.manager import ProgressCallback, TaskManager, TaskSettings
from quadjet.agent_tasks.sandbox import Sandbox, SandboxStatus
from quadjet.agent_tasks.store import TaskStore
from quadjet.agent_tasks.task import Task, TaskEvent, TaskKind, TaskSpec, TaskState
from quadjet.agent_tasks.workspace import Workspace
from quadjet.engine.chat import ChatModel


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def make_repository(root: Path, files: dict[str, str]) -> Path:
    """A git repository with one commit of `files`."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "start")
    return root


def fingerprint(root: Path) -> dict[str, str]:
    """Every file below `root`, .git included, by its hash."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class NoSandbox(Sandbox):
    """A machine on which commands cannot run."""

    def probe(self) -> SandboxStatus:
        return SandboxStatus(False, "bubblewrap is not installed", "apt-get install bubblewrap")


@dataclass
class Harness:
    root: Path
    manager: TaskManager
    store: TaskStore
    workspace: Workspace
    worktrees: Path
    events: list[TaskEvent] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    wakers: set[asyncio.Task[None]] = field(default_factory=set)

    async def send(self, kind: str, path: str, **spec: Any) -> Task:
        return await self.manager.send(TaskSpec(TaskKind(kind), self.root / path, self.root, **spec))

    async def until(self, task_id: str, *states: str, timeout_s: float = 60.0) -> Task:
        """The task once it is in one of `states`."""
        wanted = {TaskState(state) for state in states}
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.manager.task(task_id).state in wanted)
        return self.manager.task(task_id)

    async def finished(self, task_id: str) -> Task:
        """The task once nothing more happens without a person."""
        return await self.until(task_id, "proposed", "needs-you", "failed", "stopped", "accepted", "rejected")

    async def run(self, kind: str, path: str, **spec: Any) -> Task:
        return await self.finished((await self.send(kind, path, **spec)).id)

    def note(self, event: TaskEvent) -> None:
        self.events.append(event)
        waker = asyncio.ensure_future(self._wake())
        self.wakers.add(waker)
        waker.add_done_callback(self.wakers.discard)

    async def _wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def states(self, task_id: str) -> list[str]:
        return [event.data["state"] for event in self.events if event.task_id == task_id and event.type == "state"]

    def tool_results(self, task_id: str) -> list[str]:
        return [event.data["text"] for event in self.events if event.task_id == task_id and event.type == "tool_result"]


@asynccontextmanager
async def open_harness(
    state: Path, root: Path, model: ChatModel | Sequence[ChatModel], *, sandbox: Sandbox | None = None, **settings: Any
) -> AsyncIterator[Harness]:
    """`model` answers every task; of several, each task that needs one gets the next. `state` keeps journal and worktrees."""
    models = list(model) if isinstance(model, Sequence) else None
    store = await TaskStore.open(state / "tasks.sqlite3")
    workspace = Workspace()

    async def source(progress: ProgressCallback) -> ChatModel:
        return models.pop(0) if models is not None else model  # type: ignore[return-value]

    manager = TaskManager(source, store, workspace, state / "worktrees", TaskSettings(**settings), sandbox=sandbox)
    harness = Harness(root, manager, store, workspace, state / "worktrees")
    manager.subscribe(harness.note)
    try:
        await manager.start()
        yield harness
    finally:
        await manager.close()
        await store.close()

"""What the command line asks of the daemon about tasks: requests with their names, answers as the plain data of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..agent_tasks.errors import TaskError
from ..lsp import messages
from .config import Places
from .shell_client import DaemonError, ShellClient, connect

IN_PROGRESS = frozenset({"queued", "running", "waiting-tool", "verifying"})


class TaskClient:
    """An open session. Every method raises DaemonError if the daemon refuses or goes away."""

    def __init__(self, client: ShellClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, places: Places, command: Sequence[str]) -> TaskClient:
        """Attach to the daemon, started with `command` if there is none."""
        return cls(await connect(places, command=command))

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: dict[str, Any]) -> str:
        """Give a task, {kind, uri, range?, instruction?}, to an agent. Its id, at once."""
        arguments = {"command": messages.SEND_TO_AGENT, "arguments": [request]}
        return str((await self._client.request("workspace/executeCommand", arguments))["taskId"])

    async def watch(self, task_ids: Collection[str], on_event: Callable[[dict[str, Any]], None]) -> None:
        """Pass on every event of these tasks, from their first one, until none of them is in progress."""
        states = dict.fromkeys(task_ids, "queued")
        for task_id in task_ids:
            await self._client.request(messages.SUBSCRIBE, {"taskId": task_id, "afterSeq": 0})
        async for method, event in self._client.notifications():
            if method != messages.TASK_EVENT or event["taskId"] not in states:
                continue
            on_event(event)
            if event["type"] == "state":
                states[event["taskId"]] = event["data"]["state"]
            if not IN_PROGRESS.intersection(states.values()):
                return
        raise DaemonError("the daemon ended while a task was running", "quadjet logs; the task goes on with: quadjet resume ID")

    async def tasks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._client.request(messages.TASKS))["tasks"]
        return found

    async def find(self, start: str) -> str:
        """The id of the one task whose id starts like this."""
        matches = [task["taskId"] for task in await self.tasks() if start and task["taskId"].startswith(start)]
        if len(matches) != 1:
            raise TaskError(f"{len(matches) or 'no'} tasks have an id that starts with {start!r}", "quadjet tasks lists them")
        return str(matches[0])

    async def task(self, task_id: str) -> dict[str, Any]:
        return await self._about(messages.TASK, task_id)

    async def proposal(self, task_id: str) -> dict[str, Any]:
        """{hunks, files}."""
        return await self._about(messages.HUNKS, task_id)

    async def accept(self, task_id: str, hunk_ids: Sequence[str] = ()) -> dict[str, Any]:
        """{task, applied, conflicts}. Without ids all hunks are meant."""
        return await self._about(messages.ACCEPT, task_id, hunkIds=list(hunk_ids) or None)

    async def reject(self, task_id: str, hunk_ids: Sequence[str] = (), comment: str = "") -> dict[str, Any]:
        return await self._about(messages.REJECT, task_id, hunkIds=list(hunk_ids) or None, comment=comment)

    async def stop(self, task_id: str) -> dict[str, Any]:
        return await self._about(messages.STOP_TASK, task_id)

    async def pause(self, task_id: str) -> dict[str, Any]:
        return await self._about(messages.PAUSE, task_id)

    async def resume(self, task_id: str) -> dict[str, Any]:
        return await self._about(messages.RESUME, task_id)

    async def _about(self, method: str, task_id: str, **params: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._client.request(method, {"taskId": task_id, **params})
        return answer

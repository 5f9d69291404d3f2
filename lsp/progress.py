"""One progress bar per running task in the editor that sent it: at most four reports a second, cancellable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException

from .protocol import ConnectionProtocol

REPORT_INTERVAL_S = 0.25
CREATE_TIMEOUT_S = 20.0
Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(slots=True, eq=False)
class _Bar:
    token: str
    title: str
    message: str
    is_open: bool = False
    last_report: float = 0.0
    timer: asyncio.TimerHandle | None = None


class TaskProgress:
    def __init__(self, protocol: ConnectionProtocol, spawn: Spawn) -> None:
        self._protocol = protocol
        self._spawn = spawn
        self._bars: dict[str, _Bar] = {}
        self._opened = 0

    def show(self, task_id: str, title: str, message: str) -> None:
        """The task works and this is what it does."""
        bar = self._bars.get(task_id)
        if bar is None:
            # A token lives once: a task that was parked and goes on gets a new one.
            self._opened += 1
            self._bars[task_id] = bar = _Bar(f"quadjet/{task_id}/{self._opened}", title, message)
            self._spawn(self._open(task_id, bar))
            return
        if message == bar.message:
            return
        bar.message = message
        if bar.is_open and bar.timer is None:
            loop = asyncio.get_running_loop()
            bar.timer = loop.call_at(max(loop.time(), bar.last_report + REPORT_INTERVAL_S), self._report, bar)

    def end(self, task_id: str, message: str) -> None:
        bar = self._bars.pop(task_id, None)
        if bar is None:
            return
        if bar.timer is not None:
            bar.timer.cancel()
        if bar.is_open:
            self._notify(bar, types.WorkDoneProgressEnd(message=message))

    def task_of(self, token: int | str) -> str | None:
        return next((task_id for task_id, bar in self._bars.items() if bar.token == token), None)

    def close(self) -> None:
        """The connection ended: no timer may outlive it."""
        for bar in self._bars.values():
            if bar.timer is not None:
                bar.timer.cancel()
        self._bars.clear()

    async def _open(self, task_id: str, bar: _Bar) -> None:
        params = types.WorkDoneProgressCreateParams(bar.token)
        try:
            await self._protocol.ask(types.WINDOW_WORK_DONE_PROGRESS_CREATE, params, CREATE_TIMEOUT_S)
        except (JsonRpcException, ConnectionError, TimeoutError):
            return  # the client wants no bar; the task does not need one
        if self._bars.get(task_id) is not bar:
            return  # ended before the client answered
        bar.is_open = True
        bar.last_report = asyncio.get_running_loop().time()
        self._notify(bar, types.WorkDoneProgressBegin(bar.title, cancellable=True, message=bar.message))

    def _report(self, bar: _Bar) -> None:
        bar.timer = None
        bar.last_report = asyncio.get_running_loop().time()
        if not self._protocol.writer.is_behind:
            self._notify(bar, types.WorkDoneProgressReport(cancellable=True, message=bar.message))

    def _notify(self, bar: _Bar, value: object) -> None:
        self._protocol.notify(types.PROGRESS, types.ProgressParams(bar.token, value))

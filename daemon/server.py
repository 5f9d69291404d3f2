"""The daemon: one process per user that owns the tasks, and serves every editor and shell on one socket until told to stop."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..agent_tasks.manager import TaskManager
from ..agent_tasks.run import ProgressCallback, TaskSettings
from ..agent_tasks.store import TaskStore
from ..agent_tasks.task import TaskEvent
from ..agent_tasks.workspace import Workspace
from ..engine.chat import ChatModel
from ..lsp.messages import PROTOCOL_VERSION
from ..lsp.session import EditorSession, Shared
from .config import Config, Places
from .daemon_log import open_log
from .endpoint import DaemonRunningError, Endpoint, bind, peer_of

logger = logging.getLogger(__name__)

MAX_SESSIONS = 64
STOP_TIMEOUT_S = 20.0
HANDOVER_S = 25.0
_POLL_S = 0.05
_READER_LIMIT = 2**16
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ModelSource(Protocol):
    """Where tasks get the model: loaded at the first call, started again by a call after its process died."""

    async def __call__(self, on_progress: ProgressCallback, /) -> ChatModel: ...

    async def close(self) -> None:
        """End the engine process, if there is one."""
        ...

    def status(self) -> dict[str, Any]:
        """Facts for `quadjet status`: {name, loaded, ...}."""
        ...


async def serve(config: Config, places: Places, model_source: ModelSource) -> None:
    """Run the daemon until SIGTERM, SIGINT or a client's `quadjet/stop`.

    Raises DaemonRunningError if there is one already, EndpointError or TaskError if the socket or the journal cannot be used.
    """
    with _stop_on_signals() as stopping:
        endpoint = await _bind(places.socket, stopping)
        try:
            with open_log(places.daemon_log):
                async with _task_manager(config, places, model_source) as (manager, workspace):
                    await Daemon(endpoint, manager, workspace, model_source, log=places.daemon_log, stopping=stopping).run()
        finally:
            endpoint.close()


async def _bind(path: Path, stopping: asyncio.Event) -> Endpoint:
    """Bind at once, or when a daemon that does not answer any more has ended."""
    deadline = time.monotonic() + HANDOVER_S
    while True:
        try:
            return bind(path)
        except DaemonRunningError as error:
            if error.answers or stopping.is_set() or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL_S)


@contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """Set by SIGTERM and SIGINT, from before the socket is bound: a daemon told to end while it starts leaves no socket."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _task_manager(
    config: Config, places: Places, model_source: ModelSource
) -> AsyncIterator[tuple[TaskManager, Workspace]]:
    """The registry of tasks, started; on exit work is parked, the engine ended and the journal closed, in this order."""
    settings = TaskSettings(config.tasks.max_turns, config.tasks.timeout_s, config.engine.max_sequences)
    workspace = Workspace()
    store = await TaskStore.open(places.database)
    try:
        manager = TaskManager(model_source, store, workspace, places.worktrees, settings)
        try:
            await manager.start()
            yield manager, workspace
        finally:
            await manager.close()
            await model_source.close()
    finally:
        await store.close()


class Daemon:
    """Connections, and the fan-out of events to them."""

    def __init__(
        self,
        endpoint: Endpoint,
        manager: TaskManager,
        workspace: Workspace,
        model_source: ModelSource,
        *,
        log: Path,
        stopping: asyncio.Event,
    ) -> None:
        self._endpoint = endpoint
        self._manager = manager
        self._model_source = model_source
        self._log = log
        self._stopping = stopping
        self._version = importlib.metadata.version("quadjet")
        self._started = time.time()
        self._connections: set[asyncio.Task[None]] = set()
        self._shared = Shared(manager, workspace, self._version, self.status, stopping.set)

    async def run(self) -> None:
        """Serve until `stopping` is set, from outside or by a client."""
        loop = asyncio.get_running_loop()

        def hand_over(event: TaskEvent) -> None:
            # Whatever thread an event comes from, connections are written to from this one only.
            loop.call_soon_threadsafe(self._publish, event)

        unsubscribe = self._manager.subscribe(hand_over)
        server = await asyncio.start_unix_server(self._connected, sock=self._endpoint.listener, limit=_READER_LIMIT)
        logger.info("Serving on %s as process %d", self._endpoint.path, os.getpid())
        try:
            await self._stopping.wait()
        finally:
            logger.info("Stopping")
            server.close()
            unsubscribe()
            await self._end_sessions()

    def status(self) -> dict[str, Any]:
        """{version, protocolVersion, pid, started, socket, log, sessions, tasks: {state: count}, model: {...}}."""
        return {
            "version": self._version,
            "protocolVersion": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "started": self._started,
            "socket": str(self._endpoint.path),
            "log": str(self._log),
            "sessions": sorted(session.name for session in self._shared.sessions),
            "tasks": dict(Counter(task.state.value for task in self._manager.tasks())),
            "model": self._model_source.status(),
        }

    def _publish(self, event: TaskEvent) -> None:
        for session in list(self._shared.sessions):
            session.publish(event)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        peer = peer_of(connection)
        if peer.uid != os.getuid():
            logger.warning("Refused process %d of user %d", peer.pid, peer.uid)
            writer.transport.abort()
            return
        if len(self._connections) >= MAX_SESSIONS:
            logger.warning("Refused process %d: %d clients are connected", peer.pid, MAX_SESSIONS)
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(EditorSession(self._shared, reader, writer), peer.pid))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, session: EditorSession, pid: int) -> None:
        try:
            await session.run()
        except Exception:  # a fault of ours in one session must not end the others
            logger.exception("Session of process %d failed", pid)
        logger.info("%s (process %d) left", session.name, pid)

    async def _end_sessions(self) -> None:
        if self._shared.orders:
            await asyncio.wait(self._shared.orders, timeout=STOP_TIMEOUT_S)
        for session in list(self._shared.sessions):
            session.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=STOP_TIMEOUT_S)

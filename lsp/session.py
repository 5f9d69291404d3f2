"""One connected client: what it may ask of the task manager, and what it is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams

from ..agent_tasks.errors import TaskError, UnknownHunkError, UnknownTaskError
from ..agent_tasks.manager import TaskManager
from ..agent_tasks.task import Diagnostic, Task, TaskEvent, TaskSpec
from ..agent_tasks.workspace import Workspace
from . import messages
from .code_actions import code_actions
from .documents import NotAFileError, choose_root, to_lines, uri_to_path
from .editor import ConnectedEditor
from .feed import EventFeed
from .framing import ConnectionWriter
from .notices import TaskNotices
from .protocol import ConnectionProtocol, ConnectionServer, Json, serve_frames, shared_converter

T = TypeVar("T")


@dataclass(slots=True)
class Shared:
    """What all sessions of a daemon have in common. `status` and `stop` belong to the daemon."""

    manager: TaskManager
    workspace: Workspace
    version: str
    status: Callable[[], dict[str, Any]]
    stop: Callable[[], None]
    sessions: set[EditorSession] = field(default_factory=set)
    orders: set[asyncio.Task[Any]] = field(default_factory=set)
    """What clients asked for and is under way: it is carried out whatever becomes of the client."""


class EditorSession:
    """`run` until the client leaves."""

    def __init__(self, shared: Shared, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._shared = shared
        self._reader = reader
        self._writer = ConnectionWriter(writer)
        self._server = ConnectionServer(
            "quadjet", shared.version, protocol_cls=ConnectionProtocol, converter_factory=shared_converter
        )
        self._protocol = self._server.protocol
        self._protocol.set_writer(self._writer)
        self._protocol.on_exit = self._writer.close
        self._protocol.experimental = messages.capabilities()
        self._editor = ConnectedEditor(self._protocol, shared.workspace)
        self._coroutines: set[asyncio.Task[None]] = set()
        self._feed = EventFeed(shared.manager.events, self._send_event, self._writer)
        self._notices = TaskNotices(self._protocol, self._spawn)
        self._capabilities = types.ClientCapabilities()
        self._register()

    @property
    def name(self) -> str:
        return self._editor.name

    async def run(self) -> None:
        """Serve the client. On return its documents have left the workspace; tasks go on."""
        self._shared.sessions.add(self)
        self._spawn(self._feed.run())
        try:
            await serve_frames(self._reader, self._protocol)
        finally:
            self._shared.sessions.discard(self)
            self._editor.leave()
            self._notices.close()
            self._protocol.end()
            for coroutine in self._coroutines:
                coroutine.cancel()
            await self._writer.finish()

    def close(self) -> None:
        """End the session from this side; what was written is still sent."""
        self._writer.close()

    def publish(self, event: TaskEvent) -> None:
        """A live event of any task."""
        self._feed.publish(event)
        if self.owns(event.task_id):
            self._notices.publish(self._shared.manager.task(event.task_id), event)

    def owns(self, task_id: str) -> bool:
        """True if this client shows the task's progress and messages."""
        return self._notices.owns(task_id)

    # -- what a client may call ------------------------------------------------------------------------------------------

    def _register(self) -> None:
        feature = self._server.feature
        # pygls sets attributes on handlers, which bound methods refuse and partials take.
        feature(types.INITIALIZE)(partial(self._on_initialize))
        feature(types.INITIALIZED)(partial(self._on_initialized))
        feature(types.TEXT_DOCUMENT_DID_OPEN)(partial(self._editor.open))
        feature(types.TEXT_DOCUMENT_DID_CHANGE)(partial(self._editor.change))
        feature(types.TEXT_DOCUMENT_DID_CLOSE)(partial(self._editor.close))
        feature(types.WINDOW_WORK_DONE_PROGRESS_CANCEL)(partial(self._on_progress_cancel))
        feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=[
            types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite, types.CodeActionKind.Source,
        ]))(partial(self._on_code_action))  # fmt: skip
        self._server.command(messages.SEND_TO_AGENT)(self._command(self._send_to_agent))
        self._method(messages.SUBSCRIBE, messages.SubscribeParams, self._subscribe)
        self._method(messages.TASKS, messages.NoParams, self._tasks)
        self._method(messages.TASK, messages.TaskParams, self._task)
        self._method(messages.HUNKS, messages.TaskParams, self._hunks)
        self._method(messages.ACCEPT, messages.AcceptParams, self._accept)
        self._method(messages.REJECT, messages.RejectParams, self._reject)
        for name, action in (
            (messages.STOP_TASK, self._shared.manager.stop),
            (messages.PAUSE, self._shared.manager.pause),
            (messages.RESUME, self._shared.manager.resume),
        ):
            self._method(name, messages.TaskParams, partial(self._act, action))
        self._method(messages.STATUS, messages.NoParams, self._status)
        self._method(messages.STOP_DAEMON, messages.NoParams, self._stop_daemon)

    def _method(self, name: str, kind: type[Any], handler: Callable[[Any], Awaitable[Any]]) -> None:
        async def handle(params: Json) -> Json:
            return await _answered(kind, handler, params)

        self._server.feature(name)(handle)

    def _command(self, handler: Callable[[messages.SendToAgent], Awaitable[Any]]) -> Callable[..., Any]:
        async def handle(*arguments: Json) -> Json:
            if len(arguments) != 1:
                raise JsonRpcInvalidParams(f"{messages.SEND_TO_AGENT} takes one object, got {len(arguments)} arguments")
            return await _answered(messages.SendToAgent, handler, arguments[0])

        return handle

    async def _send_to_agent(self, params: messages.SendToAgent) -> dict[str, Any]:
        # File system calls may hang on a network mount, and nobody else may notice.
        spec = await asyncio.to_thread(to_spec, params, self._folders())
        task = await self._carried_out(self._shared.manager.send(spec))
        self._notices.own(task, is_new=True)
        return {"taskId": task.id}

    async def _subscribe(self, params: messages.SubscribeParams) -> dict[str, Any]:
        """Answers {tasks: [{taskId, lastSeq}]}; the events follow as notifications."""
        manager = self._shared.manager
        tasks = manager.tasks() if params.task_id is None else [manager.task(params.task_id)]
        if params.task_id is not None and params.after_seq > tasks[0].last_seq:
            raise messages.ParamsError(f"afterSeq is {params.after_seq}, but the task has {tasks[0].last_seq} events")
        for task in tasks:
            self._feed.subscribe(task.id, params.after_seq)
        if params.task_id is None:
            self._feed.subscribe_new_tasks()
        return {"tasks": [{"taskId": task.id, "lastSeq": task.last_seq} for task in tasks]}

    async def _tasks(self, params: messages.NoParams) -> dict[str, Any]:
        return {"tasks": [messages.describe_task(task) for task in self._shared.manager.tasks()]}

    async def _task(self, params: messages.TaskParams) -> dict[str, Any]:
        return messages.describe_task(self._shared.manager.task(params.task_id))

    async def _hunks(self, params: messages.TaskParams) -> dict[str, Any]:
        task = self._shared.manager.task(params.task_id)
        return await asyncio.to_thread(messages.describe_proposal, task.proposal, task.spec.root)

    async def _accept(self, params: messages.AcceptParams) -> dict[str, Any]:
        result = await self._carried_out(self._shared.manager.accept(params.task_id, params.hunk_ids))
        return messages.describe_accept(result)

    async def _reject(self, params: messages.RejectParams) -> dict[str, Any]:
        task = await self._carried_out(self._shared.manager.reject(params.task_id, params.hunk_ids, params.comment))
        return messages.describe_task(task)

    async def _carried_out(self, order: Coroutine[Any, Any, T]) -> T:
        # Half an accept would leave files and journal apart, half a stop a task that neither runs nor has ended:
        # neither $/cancelRequest nor a lost connection may break an order off.
        running = asyncio.create_task(order)
        self._shared.orders.add(running)
        running.add_done_callback(self._shared.orders.discard)
        return await asyncio.shield(running)

    async def _act(self, action: Callable[[str], Coroutine[Any, Any, Task]], params: messages.TaskParams) -> dict[str, Any]:
        return messages.describe_task(await self._carried_out(action(params.task_id)))

    async def _status(self, params: messages.NoParams) -> dict[str, Any]:
        return self._shared.status()

    async def _stop_daemon(self, params: messages.NoParams) -> dict[str, Any]:
        asyncio.get_running_loop().call_soon(self._shared.stop)
        return {}

    # -- LSP -------------------------------------------------------------------------------------------------------------

    def _on_initialize(self, params: types.InitializeParams) -> None:
        self._capabilities = params.capabilities
        window = params.capabilities.window
        self._notices.shows_progress = bool(window and window.work_done_progress)
        self._editor.initialize(params)

    def _on_initialized(self, params: types.InitializedParams) -> None:
        """Tasks of this client's folders whose editor left are shown here from now on."""
        folders = self._folders()
        for task in self._shared.manager.tasks():
            watched = any(session.owns(task.id) for session in self._shared.sessions)
            if not task.state.is_final and not watched and task.spec.root in folders:
                self._notices.own(task)

    def _on_code_action(self, params: types.CodeActionParams) -> list[types.CodeAction] | list[types.Command]:
        return code_actions(params, self._capabilities)

    def _on_progress_cancel(self, params: types.WorkDoneProgressCancelParams) -> None:
        task_id = self._notices.task_of(params.token)
        if task_id is not None:
            self._spawn(self._stop_task(task_id))

    async def _stop_task(self, task_id: str) -> None:
        await self._carried_out(self._shared.manager.stop(task_id))

    def _folders(self) -> list[Path]:
        folders = []
        workspace = self._server.workspace
        for uri in workspace.folders or ([workspace.root_uri] if workspace.root_uri else []):
            try:
                folders.append(uri_to_path(uri))
            except NotAFileError:
                continue  # a virtual folder: no file in it can be sent
        return folders

    def _send_event(self, event: TaskEvent) -> None:
        self._protocol.notify(messages.TASK_EVENT, messages.describe_event(event))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._coroutines.add(task)
        task.add_done_callback(self._coroutines.discard)


def to_spec(params: messages.SendToAgent, folders: list[Path]) -> TaskSpec:
    """What the person asked for, with paths instead of URIs and lines instead of positions. Raises TaskError, ParamsError."""
    if params.range is not None and min(params.range.start.line, params.range.end.line) < 0:
        raise messages.ParamsError("range has a negative line")
    path = uri_to_path(params.uri)
    if not os.path.exists(path):  # noqa: PTH110  # it has an answer also for names that no file can have
        raise TaskError(f"{path} does not exist", "save the document first, or send another file")
    found = tuple(
        Diagnostic(
            str(path),
            item.range.start.line + 1,
            str(getattr(item.message, "value", item.message)),
            item.source or "",
            "" if item.code is None else str(item.code),
        )
        for item in params.diagnostics
    )
    return TaskSpec(params.kind, path, choose_root(path, folders), to_lines(params.range), found, params.instruction)


async def _answered(kind: type[Any], handler: Callable[[Any], Awaitable[Any]], params: Json) -> Json:
    """The handler's answer to checked parameters, with failures as JSON-RPC errors that carry the fix."""
    try:
        return await handler(messages.decode(kind, params))
    except messages.ParamsError as error:
        raise JsonRpcInvalidParams(str(error)) from None
    except (UnknownTaskError, UnknownHunkError) as error:
        raise JsonRpcInvalidParams(error.message, data={"fix": error.fix}) from None
    except TaskError as error:
        raise JsonRpcException(error.message, messages.REQUEST_FAILED, {"fix": error.fix}) from None

"""One connected client: what it may ask of the task manager, the documents it holds, and what it is told."""

from __future__ import annotations

import asyncio
import logging
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
from .documents import Documents, NotAFileError, choose_root, to_lines, uri_to_path
from .feed import EventFeed
from .framing import ConnectionWriter
from .notices import TaskNotices
from .protocol import ConnectionProtocol, ConnectionServer, Json, serve_frames, shared_converter
from .workspace_edit import workspace_edit

logger = logging.getLogger(__name__)

T = TypeVar("T")

APPLY_EDIT_TIMEOUT_S = 20.0
SYNC_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Shared:
    """What all sessions of a daemon have in common. `status` and `stop` belong to the daemon."""

    manager: TaskManager
    workspace: Workspace
    version: str
    status: Callable[[], dict[str, Any]]
    stop: Callable[[], None]
    sessions: set[EditorSession] = field(default_factory=set)
    reviews: set[asyncio.Task[Any]] = field(default_factory=set)
    """Accepts and rejects in progress: they end by themselves, whatever becomes of the client that asked."""


class EditorSession:
    """`run` until the client leaves. Implements agent_tasks.workspace.Editor."""

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
        self._documents = Documents()
        self._changed = asyncio.Event()
        self._coroutines: set[asyncio.Task[None]] = set()
        self._feed = EventFeed(shared.manager.events, self._send_event, self._writer)
        self._notices = TaskNotices(self._protocol, self._spawn)
        self._capabilities = types.ClientCapabilities()
        self._name = "editor"
        self._register()

    @property
    def name(self) -> str:
        return self._name

    async def run(self) -> None:
        """Serve the client. On return its documents have left the workspace; tasks go on."""
        self._shared.sessions.add(self)
        self._spawn(self._feed.run())
        try:
            await serve_frames(self._reader, self._protocol)
        finally:
            self._shared.sessions.discard(self)
            self._shared.workspace.close_all(self)
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

    async def apply_edit(self, path: Path, base_version: int, new_text: str, label: str) -> bool:
        document = self._documents.at(path)
        if document is None or document.version != base_version:
            return False
        edits = self._capabilities.workspace and self._capabilities.workspace.workspace_edit
        versioned = bool(edits and edits.document_changes)
        # A line diff of a large file takes a while, and editors are waiting for answers on this thread.
        edit = await asyncio.to_thread(workspace_edit, document, new_text, self._encoding, versioned=versioned)
        if self._documents.at(path) != document:
            return False
        params = types.ApplyWorkspaceEditParams(edit, label=label)
        try:
            async with asyncio.timeout(APPLY_EDIT_TIMEOUT_S):
                result = await self._protocol.send_request_async(types.WORKSPACE_APPLY_EDIT, params)
        except (JsonRpcException, ConnectionError, TimeoutError) as error:
            logger.warning("%s did not apply an edit to %s: %s", self.name, path, error or type(error).__name__)
            return False
        if result.applied and document.text != new_text:
            await self._wait_for_change(path, base_version)
        return bool(result.applied)

    async def _wait_for_change(self, path: Path, version: int) -> None:
        """Editors report the edit as a change of theirs; the next merge must start from it."""
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                while (document := self._documents.at(path)) is not None and document.version == version:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("%s applied an edit to %s but did not report the change", self.name, path)

    @property
    def _encoding(self) -> str:
        encoding = self._protocol.server_capabilities.position_encoding
        return str(getattr(encoding, "value", encoding) or "utf-16")

    # -- what a client may call ------------------------------------------------------------------------------------------

    def _register(self) -> None:
        feature = self._server.feature
        feature(types.INITIALIZE)(partial(EditorSession._on_initialize, self))
        feature(types.INITIALIZED)(partial(EditorSession._on_initialized, self))
        feature(types.TEXT_DOCUMENT_DID_OPEN)(partial(EditorSession._on_open, self))
        feature(types.TEXT_DOCUMENT_DID_CHANGE)(partial(EditorSession._on_change, self))
        feature(types.TEXT_DOCUMENT_DID_CLOSE)(partial(EditorSession._on_close, self))
        feature(types.WINDOW_WORK_DONE_PROGRESS_CANCEL)(partial(EditorSession._on_progress_cancel, self))
        feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=[
            types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite, types.CodeActionKind.Source,
        ]))(partial(EditorSession._on_code_action, self))  # fmt: skip
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
        task = await self._shared.manager.send(spec)
        self._notices.own(task)
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
        result = await self._reviewed(self._shared.manager.accept(params.task_id, params.hunk_ids))
        return messages.describe_accept(result)

    async def _reject(self, params: messages.RejectParams) -> dict[str, Any]:
        task = await self._reviewed(self._shared.manager.reject(params.task_id, params.hunk_ids, params.comment))
        return messages.describe_task(task)

    async def _reviewed(self, review: Coroutine[Any, Any, T]) -> T:
        # Half an accept would leave files and journal apart, so neither $/cancelRequest nor a lost connection may end it.
        running = asyncio.create_task(review)
        self._shared.reviews.add(running)
        running.add_done_callback(self._shared.reviews.discard)
        return await asyncio.shield(running)

    async def _act(self, action: Callable[[str], Awaitable[Task]], params: messages.TaskParams) -> dict[str, Any]:
        return messages.describe_task(await action(params.task_id))

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
        if params.client_info is not None:
            self._name = f"{params.client_info.name} {params.client_info.version or ''}".strip()

    def _on_initialized(self, params: types.InitializedParams) -> None:
        """Tasks of this client's folders whose editor left are shown here from now on."""
        folders = self._folders()
        for task in self._shared.manager.tasks():
            watched = any(session.owns(task.id) for session in self._shared.sessions)
            if not task.state.is_final and not watched and task.spec.root in folders:
                self._notices.own(task)

    def _on_open(self, params: types.DidOpenTextDocumentParams) -> None:
        document = self._documents.open(params.text_document)
        if document is not None:
            self._shared.workspace.open(document.path, document.text, document.version, self)

    def _on_change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self._documents.change(params, self._encoding)
        if document is not None:
            self._shared.workspace.change(document.path, document.text, document.version, self)
            self._changed.set()

    def _on_close(self, params: types.DidCloseTextDocumentParams) -> None:
        document = self._documents.close(params.text_document.uri)
        if document is not None:
            self._shared.workspace.close(document.path, self)

    def _on_code_action(self, params: types.CodeActionParams) -> list[types.CodeAction] | list[types.Command]:
        return code_actions(params, self._capabilities)

    def _on_progress_cancel(self, params: types.WorkDoneProgressCancelParams) -> None:
        task_id = self._notices.task_of(params.token)
        if task_id is not None:
            self._spawn(self._stop_task(task_id))

    async def _stop_task(self, task_id: str) -> None:
        await self._shared.manager.stop(task_id)

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
    if not path.exists():
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

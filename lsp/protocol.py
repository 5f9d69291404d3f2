"""JSON-RPC on one connection: pygls' dispatch, one LanguageServer for each, driven from our own framing.

Every request is answered, a malformed one with an error; a stream whose framing is broken is answered once and closed.
`exit` ends this connection only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
import uuid
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import attrs
import cattrs
from lsprotocol import types
from pygls.exceptions import (
    JsonRpcException,
    JsonRpcInvalidParams,
    JsonRpcInvalidRequest,
    JsonRpcParseError,
    JsonRpcServerNotInitialized,
)
from pygls.lsp.server import LanguageServer
from pygls.protocol import (
    JsonRPCNotification,
    JsonRPCRequestMessage,
    JsonRPCResponseMessage,
    LanguageServerProtocol,
    default_converter,
    lsp_method,
)

from .framing import STALL_S, ConnectionWriter, FramingError, read_frame

logger = logging.getLogger(__name__)

Json = Any
"""A value as json.loads gives it."""

_OWN_HANDLERS = (
    types.TEXT_DOCUMENT_DID_OPEN,
    types.TEXT_DOCUMENT_DID_CHANGE,
    types.TEXT_DOCUMENT_DID_CLOSE,
    types.NOTEBOOK_DOCUMENT_DID_OPEN,
    types.NOTEBOOK_DOCUMENT_DID_CHANGE,
    types.NOTEBOOK_DOCUMENT_DID_CLOSE,
    types.WINDOW_WORK_DONE_PROGRESS_CANCEL,
)
"""pygls' own document copies split lines where LSP does not (form feed, U+2028), and its progress knows no tasks."""


class ConnectionProtocol(LanguageServerProtocol):
    """pygls' dispatch for one connection of several. Parameters of methods outside LSP arrive as plain JSON values."""

    writer: ConnectionWriter
    on_exit: Callable[[], None]
    experimental: dict[str, Any]
    """Sent in the server's capabilities."""

    def __init__(self, server: LanguageServer, converter: cattrs.Converter) -> None:
        super().__init__(server, converter)
        self._is_initialized = False
        self.experimental = {}
        for method in _OWN_HANDLERS:
            self.fm.builtin_features.pop(method)

    def receive(self, body: bytes) -> None:
        """Dispatch one message. Raises FramingError if it is no JSON: whoever sent that may have lost count of bytes."""
        try:
            data = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FramingError(f"a message is not JSON: {error}") from None
        problem = _envelope_problem(data)
        if problem:
            self.refuse(_id_of(data), JsonRpcInvalidRequest(problem))
            return
        refusal = self._refusal(data)
        if refusal is not None:
            self.refuse(data.get("id"), refusal)
            return
        try:
            message = self._structure(data)
        except JsonRpcException as error:
            self.refuse(data.get("id"), error)
            return
        self.handle_message(message)

    def refuse(self, msg_id: int | str | None, error: JsonRpcException) -> None:
        """Answer with an error. Without an id only a broken message is answered (the specification's null id)."""
        if msg_id is None and not isinstance(error, (JsonRpcParseError, JsonRpcInvalidRequest)):
            logger.warning("Notification ignored: %s", error.message)
            return
        # As a dict: the converter leaves out an id that is None, and the specification wants a null there.
        answer = {"code": error.code, "message": error.message, **({} if error.data is None else {"data": error.data})}
        self._send_data({"jsonrpc": "2.0", "id": msg_id, "error": answer})

    async def ask(self, method: str, params: object, timeout_s: float) -> Json:
        """The client's answer. JsonRpcException if it refuses, ConnectionError if it leaves, TimeoutError."""
        if self.writer.is_closed:
            raise ConnectionError("the editor disconnected")
        msg_id = str(uuid.uuid4())
        try:
            async with asyncio.timeout(timeout_s):
                return await self.send_request_async(method, params, msg_id)
        finally:
            # pygls would take an answer that comes too late for one that is waited for, and fail.
            self._request_futures.pop(msg_id, None)
            self._result_types.pop(msg_id, None)

    def end(self) -> None:
        """The connection is gone: handlers stop, and whoever waits for the client's answer learns of it."""
        for future in list(self._request_futures.values()):
            if isinstance(future, concurrent.futures.Future) and not future.done():
                future.set_exception(ConnectionError("the editor disconnected"))
            else:
                future.cancel()
        self._request_futures.clear()

    @property
    def pending(self) -> list[asyncio.Future[Any]]:
        """Requests of the client that are not answered yet."""
        futures: Iterable[object] = self._request_futures.values()
        return [future for future in futures if isinstance(future, asyncio.Future)]

    # lru_cache, as pygls has it, would keep every ended connection alive.
    def get_message_type(self, method: str) -> type[Any] | None:  # type: ignore[override]
        return types.METHOD_TO_TYPES.get(method, (None,))[0]

    def get_result_type(self, method: str) -> type[Any] | None:  # type: ignore[override]
        return types.METHOD_TO_TYPES.get(method, (None, None))[1]

    @lsp_method(types.INITIALIZE)
    def lsp_initialize(self, params: types.InitializeParams) -> Generator[Any, Any, types.InitializeResult]:
        self._is_initialized = True
        result = yield from super().lsp_initialize(params)
        result.capabilities.experimental = self.experimental
        return result

    @lsp_method(types.SHUTDOWN)
    def lsp_shutdown(self, *args: object) -> None:  # type: ignore[override]
        # pygls cancels what is in flight here; an accept that waits for this editor must end by itself.
        self._shutdown = True

    @lsp_method(types.EXIT)
    def lsp_exit(self, *args: object) -> None:  # type: ignore[override]
        self.on_exit()

    def _handle_cancel_notification(self, msg_id: int | str) -> None:
        # The client may take back its own requests only, not ours to it, which stand in the same table.
        if isinstance(cast(object, self._request_futures.get(msg_id)), asyncio.Future):
            super()._handle_cancel_notification(msg_id)

    def _refusal(self, data: dict[str, Any]) -> JsonRpcException | None:
        method = data.get("method")
        if method is None or method == types.EXIT:
            return None
        if self._shutdown:
            return JsonRpcInvalidRequest("the session was shut down")
        if method == types.INITIALIZE and self._is_initialized:
            return JsonRpcInvalidRequest("the session is initialized already")
        if method != types.INITIALIZE and not self._is_initialized:
            return JsonRpcServerNotInitialized("send initialize first")
        return None

    def _structure(self, data: dict[str, Any]) -> Json:
        method = data.get("method")
        if method is None:
            return self._structure_response(data)
        message_type = self.get_message_type(method)
        if message_type is None and "id" in data:
            return JsonRPCRequestMessage(data["id"], method, "2.0", data.get("params"))
        if message_type is None:
            return JsonRPCNotification(method, "2.0", data.get("params"))
        if ("id" in attrs.fields_dict(message_type)) != ("id" in data):
            raise JsonRpcInvalidRequest(f"{method} is a {'notification' if 'id' in data else 'request'}")
        try:
            return self._converter.structure(data, message_type)
        except Exception as error:  # cattrs raises whatever its hooks raise: KeyError, TypeError, ValueError, groups of them
            raise JsonRpcInvalidParams(f"{method}: {'; '.join(cattrs.transform_error(error))}") from None

    def _structure_response(self, data: dict[str, Any]) -> Json:
        result_type = self._result_types.pop(data["id"], None)
        try:
            if data.get("error") is not None:
                return self._converter.structure(data, types.ResponseErrorMessage)
            if result_type is None:
                return JsonRPCResponseMessage(data["id"], "2.0", data.get("result"))
            return self._converter.structure({"result": None, **data}, result_type)
        except Exception as error:  # as above; whoever waits for this response must not wait for ever
            reason = "; ".join(cattrs.transform_error(error))
            return types.ResponseErrorMessage(id=data["id"], error=types.ResponseError(JsonRpcInvalidParams.CODE, reason))


class ConnectionServer(LanguageServer):
    """One connection's LanguageServer. Errors outside requests go to the log only: their texts may quote documents."""

    protocol: ConnectionProtocol

    def report_server_error(self, error: Exception, source: object) -> None:
        logger.debug("%s: %s", getattr(source, "__name__", source), error)


@functools.cache
def shared_converter() -> cattrs.Converter:
    """Building one takes milliseconds and it holds no state of a connection."""
    return cast(cattrs.Converter, default_converter())  # type: ignore[no-untyped-call]


async def serve_frames(reader: asyncio.StreamReader, protocol: ConnectionProtocol) -> None:
    """Feed messages to the protocol until the stream ends, breaks, or the connection is closed."""
    writer = protocol.writer
    try:
        while not writer.is_closed and (body := await read_frame(reader)) is not None:
            protocol.receive(body)
            await writer.drained()  # a client that does not read replies cannot make us read more requests
        if protocol.pending:
            await asyncio.wait(protocol.pending, timeout=STALL_S)
    except FramingError as error:
        logger.warning("Connection closed: %s", error)
        protocol.refuse(None, JsonRpcParseError(f"{error}; the connection is closed"))
    except ConnectionError:
        pass  # the client died: its session ends like any other


def tame_log() -> None:
    """Keep documents out of the log: at INFO pygls logs every message. A refused request is one line, no traceback."""
    logging.getLogger("pygls").setLevel(logging.WARNING)
    log = logging.getLogger("pygls.protocol.json_rpc")
    if _without_traceback not in log.filters:
        log.addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, JsonRpcException):
        record.msg, record.args, record.exc_info, record.levelno, record.levelname = str(error), (), None, logging.INFO, "INFO"
    return True


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _id_of(data: Json) -> int | str | None:
    msg_id = data.get("id") if isinstance(data, dict) else None
    return msg_id if isinstance(msg_id, (int, str)) and not isinstance(msg_id, bool) else None


def _envelope_problem(data: Json) -> str:
    if not isinstance(data, dict):
        return "a message must be one JSON object"
    if data.get("jsonrpc") != "2.0":
        return 'a message must have "jsonrpc": "2.0"'
    if "id" in data and _id_of(data) is None and not (data["id"] is None and "error" in data):
        return "the id must be a whole number or a text"
    if "method" in data and not isinstance(data["method"], str):
        return "the method must be a text"
    if "method" not in data and "id" not in data:
        return "a message must have a method, or an id and a result"
    return ""

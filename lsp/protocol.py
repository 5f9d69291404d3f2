"""JSON-RPC on one connection: framing with limits, a writer that never buffers without bound, and pygls driven from both.

Every request is answered, a malformed one with an error; a stream whose framing is broken is answered once and closed.
`exit` ends this connection only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
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

logger = logging.getLogger(__name__)

Json = Any
"""A value as json.loads gives it."""

MAX_FRAME_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 4096
HIGH_WATER_BYTES = 2**20
"""Unsent bytes above which a client counts as behind: events wait in the journal until it has caught up."""
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
STALL_S = 30.0
"""A client that is behind for this long without catching up is disconnected."""

FINISH_S = 2.0


class FramingError(Exception):
    """The stream does not follow the base protocol; where the next message starts is unknown."""


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """The body of the next message; None at the end of the stream. FramingError also for a stream that ends inside one."""
    length: int | None = None
    total = 0
    while True:
        line = await _read_line(reader)
        if line is None and total == 0:
            return None
        if line is None:
            raise FramingError("the stream ended inside a header")
        total += len(line)
        if total > MAX_HEADER_BYTES:
            raise FramingError(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        if line == b"\r\n":
            break
        length = _content_length(line, length)
    if length is None:
        raise FramingError("the header has no Content-Length")
    if length > max_bytes:
        raise FramingError(f"a message of {length} bytes is over the limit of {max_bytes} bytes")
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise FramingError(f"the stream ended after {len(error.partial)} of {length} bytes of a message") from None


def to_frame(message: object) -> bytes:
    """A JSON value with its header, as sent."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FramingError("the stream ended inside a header") from None
        return None
    except asyncio.LimitOverrunError:
        raise FramingError(f"the header is longer than {MAX_HEADER_BYTES} bytes") from None


def _content_length(line: bytes, known: int | None) -> int | None:
    name, colon, value = line.partition(b":")
    if not colon or not line.endswith(b"\r\n") or not name.replace(b"-", b"").isalpha():
        raise FramingError("a header line is not of the form 'Name: value'")
    if name.lower() != b"content-length":
        return known
    digits = value.strip()
    if known is not None or not digits.isdigit():
        raise FramingError("Content-Length is not one whole number")
    return int(digits)


class ConnectionWriter:
    """The sending half of a connection, as pygls wants it. Holds at most MAX_UNSENT_BYTES, then drops the connection."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream
        stream.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    @property
    def is_behind(self) -> bool:
        return self._stream.transport.get_write_buffer_size() > HIGH_WATER_BYTES

    @property
    def is_closed(self) -> bool:
        return self._stream.transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.is_closed:
            return
        if self._stream.transport.get_write_buffer_size() + len(data) > MAX_UNSENT_BYTES:
            self.abort(f"over {MAX_UNSENT_BYTES} bytes wait for a client that does not read")
            return
        self._stream.write(data)

    async def drained(self) -> None:
        """Waits until the client is no longer behind. A client that takes longer than STALL_S is disconnected."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._stream.drain()
        except TimeoutError:
            self.abort(f"the client has not read for {STALL_S:.0f} s")
        except ConnectionError:
            pass  # the client is gone: the reading half sees the end and closes the session

    def abort(self, reason: str) -> None:
        logger.warning("Connection dropped: %s", reason)
        self._stream.transport.abort()

    def close(self) -> None:
        """Read no more; what was written is still sent."""
        self._stream.close()

    async def finish(self) -> None:
        """Close, and give the client FINISH_S to take what was written."""
        self._stream.close()
        try:
            async with asyncio.timeout(FINISH_S):
                await self._stream.wait_closed()
        except TimeoutError:
            self._stream.transport.abort()
        except ConnectionError:
            pass  # the client was gone first


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
        self._send_data(types.ResponseErrorMessage(id=msg_id, error=error.to_response_error()))

    def end(self) -> None:
        """The connection is gone: handlers stop and whoever waits for the client's answer learns of it."""
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

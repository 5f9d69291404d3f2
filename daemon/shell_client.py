"""A client of the daemon for the command line: LSP framing, no documents, requests and notifications."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from ..engine.errors import QuadjetError
from ..lsp.framing import FramingError, read_frame, to_frame
from .bridge import SERVE_COMMAND, NoDaemonError, attach, try_connect
from .config import Places

Json = Any

_METHOD_NOT_FOUND = -32601


class DaemonError(QuadjetError):
    """The daemon refused a request, or went away. `code` is JSON-RPC's, 0 if the connection ended."""

    def __init__(self, message: str, fix: str = "", code: int = 0) -> None:
        super().__init__(message, fix)
        self.code = code


async def connect(places: Places, *, start: bool = True, command: Sequence[str] = SERVE_COMMAND) -> ShellClient:
    """A session with the daemon, started first if there is none and `start`. Raises NoDaemonError or EndpointError."""
    connection = await asyncio.to_thread(attach, places, command) if start else try_connect(places)
    if connection is None:
        raise NoDaemonError("no daemon runs", "start it: quadjet serve")
    connection.setblocking(False)
    client = ShellClient(*await asyncio.open_unix_connection(sock=connection))
    try:
        await client.request(
            "initialize", {"processId": None, "rootUri": None, "capabilities": {}, "clientInfo": {"name": "shell"}}
        )
        client.notify("initialized", {})
    except BaseException:
        await client.close()
        raise
    return client


class ShellClient:
    """Made by `connect`; close it, or use it as an async context manager."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._notifications: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        self._receiving = asyncio.create_task(self._receive())

    async def request(self, method: str, params: Json = None) -> Json:
        """The result. DaemonError if the daemon refuses or the connection ends."""
        if self._receiving.done():
            raise _gone()
        msg_id = next(self._ids)
        future = self._waiting[msg_id] = asyncio.get_running_loop().create_future()
        try:
            self._send({"jsonrpc": "2.0", "id": msg_id, "method": method, "params": {} if params is None else params})
            await self._drain()
            return await future
        finally:
            self._waiting.pop(msg_id, None)

    def notify(self, method: str, params: Json) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def notifications(self) -> AsyncIterator[tuple[str, Any]]:
        """(method, params) as they come; ends with the connection."""
        while (item := await self._notifications.get()) is not None:
            yield item
        self._notifications.put_nowait(None)

    async def close(self) -> None:
        self._receiving.cancel()
        self._writer.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiving
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(to_frame(message))

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError:
            raise _gone() from None

    async def _receive(self) -> None:
        try:
            while (body := await read_frame(self._reader)) is not None:
                self._handle(json.loads(body))
        except (FramingError, ConnectionError, ValueError):
            pass  # told to whoever waits, below
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_gone())
            self._notifications.put_nowait(None)

    def _handle(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            self._settle(message)
        elif "id" in message:
            error = {"code": _METHOD_NOT_FOUND, "message": "the shell answers no requests"}
            self._send({"jsonrpc": "2.0", "id": message["id"], "error": error})
        else:
            self._notifications.put_nowait((message["method"], message.get("params")))

    def _settle(self, message: dict[str, Any]) -> None:
        future = self._waiting.get(message.get("id") or 0)
        if future is None or future.done():
            return
        error = message.get("error")
        if error is None:
            future.set_result(message.get("result"))
        else:
            fix = (error.get("data") or {}).get("fix", "") if isinstance(error.get("data"), dict) else ""
            future.set_exception(DaemonError(error["message"], fix, error["code"]))


def _gone() -> DaemonError:
    return DaemonError("the daemon ended the connection", "quadjet status")

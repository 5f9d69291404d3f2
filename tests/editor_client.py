"""An editor for tests, from the specification alone: it frames, keeps documents, applies edits as UTF-16 editors do."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from quadjet.daemon.config import Places
from quadjet.lsp.framing import ConnectionWriter
from quadjet.lsp.protocol import ConnectionProtocol, ConnectionServer, serve_frames, shared_converter

TIMEOUT_S = 60.0
SCRIPTED_DAEMON = [sys.executable, str(Path(__file__).parent / "e2e" / "scripted_daemon.py")]
CAPABILITIES: dict[str, Any] = {
    "workspace": {"applyEdit": True, "workspaceEdit": {"documentChanges": True}},
    "window": {"workDoneProgress": True},
    "textDocument": {"codeAction": {"codeActionLiteralSupport": {"codeActionKind": {"valueSet": []}}}},
}


class RpcError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code: int = error["code"]
        self.data: Any = error.get("data")


def to_frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass
class Editor:
    """`await Editor.open(path of the socket)`. What the daemon sends is in `received`; a test waits for it with `seen`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    documents: dict[str, tuple[int, str]] = field(default_factory=dict)
    received: list[dict[str, Any]] = field(default_factory=list)
    before_apply: Callable[[], None] = lambda: None
    """Called when an edit arrives and before it is applied: a chance to type something first."""

    @classmethod
    async def open(cls, path: Path, folders: list[Path] | None = None, capabilities: dict[str, Any] | None = None) -> Self:
        editor = cls(*await asyncio.open_unix_connection(path))
        editor.start()
        await editor.initialize(folders or [], CAPABILITIES if capabilities is None else capabilities)
        return editor

    def start(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._arrived = asyncio.Condition()
        self._receiving = asyncio.create_task(self._receive())

    async def initialize(self, folders: list[Path], capabilities: dict[str, Any]) -> dict[str, Any]:
        workspace = [{"uri": folder.as_uri(), "name": folder.name} for folder in folders]
        params = {"processId": os.getpid(), "rootUri": None, "capabilities": capabilities, "workspaceFolders": workspace}
        result: dict[str, Any] = await self.request("initialize", {**params, "clientInfo": {"name": "test", "version": "1"}})
        self.notify("initialized", {})
        return result

    async def request(self, method: str, params: object = None) -> Any:
        msg_id = next(self._ids)
        future = self._waiting[msg_id] = asyncio.get_running_loop().create_future()
        self.send({"jsonrpc": "2.0", "id": msg_id, "method": method, "params": {} if params is None else params})
        async with asyncio.timeout(TIMEOUT_S):
            return await future

    def notify(self, method: str, params: object) -> None:
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, message: object) -> None:
        self.writer.write(to_frame(message))

    async def send_to_agent(self, kind: str, path: Path, **more: Any) -> str:
        arguments = [{"kind": kind, "uri": path.as_uri(), **more}]
        result = await self.request("workspace/executeCommand", {"command": "quadjet.sendToAgent", "arguments": arguments})
        return str(result["taskId"])

    async def seen(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message received, so far or from here on, that matches."""
        async with asyncio.timeout(TIMEOUT_S), self._arrived:
            while not (found := [message for message in self.received if matches(message)]):
                await self._arrived.wait()
        return found[0]

    async def state(self, task_id: str, *states: str) -> dict[str, Any]:
        """Wait for an event that says the task is in one of `states`."""

        def matches(message: dict[str, Any]) -> bool:
            params = message.get("params", {})
            is_state = message["method"] == "agent/taskEvent" and params["taskId"] == task_id and params["type"] == "state"
            return is_state and params["data"]["state"] in states

        event = await self.seen(matches)
        data: dict[str, Any] = event["params"]["data"]
        return data

    def events(self, task_id: str) -> list[int]:
        """Sequence numbers received for a task, in order of arrival."""
        found = [message["params"] for message in self.received if message["method"] == "agent/taskEvent"]
        return [params["seq"] for params in found if params["taskId"] == task_id]

    def open_document(self, path: Path, text: str) -> str:
        uri = path.as_uri()
        self.documents[uri] = (1, text)
        item = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": item})
        return uri

    def type(self, uri: str, line: int, character: int, text: str) -> None:
        at = {"line": line, "character": character}
        self._edit(uri, [{"range": {"start": at, "end": at}, "newText": text}])

    def text(self, path: Path) -> str:
        return self.documents[path.as_uri()][1]

    async def leave(self) -> None:
        await self.request("shutdown")
        self.notify("exit", None)
        await self.ended()

    async def ended(self) -> None:
        """The daemon closed the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._receiving
        self.writer.close()

    async def close(self) -> None:
        self._receiving.cancel()
        self.writer.transport.abort()
        with suppress(asyncio.CancelledError):
            await self._receiving

    async def _receive(self) -> None:
        while (message := await read_message(self.reader)) is not None:
            if "method" not in message:
                future = self._waiting.pop(message["id"])
                if "error" in message:
                    future.set_exception(RpcError(message["error"]))
                else:
                    future.set_result(message.get("result"))
                continue
            if "id" in message:
                self.send({"jsonrpc": "2.0", "id": message["id"], "result": self._answer(message)})
            async with self._arrived:
                self.received.append(message)
                self._arrived.notify_all()

    def _answer(self, message: dict[str, Any]) -> object:
        if message["method"] != "workspace/applyEdit":
            return None
        self.before_apply()
        edit = message["params"]["edit"]
        changes = [(change["textDocument"], change["edits"]) for change in edit.get("documentChanges", [])]
        changes += [({"uri": uri, "version": None}, edits) for uri, edits in edit.get("changes", {}).items()]
        if any(document["version"] not in (None, self.documents[document["uri"]][0]) for document, _ in changes):
            return {"applied": False, "failureReason": "the document changed"}
        for document, edits in changes:
            self._edit(document["uri"], edits)
        return {"applied": True}

    def _edit(self, uri: str, edits: list[dict[str, Any]]) -> None:
        version, text = self.documents[uri]
        self.documents[uri] = (version + 1, apply_edits(text, edits))
        # All ranges refer to the text before: sent from the last to the first, each also fits the text the one before it left.
        ordered = sorted(edits, key=lambda edit: _key(edit["range"]["start"]), reverse=True)
        changes = [{"range": edit["range"], "text": edit["newText"]} for edit in ordered]
        self.notify("textDocument/didChange", {"textDocument": {"uri": uri, "version": version + 1}, "contentChanges": changes})


def _key(position: dict[str, int]) -> tuple[int, int]:
    return position["line"], position["character"]


def apply_edits(text: str, edits: list[dict[str, Any]]) -> str:
    """Edits with UTF-16 positions, all referring to `text`."""
    units = text.encode("utf-16-le")
    starts = [0, *(match.end() * 2 for match in re.finditer(r"\r\n|\n|\r", "".join(_one_char_per_unit(text))))]

    def at(position: dict[str, int]) -> int:
        return starts[position["line"]] + 2 * position["character"] if position["line"] < len(starts) else len(units)

    for edit in sorted(edits, key=lambda edit: _key(edit["range"]["start"]), reverse=True):
        start, end = at(edit["range"]["start"]), at(edit["range"]["end"])
        units = units[:start] + edit["newText"].encode("utf-16-le") + units[end:]
    return units.decode("utf-16-le")


def _one_char_per_unit(text: str) -> Iterator[str]:
    for char in text:
        yield char if ord(char) < 0x10000 else "xx"


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    length = 0
    while True:
        try:
            line = await reader.readline()
        except ConnectionError:
            return None
        if not line:
            return None
        if line == b"\r\n":
            break
        name, _, value = line.partition(b":")
        if name == b"Content-Length":
            length = int(value)
    message: dict[str, Any] = json.loads(await reader.readexactly(length))
    return message


class Client:
    """The other end of a ConnectionProtocol that stands alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def receive(self) -> dict[str, Any]:
        message = await read_message(self.reader)
        assert message is not None
        return message

    def send(self, **message: object) -> None:
        self.writer.write(to_frame({"jsonrpc": "2.0", **message}))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ConnectionProtocol, Client]]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    client = Client(*await asyncio.open_unix_connection(sock=theirs))
    server = ConnectionServer("test", "1", protocol_cls=ConnectionProtocol, converter_factory=shared_converter)
    server.protocol.set_writer(ConnectionWriter(writer))
    server.protocol.on_exit = writer.close
    serving = asyncio.create_task(serve_frames(reader, server.protocol))
    yield server.protocol, client
    client.writer.close()
    await serving
    server.protocol.end()
    await server.protocol.writer.finish()
    await client.writer.wait_closed()


@dataclass
class Home:
    """A user's folders of their own, short enough for a socket, and the environment that names them."""

    folder: Path
    env: dict[str, str]
    places: Places


@contextmanager
def fresh_home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="qj", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        names = {"XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache"}
        env = {key: str(folder / value) for key, value in names.items()}
        (folder / "run").mkdir(mode=0o700)
        env["XDG_RUNTIME_DIR"] = str(folder / "run")
        config, data, state, cache = (folder / value / "quadjet" for value in ("config", "data", "state", "cache"))
        places = Places(config, data, state, cache, folder / "run" / "quadjet")
        yield Home(folder, {**os.environ, **env}, places)


@contextmanager
def running_daemon(home: Home, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """The scripted daemon, answering. Ended by SIGTERM, which must end it well."""
    process = subprocess.Popen(SCRIPTED_DAEMON, env={**home.env, **env}, stderr=subprocess.PIPE)
    try:
        _wait_until_answering(home, process)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    if process.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the daemon ended with {process.returncode}: {errors.decode()}")


def _wait_until_answering(home: Home, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(home.places.socket)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the daemon does not answer")


def make_repository(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "start"], check=True)
    return folder


def script(*steps: dict[str, Any]) -> str:
    """The instruction that makes the scripted model take these steps."""
    return json.dumps({"steps": list(steps)})

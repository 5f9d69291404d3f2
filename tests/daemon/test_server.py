"""The daemon as a real process on a real socket, its clients well-behaved and not."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from editor_client import (
    CAPABILITIES,
    SCRIPTED_DAEMON,
    Editor,
    Home,
    RpcError,
    fresh_home,
    make_repository,
    read_message,
    running_daemon,
    script,
    to_frame,
)
from quadjet.lsp.framing import STALL_S

FILES = {"one.py": "def one():\n    return 1\n", "two.py": "def two():\n    return 2\n"}
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, NOT_INITIALIZED = -32700, -32600, -32601, -32602, -32002


@dataclass
class Box:
    home: Home
    daemon: subprocess.Popen[bytes]
    repo: Path

    @property
    def socket(self) -> Path:
        return self.home.places.socket

    async def editor(self, capabilities: dict[str, Any] | None = None) -> Editor:
        return await Editor.open(self.socket, [self.repo], capabilities)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Home, subprocess.Popen[bytes]]]:
    with fresh_home() as home, running_daemon(home, QUADJET_TASKS_MAX_TURNS="200") as daemon:
        yield home, daemon


@pytest.fixture
def box(shared: tuple[Home, subprocess.Popen[bytes]]) -> Iterator[Box]:
    """A repository of the test's own, and the daemon that all tests here share."""
    home, daemon = shared
    folder = Path(tempfile.mkdtemp(dir=home.folder))
    yield Box(home, daemon, make_repository(folder / "repo", FILES))
    assert daemon.poll() is None


@pytest.fixture
def own_box() -> Iterator[Box]:
    """A daemon of the test's own, to be ended by it."""
    with fresh_home() as home, running_daemon(home, QUADJET_TASKS_MAX_TURNS="200") as daemon:
        yield Box(home, daemon, make_repository(home.folder / "repo", FILES))


async def answers(path: Path, data: bytes) -> list[dict[str, Any]]:
    """All messages the daemon sends to a client that sends `data` and then waits for the end."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    found = []
    async with asyncio.timeout(20):
        while (message := await read_message(reader)) is not None:
            found.append(message)
    writer.close()
    return found


async def is_well(box: Box) -> bool:
    editor = await box.editor()
    status = await editor.request("agent/status")
    await editor.leave()
    return bool(status["pid"] == box.daemon.pid)


async def test_two_clients_two_tasks_and_edits_meanwhile(box: Box) -> None:
    one, two = box.repo / "one.py", box.repo / "two.py"
    gate = box.home.folder / "gate"
    first, second = await box.editor(), await box.editor()
    unsaved = FILES["one.py"] + "# unsaved\n"
    uri = first.open_document(one, unsaved)
    await first.request("agent/subscribe")
    await second.request("agent/subscribe")
    task_one = await first.send_to_agent(
        "cleanup", one, instruction=script({"wait": str(gate), "edit": ["one.py", "return 1", "return 11"]})
    )
    task_two = await second.send_to_agent(
        "cleanup", two, instruction=script({"wait": str(gate), "edit": ["two.py", "return 2", "return 22"]})
    )
    for task_id in (task_one, task_two):
        await model_asked(first, task_id)
    first.type(uri, 0, 0, '"""\U0001f600"""\n\n\n')
    gate.touch()
    await first.state(task_one, "proposed")
    await first.state(task_two, "proposed")
    assert (await first.request("agent/hunks", {"taskId": task_one}))["hunks"][0]["baseVersion"] == 1

    # The second client accepts; the edit goes through the first, which has the file open and changed.
    accepted = await second.request("agent/accept", {"taskId": task_one})
    assert accepted["conflicts"] == []
    assert accepted["task"]["state"] == "accepted"
    assert first.text(one) == '"""\U0001f600"""\n\n\ndef one():\n    return 11\n# unsaved\n'
    assert one.read_text() == FILES["one.py"]

    await first.leave()
    accepted = await second.request("agent/accept", {"taskId": task_two})
    assert accepted["task"]["state"] == "accepted"
    assert two.read_text() == "def two():\n    return 22\n"
    total = (await second.request("agent/task", {"taskId": task_one}))["lastSeq"]
    assert second.events(task_one) == list(range(1, total + 1))
    await second.leave()


async def model_asked(editor: Editor, task_id: str) -> None:
    """The snapshot is taken and the model is at work: what is typed from here on is not in the snapshot."""

    def matches(message: dict[str, Any]) -> bool:
        params = message.get("params") or {}
        return params.get("taskId") == task_id and params["type"] == "progress" and "scripted" in params["data"]["message"]

    await editor.seen(matches)


async def test_a_client_without_document_changes_gets_plain_changes(box: Box) -> None:
    path = box.repo / "one.py"
    editor = await box.editor({"workspace": {"applyEdit": True}})
    editor.open_document(path, FILES["one.py"])
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", path, instruction=script({"edit": ["one.py", "return 1", "return 9"]}))
    await editor.state(task_id, "proposed")
    await editor.request("agent/accept", {"taskId": task_id})
    edit = await editor.seen(lambda message: message["method"] == "workspace/applyEdit")
    assert list(edit["params"]["edit"]) == ["changes"]
    assert editor.text(path) == "def one():\n    return 9\n"
    await editor.leave()


async def test_typing_in_the_moment_of_an_accept_loses_nothing(box: Box) -> None:
    path = box.repo / "one.py"
    editor = await box.editor()
    uri = editor.open_document(path, FILES["one.py"])
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", path, instruction=script({"edit": ["one.py", "return 1", "return 9"]}))
    await editor.state(task_id, "proposed")
    typed = iter(['"""Doc."""\n\n\n'])

    def type_once() -> None:
        for text in typed:
            editor.type(uri, 0, 0, text)

    editor.before_apply = type_once
    accepted = await editor.request("agent/accept", {"taskId": task_id})
    assert accepted["task"]["state"] == "accepted"
    assert editor.text(path) == '"""Doc."""\n\n\ndef one():\n    return 9\n'
    await editor.leave()


@pytest.mark.parametrize(("encoding", "column"), [("utf-8", 9), ("utf-16", 7), ("utf-32", 6)])
async def test_positions_count_in_the_negotiated_encoding(box: Box, encoding: str, column: int) -> None:
    path, text = box.repo / "one.py", '"😀" + f(1)\n'
    path.write_text(text)
    editor = await box.editor({**CAPABILITIES, "general": {"positionEncodings": [encoding]}})
    uri = editor.open_document(path, text)
    span = {"start": {"line": 0, "character": column}, "end": {"line": 0, "character": column + 1}}
    change = {"range": span, "text": "g"}
    editor.notify("textDocument/didChange", {"textDocument": {"uri": uri, "version": 2}, "contentChanges": [change]})
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", path, instruction=script({"edit": ["one.py", "g(1)", "g(2)"]}))
    await editor.state(task_id, "proposed")
    assert (await editor.request("agent/hunks", {"taskId": task_id}))["hunks"][0]["text"] == '"😀" + g(2)\n'
    await editor.leave()


async def test_the_root_is_the_workspace_folder_of_the_file_that_was_clicked(box: Box) -> None:
    other = make_repository(box.repo.parent / "other", FILES)
    alone = box.repo.parent / "alone.py"
    alone.write_text("x = 1\n")
    editor = await Editor.open(box.socket, [box.repo, other])
    roots = []
    for path in (box.repo / "one.py", other / "one.py", alone):
        task_id = await editor.send_to_agent("cleanup", path)
        roots.append((await editor.request("agent/task", {"taskId": task_id}))["rootUri"])
    assert roots == [box.repo.as_uri(), other.as_uri(), alone.parent.as_uri()]
    await editor.leave()


async def test_unsaved_text_is_what_the_agent_works_on(box: Box) -> None:
    path = box.repo / "one.py"
    editor = await box.editor()
    uri = editor.open_document(path, FILES["one.py"])
    editor.type(uri, 1, 12, "23")
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", path, instruction=script({"edit": ["one.py", "return 123", "return 4"]}))
    await editor.state(task_id, "proposed")
    assert (await editor.request("agent/hunks", {"taskId": task_id}))["hunks"][0]["baseVersion"] == 2
    await editor.leave()


async def test_events_are_replayed_after_any_seq_without_gap_or_duplicate(box: Box) -> None:
    editor = await box.editor()
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", box.repo / "one.py", instruction=script({"edit": ["one.py", "1", "9"]}))
    await editor.state(task_id, "proposed")
    await editor.close()
    again = await box.editor()
    answer = await again.request("agent/subscribe", {"taskId": task_id, "afterSeq": 3})
    (last,) = [entry["lastSeq"] for entry in answer["tasks"]]
    await again.request("agent/reject", {"taskId": task_id})
    await again.state(task_id, "rejected")
    total = (await again.request("agent/task", {"taskId": task_id}))["lastSeq"]
    assert total > last
    assert again.events(task_id) == list(range(4, total + 1))
    with pytest.raises(RpcError, match="afterSeq is 999"):
        await again.request("agent/subscribe", {"taskId": task_id, "afterSeq": 999})
    await again.leave()


async def test_progress_is_created_reported_and_ended_once(box: Box) -> None:
    editor = await box.editor()
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", box.repo / "one.py", instruction=script({"edit": ["one.py", "1", "9"]}))
    await editor.state(task_id, "proposed")
    await editor.seen(lambda message: message["method"] == "$/progress" and message["params"]["value"]["kind"] == "end")
    message = await editor.seen(lambda message: message["method"] == "window/showMessage")
    assert "done" in message["params"]["message"]
    progress = [m["params"] for m in editor.received if m["method"] == "$/progress"]
    (created,) = [m["params"]["token"] for m in editor.received if m["method"] == "window/workDoneProgress/create"]
    assert {params["token"] for params in progress} == {created}
    kinds = [params["value"]["kind"] for params in progress]
    assert (kinds[0], kinds[-1], set(kinds[1:-1]) - {"report"}) == ("begin", "end", set())
    await editor.leave()


async def test_cancelling_the_progress_stops_the_task(box: Box) -> None:
    editor = await box.editor()
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", box.repo / "one.py", instruction=script({"wait": "/nonexistent"}))
    begun = await editor.seen(lambda message: message["method"] == "$/progress")
    editor.notify("window/workDoneProgress/cancel", {"token": begun["params"]["token"]})
    await editor.state(task_id, "stopped")
    await editor.leave()


async def test_a_returning_editor_takes_up_the_progress_of_its_folder(box: Box) -> None:
    editor = await box.editor()
    task_id = await editor.send_to_agent("cleanup", box.repo / "one.py", instruction=script({"wait": "/nonexistent"}))
    begun = await editor.seen(lambda message: message["method"] == "$/progress")
    await editor.close()
    again = await box.editor()
    resumed = await again.seen(lambda message: message["method"] == "$/progress")
    assert resumed["params"]["token"] != begun["params"]["token"] or resumed["params"]["value"]["kind"] == "begin"
    await again.request("agent/stop", {"taskId": task_id})
    await again.leave()


async def test_tasks_outlive_a_killed_client_and_its_documents_do_not(box: Box) -> None:
    tests = str(Path(__file__).parent.parent)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, tests, str(box.socket), str(box.repo), stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout is not None
    task_id = json.loads(await killed.stdout.readline())
    killed.kill()
    await killed.communicate()
    editor = await box.editor()
    await editor.request("agent/subscribe")
    await editor.state(task_id, "proposed")
    accepted = await editor.request("agent/accept", {"taskId": task_id})
    assert accepted["task"]["state"] == "accepted"
    assert (box.repo / "one.py").read_text() == "def one():\n    return 9\n"
    await editor.leave()


CLIENT = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from editor_client import Editor, script
async def main():
    repo = Path(sys.argv[3])
    editor = await Editor.open(Path(sys.argv[2]), [repo])
    editor.open_document(repo / "one.py", "def one():\\n    return 1\\n")
    steps = script({"edit": ["one.py", "1", "9"]})
    print(json.dumps(await editor.send_to_agent("cleanup", repo / "one.py", instruction=steps)), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_bad_requests_get_clear_errors(box: Box) -> None:
    editor = await box.editor()
    for method, params, code, text in (
        ("agent/nothing", {}, METHOD_NOT_FOUND, "agent/nothing"),
        ("agent/task", {"taskId": 5}, INVALID_PARAMS, "expected a text, got int @ params.taskId"),
        ("agent/task", {}, INVALID_PARAMS, "taskId is missing"),
        ("agent/task", [1], INVALID_PARAMS, "must be an object"),
        ("agent/task", {"taskId": "nope"}, INVALID_PARAMS, "no task nope"),
        ("agent/subscribe", {"afterSeq": "x"}, INVALID_PARAMS, "afterSeq"),
        ("agent/subscribe", {"afterSeq": 2**63}, INVALID_PARAMS, "afterSeq"),
        ("textDocument/codeAction", {"textDocument": 5}, INVALID_PARAMS, "textDocument/codeAction"),
        ("textDocument/didOpen", {}, INVALID_REQUEST, "is a notification"),
        ("initialize", {"processId": None, "rootUri": None, "capabilities": {}}, INVALID_REQUEST, "already"),
        ("workspace/executeCommand", {"command": "quadjet.sendToAgent"}, INVALID_PARAMS, "one object"),
        ("workspace/executeCommand", {"command": "other"}, INVALID_PARAMS, "other"),
    ):
        with pytest.raises(RpcError) as error:
            await editor.request(method, params)
        assert (error.value.code, text in str(error.value)) == (code, True), f"{method} {params}: {error.value}"
    await editor.leave()


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("untitled:Untitled-1", "never saved"),
        ("vscode-vfs://github/x.py", "not a file on this machine"),
        ("file:///nonexistent/x.py", "does not exist"),
        (f"file:///{'x' * 300}", "does not exist"),
    ],
)
async def test_what_is_no_file_is_refused(box: Box, uri: str, text: str) -> None:
    editor = await box.editor()
    arguments = {"command": "quadjet.sendToAgent", "arguments": [{"kind": "cleanup", "uri": uri}]}
    with pytest.raises(RpcError, match=text) as error:
        await editor.request("workspace/executeCommand", arguments)
    assert error.value.data["fix"]
    await editor.leave()


async def test_a_nested_jsonrpc_key_is_data(box: Box) -> None:
    editor = await box.editor()
    nested = {"jsonrpc": "2.0", "id": 7, "method": "exit"}
    span = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 1}}
    diagnostic = {"range": span, "message": "m", "data": nested}
    params = {"textDocument": {"uri": (box.repo / "one.py").as_uri()}, "range": span, "context": {"diagnostics": [diagnostic]}}
    actions = await editor.request("textDocument/codeAction", params)
    triage = next(action for action in actions if action["kind"].startswith("quickfix"))
    assert triage["command"]["arguments"][0]["diagnostics"][0]["data"] == nested
    assert "tasks" in await editor.request("agent/tasks", {"x": nested})
    await editor.leave()


async def test_code_actions_by_kind(box: Box) -> None:
    editor = await box.editor()
    span = {"start": {"line": 0, "character": 0}, "end": {"line": 1, "character": 1}}

    async def kinds(uri: str, context: dict[str, Any], selection: dict[str, Any] = span) -> list[str]:
        params = {"textDocument": {"uri": uri}, "range": selection, "context": {"diagnostics": [], **context}}
        return [action["kind"] for action in await editor.request("textDocument/codeAction", params)]

    uri = (box.repo / "one.py").as_uri()
    diagnostics = [{"range": span, "message": "E"}]
    cursor = {"start": span["start"], "end": span["start"]}
    assert await kinds(uri, {}) == ["source.quadjet.cleanup", "refactor.rewrite.quadjet.cleanup"]
    assert await kinds(uri, {}, cursor) == ["source.quadjet.cleanup"]
    assert await kinds(uri, {"diagnostics": diagnostics, "only": ["quickfix"]}) == ["quickfix.quadjet.triage"]
    assert await kinds(uri, {"only": ["refactor"]}) == ["refactor.rewrite.quadjet.cleanup"]
    assert await kinds(uri, {"only": ["source.organizeImports"]}) == []
    assert await kinds("untitled:x", {}) == []
    await editor.leave()
    plain = await box.editor({})
    params = {"textDocument": {"uri": uri}, "range": cursor, "context": {"diagnostics": []}}
    (command,) = await plain.request("textDocument/codeAction", params)
    assert command["command"] == "quadjet.sendToAgent"
    await plain.leave()


async def test_initialize_negotiates(box: Box) -> None:
    for offered, chosen in ((None, "utf-16"), (["utf-8", "utf-16"], "utf-8"), (["utf-32"], "utf-32"), (["x"], "utf-16")):
        reader, writer = await asyncio.open_unix_connection(box.socket)
        editor = Editor(reader, writer)
        editor.start()
        result = await editor.initialize([], {"general": {"positionEncodings": offered}} if offered else {})
        capabilities = result["capabilities"]
        assert capabilities["positionEncoding"] == chosen
        assert capabilities["textDocumentSync"]["change"] == 2
        assert capabilities["experimental"]["quadjet"]["protocolVersion"] == 1
        assert capabilities["executeCommandProvider"]["commands"] == ["quadjet.sendToAgent"]
        await editor.leave()


async def test_requests_before_initialize_and_after_shutdown_are_refused(box: Box) -> None:
    early = to_frame({"jsonrpc": "2.0", "id": 1, "method": "agent/tasks"}) + to_frame({"jsonrpc": "2.0", "method": "exit"})
    (answer,) = await answers(box.socket, early)
    assert answer["error"]["code"] == NOT_INITIALIZED
    editor = await box.editor()
    await editor.request("shutdown")
    with pytest.raises(RpcError) as error:
        await editor.request("agent/tasks")
    assert error.value.code == INVALID_REQUEST
    editor.notify("exit", None)
    await editor.ended()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", PARSE_ERROR),
        (os.urandom(64) + b"\n", PARSE_ERROR),
        (b"Content-Length: 3\r\n\r\n{x}", PARSE_ERROR),
        (b"Content-Length: 99999999999\r\n\r\n", PARSE_ERROR),
        (b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000, PARSE_ERROR),
        (b"Content-Length: 3\r\n\r\n\xff\xfe\xfd", PARSE_ERROR),
    ],
)
async def test_broken_streams_are_answered_and_closed(box: Box, data: bytes, code: int) -> None:
    (answer,) = await answers(box.socket, data)
    assert (answer["id"], answer["error"]["code"]) == (None, code), answer
    assert await is_well(box)


@pytest.mark.parametrize(
    "message",
    [
        [],
        5,
        {"jsonrpc": "1.0", "id": 1, "method": "x"},
        {"jsonrpc": "2.0", "id": [], "method": "x"},
        {"jsonrpc": "2.0", "id": 1, "method": 5},
        {"jsonrpc": "2.0"},
    ],
)
async def test_messages_of_no_known_shape_are_answered_and_the_stream_goes_on(box: Box, message: object) -> None:
    exit_frame = to_frame({"jsonrpc": "2.0", "method": "exit"})
    (answer,) = await answers(box.socket, to_frame(message) + exit_frame)
    assert answer["error"]["code"] == INVALID_REQUEST


async def test_half_a_frame_holds_nobody_else_up(box: Box) -> None:
    _, writer = await asyncio.open_unix_connection(box.socket)
    writer.write(b"Content-Length: 1000\r\n\r\n{")
    await writer.drain()
    assert await is_well(box)
    writer.close()
    await writer.wait_closed()
    assert await is_well(box)


async def test_exit_ends_only_its_own_connection(box: Box) -> None:
    first, second = await box.editor(), await box.editor()
    before = len((await second.request("agent/status"))["sessions"])
    first.notify("exit", None)
    await first.ended()
    assert len((await second.request("agent/status"))["sessions"]) == before - 1
    await second.leave()


def silent_client(box: Box) -> socket.socket:
    """Asks for all events of all tasks and never reads one."""
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(box.socket))
    params = {"processId": None, "rootUri": None, "capabilities": {}, "clientInfo": {"name": "silent"}}
    silent.sendall(to_frame({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}))
    silent.sendall(to_frame({"jsonrpc": "2.0", "id": 2, "method": "agent/subscribe", "params": {}}))
    return silent


@pytest.mark.slow
async def test_clients_that_never_read_cost_little_and_are_dropped(own_box: Box) -> None:
    """20 clients times 24 MB of events would be 480 MB; the daemon may hold one transcript of 24 MB, and 1 MB a client."""
    (own_box.repo / "long.py").write_text("x = 1\n" * 100)
    editor = await own_box.editor()
    await editor.request("agent/subscribe")
    process = psutil.Process(own_box.daemon.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(silent_client(own_box))
        step = {"say": "x", "repeat": 400_000, "read": ["long.py", 1], "times": 60}
        task_id = await editor.send_to_agent("cleanup", own_box.repo / "long.py", instruction=script(step))
        ended = asyncio.create_task(editor.state(task_id, "proposed", "needs-you", "failed", "stopped"))
        peak = before
        while not ended.done():
            await asyncio.wait([ended], timeout=0.05)
            peak = max(peak, process.memory_info().rss)
        assert (await editor.request("agent/task", {"taskId": task_id}))["turns"] == 61
        print(f"grew by {(peak - before) / 2**20:.0f} MB")
        assert peak - before < 160 * 2**20
        async with asyncio.timeout(3 * STALL_S):
            while (await editor.request("agent/status"))["sessions"] != ["test 1"]:
                await asyncio.to_thread(time.sleep, 0.5)
    await editor.leave()


async def test_requests_of_a_client_that_never_reads_are_not_all_read(box: Box) -> None:
    with silent_client(box) as silent:
        silent.setblocking(False)
        request = to_frame({"jsonrpc": "2.0", "id": "x" * 20_000, "method": "agent/status"})
        sent = 0
        while sent < 100 * 2**20:
            try:
                sent += silent.send(request)
            except BlockingIOError:
                if sent > 2**20 and not await takes_more(box, silent):
                    break
        assert sent < 32 * 2**20
    assert await is_well(box)


async def takes_more(box: Box, silent: socket.socket) -> bool:
    """After the daemon had time to serve others, is there room in the silent client's buffer?"""
    for _ in range(5):
        assert await is_well(box)
    _, writable, _ = select.select([], [silent], [], 0)
    return bool(writable)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be someone else")
async def test_other_users_are_turned_away_before_a_byte_is_read(own_box: Box) -> None:
    for folder in (own_box.home.folder, own_box.home.folder / "run", own_box.socket.parent):
        folder.chmod(0o711)
    own_box.socket.chmod(0o666)
    code = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(own_box.socket), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await stranger.communicate()
    assert output.strip() == b"b''" or b"ConnectionReset" in errors
    assert "of user 65534" in own_box.home.places.daemon_log.read_text()
    assert await is_well(own_box)


async def test_the_second_daemon_names_the_first(box: Box) -> None:
    second = await asyncio.to_thread(
        subprocess.run, SCRIPTED_DAEMON, env=box.home.env, capture_output=True, text=True, timeout=30, check=False
    )
    assert second.returncode == 1
    assert f"process {box.daemon.pid}" in second.stderr
    assert await is_well(box)


async def test_stop_parks_tasks_and_leaves_nothing(own_box: Box) -> None:
    editor = await own_box.editor()
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", own_box.repo / "one.py", instruction=script({"wait": "/nonexistent"}))
    await editor.state(task_id, "running")
    assert await editor.request("quadjet/stop") == {}
    await editor.ended()
    assert await asyncio.to_thread(own_box.daemon.wait, 20) == 0
    assert not own_box.socket.exists()
    with running_daemon(own_box.home):
        again = await own_box.editor()
        task = await again.request("agent/task", {"taskId": task_id})
        assert (task["state"], task["reason"]) == ("needs-you", "restart")
        await again.leave()


async def test_a_client_that_never_reads_does_not_hold_up_the_end(own_box: Box) -> None:
    editor = await own_box.editor()
    await editor.request("agent/subscribe")
    with silent_client(own_box):
        step = {"say": "x", "repeat": 400_000, "read": ["one.py", 1]}
        task_id = await editor.send_to_agent("cleanup", own_box.repo / "one.py", instruction=script(step, step, step))
        await editor.state(task_id, "proposed", "needs-you")
        await editor.request("quadjet/stop")
        await editor.ended()
        assert await asyncio.to_thread(own_box.daemon.wait, 12) == 0


async def test_a_killed_daemon_leaves_a_stale_socket_and_its_journal(own_box: Box) -> None:
    editor = await own_box.editor()
    await editor.request("agent/subscribe")
    task_id = await editor.send_to_agent("cleanup", own_box.repo / "one.py", instruction=script({"edit": ["one.py", "1", "9"]}))
    await editor.state(task_id, "proposed")
    own_box.daemon.send_signal(signal.SIGKILL)
    await editor.ended()
    assert await asyncio.to_thread(own_box.daemon.wait, 20) == -signal.SIGKILL
    assert own_box.socket.exists()
    with running_daemon(own_box.home):
        again = await own_box.editor()
        answer = await again.request("agent/accept", {"taskId": task_id})
        assert answer["task"]["state"] == "accepted"
        await again.leave()


async def test_the_log_is_private_and_holds_no_document(box: Box) -> None:
    editor = await box.editor()
    editor.open_document(box.repo / "one.py", "SECRET = 1\n")
    with pytest.raises(RpcError):
        await editor.request("textDocument/codeAction", {"textDocument": {"uri": 5, "x": "SECRET"}})
    await editor.leave()
    log = box.home.places.daemon_log
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "SECRET" not in log.read_text()

"""`quadjet lsp` as editors run it: a process with pipes. The daemon behind it is real, its model scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from editor_client import SCRIPTED_DAEMON, Home, fresh_home, running_daemon, to_frame
from quadjet.daemon.bridge import NoDaemonError
from quadjet.daemon.shell_client import DaemonError, connect

BRIDGE = (
    "import sys\nfrom quadjet.daemon import bridge, config\nsys.exit(bridge.main(config.Places.from_environment(), {command!r}))"
)
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"processId": None, "rootUri": None, "capabilities": {}},
}
SHUTDOWN = {"jsonrpc": "2.0", "id": 2, "method": "shutdown"}
EXIT = {"jsonrpc": "2.0", "method": "exit"}


@pytest.fixture
def home() -> Iterator[Home]:
    with fresh_home() as found:
        yield found
        # Daemons that a bridge started are nobody's children; this home's are ended with it.
        for pid in daemons_of(found):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while daemons_of(found) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert daemons_of(found) == []


def daemons_of(home: Home) -> list[int]:
    return [process.pid for process in psutil.process_iter() if _is_daemon_of(process, home)]


def _is_daemon_of(process: psutil.Process, home: Home) -> bool:
    try:
        return SCRIPTED_DAEMON[1] in process.cmdline() and process.environ().get("XDG_RUNTIME_DIR") == home.env["XDG_RUNTIME_DIR"]
    except psutil.Error:
        return False  # it ended meanwhile


def start(home: Home, command: list[str] | None = None) -> subprocess.Popen[bytes]:
    code = BRIDGE.format(command=command or SCRIPTED_DAEMON)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=home.env, stdin=pipe, stdout=pipe, stderr=pipe)


def read_frame(process: subprocess.Popen[bytes]) -> dict[str, object]:
    assert process.stdout is not None
    length = 0
    while (line := process.stdout.readline()) not in (b"\r\n", b""):
        if line.startswith(b"Content-Length"):
            length = int(line.split(b":")[1])
    message: dict[str, object] = json.loads(process.stdout.read(length))
    return message


def send(process: subprocess.Popen[bytes], *messages: object) -> None:
    assert process.stdin is not None
    process.stdin.write(b"".join(map(to_frame, messages)))
    process.stdin.flush()


def daemon_pid(home: Home) -> int:
    async def ask() -> int:
        async with await connect(home.places, start=False) as client:
            return int((await client.request("agent/status"))["pid"])

    return asyncio.run(ask())


def test_starts_a_daemon_that_outlives_it_and_attaches_to_it_next_time(home: Home) -> None:
    first = start(home)
    send(first, INITIALIZE)
    assert read_frame(first)["id"] == 1
    pid = daemon_pid(home)
    assert os.getsid(pid) != os.getsid(0)
    send(first, SHUTDOWN, EXIT)
    output, errors = first.communicate(timeout=20)
    assert (first.returncode, errors) == (0, b"")
    assert b'"id": 2' in output
    second = start(home)
    send(second, INITIALIZE)
    read_frame(second)
    assert daemon_pid(home) == pid
    second.kill()
    second.communicate()


def test_bridges_started_at_once_share_one_daemon(home: Home) -> None:
    bridges = [start(home) for _ in range(3)]
    for bridge in bridges:
        send(bridge, INITIALIZE)
    for bridge in bridges:
        assert read_frame(bridge)["id"] == 1
    deadline = time.monotonic() + 30
    while len(pids := daemons_of(home)) != 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # those that lost the race need a moment to find out
    assert pids == [daemon_pid(home)]
    for bridge in bridges:
        send(bridge, EXIT)
        bridge.communicate(timeout=20)


def test_replies_still_arrive_after_the_end_of_input(home: Home) -> None:
    with running_daemon(home):
        process = start(home)
        output, errors = process.communicate(to_frame(INITIALIZE) + to_frame({**SHUTDOWN, "id": 5}), timeout=20)
    assert (process.returncode, errors) == (0, b"")
    assert b'"id": 1' in output
    assert b'"id": 5' in output


def test_ends_when_the_daemon_ends(home: Home) -> None:
    with running_daemon(home) as daemon:
        process = start(home)
        send(process, INITIALIZE)
        read_frame(process)
        daemon.kill()
        process.communicate(timeout=20)
    assert process.returncode in (0, 1)


def test_ends_when_the_editor_stops_reading(home: Home) -> None:
    with running_daemon(home):
        process = start(home)
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        send(process, INITIALIZE)
        assert process.wait(20) == 0
        process.communicate()


def test_a_large_message_passes_both_ways_at_once(home: Home) -> None:
    """Both pipes fill up: neither direction may wait for the other."""
    with running_daemon(home):
        process = start(home)
        send(process, INITIALIZE)
        read_frame(process)
        big = {"jsonrpc": "2.0", "id": "x" * 2**20, "method": "agent/status"}
        sender = threading.Thread(target=send, args=(process, *[big] * 8))
        sender.start()
        assert [len(str(read_frame(process)["id"])) for _ in range(8)] == [2**20] * 8
        sender.join()
        send(process, EXIT)
        process.communicate(timeout=20)


def test_a_daemon_that_cannot_start_is_explained(home: Home) -> None:
    process = start(home, [sys.executable, "-c", "import sys; sys.exit('no model here')"])
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (1, b"")
    assert b"no model here" in errors
    assert b"quadjet serve" in errors


def test_a_missing_program_is_explained(home: Home) -> None:
    process = start(home, ["/nonexistent/python"])
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"cannot be started" in errors


def test_a_long_socket_path_is_explained(home: Home) -> None:
    home.env["XDG_RUNTIME_DIR"] = str(home.folder / ("long" * 30))
    Path(home.env["XDG_RUNTIME_DIR"]).mkdir()
    _, errors = start(home).communicate(timeout=20)
    assert b"unix sockets take 100" in errors


def test_a_stale_socket_means_a_new_daemon(home: Home) -> None:
    home.places.runtime_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home.places.socket))
    process = start(home)
    send(process, INITIALIZE)
    assert read_frame(process)["id"] == 1
    send(process, EXIT)
    process.communicate(timeout=20)


def test_a_daemon_that_is_stopping_is_followed_by_a_new_one(home: Home) -> None:
    with running_daemon(home) as daemon:
        daemon.send_signal(signal.SIGTERM)
        process = start(home)
        send(process, INITIALIZE)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and daemon.poll() is None:
            time.sleep(0.05)
        output, _ = process.communicate(to_frame(EXIT), timeout=20)
    # Attached to the old one in its last moment, or to the new one: never an error.
    assert process.returncode == 0
    del output


async def test_shell_client_reports_refusals_and_the_end(home: Home) -> None:
    with pytest.raises(NoDaemonError, match="quadjet serve"):
        await connect(home.places, start=False)
    with running_daemon(home) as daemon:
        async with await connect(home.places, start=False) as client:
            with pytest.raises(DaemonError, match="no task nope") as error:
                await client.request("agent/task", {"taskId": "nope"})
            assert error.value.fix == "quadjet tasks lists them"
            daemon.kill()
            assert [item async for item in client.notifications()] == []
            with pytest.raises(DaemonError, match="ended the connection"):
                await client.request("agent/status")

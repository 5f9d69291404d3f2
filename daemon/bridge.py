"""`quadjet lsp`: bytes between an editor's stdio and the daemon's socket. Attaches first, starts the daemon if there is none.

Knows nothing of the protocol, so it works through ssh, WSL and containers, and costs no more than a pipe.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..engine.errors import QuadjetError
from .config import Places
from .endpoint import check_socket_path

START_TIMEOUT_S = 30.0
RACE_S = 1.0
CLOSE_TIMEOUT_S = 10.0
_POLL_S = 0.05
_CHUNK = 2**16
_LOG_TAIL = 2000

SERVE_COMMAND = (sys.executable, "-m", "quadjet.daemon.cli", "serve")


class NoDaemonError(QuadjetError):
    """No daemon answers, and none could be started."""


def main(places: Places, command: Sequence[str] = SERVE_COMMAND) -> int:
    """Bridge stdio until either side ends. The exit code; a failure is explained on stderr."""
    try:
        connection = attach(places, command)
    except QuadjetError as error:
        print(f"quadjet lsp: {error}", file=sys.stderr)  # noqa: T201
        return 1
    with connection:
        return _pump(connection)


def attach(places: Places, command: Sequence[str] = SERVE_COMMAND) -> socket.socket:
    """A connection to the daemon, started with `command` if there is none. Raises NoDaemonError or EndpointError."""
    check_socket_path(places.socket)
    connection = try_connect(places)
    if connection is not None:
        return connection
    daemon = _start(places, command)
    deadline = time.monotonic() + START_TIMEOUT_S
    ended_at: float | None = None
    while time.monotonic() < deadline:
        connection = try_connect(places)
        if connection is not None:
            return connection
        if ended_at is None and daemon.poll() is not None:
            ended_at = time.monotonic()
        # One that lost the race for the lock ends too: the winner is about to listen.
        if ended_at is not None and time.monotonic() > ended_at + RACE_S:
            raise NoDaemonError(f"the daemon ended at once:\n{_tail(places)}", "run it in a terminal to see why: quadjet serve")
        time.sleep(_POLL_S)
    raise NoDaemonError(f"the daemon did not answer within {START_TIMEOUT_S:.0f} s", f"look at {places.daemon_log}")


def try_connect(places: Places) -> socket.socket | None:
    """A connection to the daemon that is there, or None."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(places.socket))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise NoDaemonError(f"the socket {places.socket} cannot be used: {error.strerror}", "quadjet doctor") from None
    return connection


def _start(places: Places, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A daemon of its own session: it outlives this process, its terminal and its ssh connection, and holds none of them open."""
    with _open_start_log(places) as log:
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
        except OSError as error:
            raise NoDaemonError(
                f"the daemon cannot be started: {error.strerror}: {command[0]}", "install quadjet again"
            ) from None


def _open_start_log(places: Places) -> BinaryIO:
    """What a daemon says before its own log is open."""
    try:
        places.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(_start_log(places), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, 0)
    except OSError as error:
        raise NoDaemonError(
            f"{places.logs} cannot be written: {error.strerror}", "free disk space, or set XDG_STATE_HOME"
        ) from None
    return os.fdopen(descriptor, "wb")


def _start_log(places: Places) -> Path:
    return places.logs / "daemon-start.log"


def _tail(places: Places) -> str:
    return _start_log(places).read_text("utf-8", "replace")[-_LOG_TAIL:].rstrip()


def _pump(connection: socket.socket) -> int:
    """Copy both ways. The editor's end of input is passed on, and the daemon then has CLOSE_TIMEOUT_S to finish its answers."""
    threading.Thread(target=_to_daemon, args=(connection,), daemon=True).start()
    try:
        while data := connection.recv(_CHUNK):
            _write_all(sys.stdout.fileno(), data)
    except TimeoutError:
        return 0
    except BrokenPipeError:
        return 0  # the editor went away
    except OSError as error:
        print(f"quadjet lsp: the connection to the daemon broke: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _to_daemon(connection: socket.socket) -> None:
    stdin = sys.stdin.fileno()
    try:
        while data := os.read(stdin, _CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(CLOSE_TIMEOUT_S)
    except OSError:
        pass  # the daemon is gone: the other direction sees it and says so


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]

"""The door of the daemon, tried by real processes and sockets."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from quadjet.daemon import endpoint
from quadjet.daemon.endpoint import DaemonRunningError, EndpointError, bind, peer_of

HOLD = """
import sys
from pathlib import Path
from quadjet.daemon.endpoint import DaemonRunningError, bind
try:
    held = bind(Path(sys.argv[1]))
except DaemonRunningError as error:
    print(f"lost to {error.pid}", flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
    held.close()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    # Not tmp_path: its names are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="qj") as folder:
        yield Path(folder) / "run" / "daemon.sock"


def hold(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=20)


def test_socket_and_folder_are_private(path: Path) -> None:
    before = os.umask(0)
    try:
        held = bind(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    held.close()
    assert not path.exists()


def test_the_kernel_names_the_peer(path: Path) -> None:
    held = bind(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        held.listener.setblocking(True)
        accepted, _ = held.listener.accept()
        with accepted:
            assert peer_of(accepted) == (os.getpid(), os.getuid())
    held.close()


def test_a_second_daemon_is_told_who_runs(path: Path) -> None:
    first = hold(path)
    assert said(first) == "held"
    with pytest.raises(DaemonRunningError, match=f"process {first.pid}") as error:
        bind(path)
    assert "quadjet stop" in error.value.fix
    end(first)
    bind(path).close()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    first = hold(path)
    assert said(first) == "held"
    first.kill()
    end(first)
    assert path.exists()
    bind(path).close()


def test_of_many_that_start_at_once_exactly_one_stays(path: Path) -> None:
    started = [hold(path) for _ in range(4)]
    first_lines = [said(process) for process in started]
    winner = started[first_lines.index("held")]
    assert sorted(first_lines) == ["held", *[f"lost to {winner.pid}"] * 3]
    for process in started:
        end(process)


def test_what_is_no_socket_is_never_removed(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    with pytest.raises(EndpointError, match="no socket"):
        bind(path)
    assert path.read_text() == "mine"


def test_a_served_socket_without_lock_is_never_removed(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(DaemonRunningError, match=f"process {os.getpid()}"):
            bind(path)
    assert path.exists()


def test_long_paths_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 60) / "daemon.sock"
    with pytest.raises(EndpointError, match=f"has {len(os.fsencode(path))} bytes"):
        bind(path)
    assert not path.parent.exists()


def test_a_linked_folder_is_refused(path: Path) -> None:
    real = path.parent.with_name("real")
    real.mkdir(mode=0o700)
    path.parent.symlink_to(real)
    with pytest.raises(EndpointError, match="link"):
        bind(path)


def test_a_folder_that_others_can_write_is_refused_and_a_readable_one_closed(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(EndpointError, match="chmod 700"):
        bind(path)
    path.parent.chmod(0o755)
    bind(path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_someone_else_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.chown(path.parent, 65534, 65534)
    with pytest.raises(EndpointError, match="belongs to user 65534"):
        bind(path)


def test_a_linked_lock_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    target = path.with_name("target")
    target.write_text("precious")
    path.with_name(endpoint.LOCK_NAME).symlink_to(target)
    with pytest.raises(EndpointError, match=r"lock file"):
        bind(path)
    assert target.read_text() == "precious"

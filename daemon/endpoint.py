"""The daemon's door: a private folder, a lock that one process holds, a unix socket, and who is at the other end of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from ..engine.errors import QuadjetError

MAX_SOCKET_PATH_BYTES = 100
"""sun_path holds 108 bytes on Linux and 104 elsewhere, a closing zero included."""
LOCK_NAME = "daemon.lock"
_BACKLOG = 64


class EndpointError(QuadjetError):
    """The socket or its folder cannot be used."""


class DaemonRunningError(EndpointError):
    """Another daemon of this user holds the lock. `answers` is False while it starts or stops."""

    def __init__(self, pid: int | None, answers: bool) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"a daemon runs already, as {holder}", "use it (quadjet status), or end it first (quadjet stop)")
        self.pid = pid
        self.answers = answers


class Peer(NamedTuple):
    pid: int
    uid: int


class Endpoint:
    """The bound socket and the lock, held until `close`."""

    def __init__(self, path: Path, listener: socket.socket, lock: int) -> None:
        self.path = path
        self.listener = listener
        self._lock = lock

    def close(self) -> None:
        """Removes the socket, then lets the lock go. The lock file stays: removing it would let two processes hold two locks."""
        self.path.unlink(missing_ok=True)
        self.listener.close()
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def bind(path: Path) -> Endpoint:
    """Take the lock beside `path`, clear a stale socket, bind and listen. DaemonRunningError or EndpointError if it cannot."""
    check_socket_path(path)
    prepare_folder(path.parent)
    lock = _take_lock(path.with_name(LOCK_NAME), path)
    try:
        _remove_stale(path)
        listener = _listen(path)
    except BaseException:
        os.close(lock)
        raise
    return Endpoint(path, listener, lock)


def check_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(
            f"the socket path {path} has {length} bytes, and unix sockets take {MAX_SOCKET_PATH_BYTES}",
            "set XDG_RUNTIME_DIR to a shorter folder of yours",
        )


def prepare_folder(folder: Path) -> None:
    """A folder that only this user can use: created 0700, or found so. Links and other people's folders are refused."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        info = folder.lstat()
    except OSError as error:
        raise EndpointError(f"the runtime folder {folder} cannot be made: {error.strerror}", "set XDG_RUNTIME_DIR") from None
    if not stat.S_ISDIR(info.st_mode):
        raise EndpointError(f"the runtime folder {folder} is a link or no folder", f"remove it: rm {folder}")
    if info.st_uid != os.getuid():
        raise EndpointError(
            f"the runtime folder {folder} belongs to user {info.st_uid}", "set XDG_RUNTIME_DIR to a folder of yours"
        )
    if info.st_mode & 0o022:
        # Whoever could write here may have put a socket of theirs in our place.
        raise EndpointError(f"others can write to the runtime folder {folder}", f"empty it, then: chmod 700 {folder}")
    if info.st_mode & 0o055:
        folder.chmod(0o700)


def peer_of(connection: socket.socket) -> Peer:
    """Who connected, by word of the kernel."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _take_lock(path: Path, socket_path: Path) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EndpointError(f"the lock file {path} cannot be opened: {error.strerror}", f"remove it: rm {path}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        digits = os.read(lock, 32).strip()
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise EndpointError(f"{path} cannot be locked: {error.strerror}", "set XDG_RUNTIME_DIR to a local folder") from None
        raise DaemonRunningError(int(digits) if digits.isdigit() else None, _answers(socket_path)) from None
    os.ftruncate(lock, 0)
    os.write(lock, b"%d\n" % os.getpid())
    return lock


def _remove_stale(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise EndpointError(f"{path} is in the way and is no socket", f"look at it, then remove it: rm {path}")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise EndpointError(f"the socket {path} cannot be tried: {error.strerror}", f"remove it: rm {path}") from None
        raise DaemonRunningError(peer_of(probe).pid, True)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    # The socket is born private: a chmod afterwards would leave a moment in which others could connect.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise EndpointError(
            f"the socket {path} cannot be bound: {error.strerror}", "free disk space, or set XDG_RUNTIME_DIR"
        ) from None
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener

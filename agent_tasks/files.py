"""Reads and writes single files below a root, whatever links stand in the way, and writes them whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import ParamSpec, TypeVar

from .errors import TaskError
from .policy import PolicyError

P = ParamSpec("P")
T = TypeVar("T")
MAX_FILE_BYTES = 64 * 1024 * 1024


class StaleFileError(TaskError):
    """The file is no longer what was read. Nothing was written."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """asyncio.to_thread whose cancellation waits for the thread, so that nothing is written after a clean-up."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # seen, and overtaken by the cancellation
        raise


def content_hash(data: bytes | None) -> str:
    """Names a state of a file; empty for one that does not exist."""
    return "" if data is None else sha256(data).hexdigest()


def read_file(root: Path, path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
    """The bytes of the regular file `path` below `root`, None if there is none.

    `path` must hold no symlink (check_path returns such paths). PolicyError if one is met: none can be slipped in after a check.
    """
    try:
        with _folder(root, path, create=False) as folder:
            return _read_at(folder, path, max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TaskError(f"{path} could not be read: {error.strerror}", "make it readable") from error


def write_file(root: Path, path: Path, data: bytes | None, expected: str) -> None:
    """Replaces `path` below `root` by `data` (None deletes it), if its content still has the hash `expected`.

    A crash leaves the old or the new file, never a mix. Permissions are kept; missing folders are made. StaleFileError when
    the content is another one, TaskError when the disk is full or the folder read-only.
    """
    try:
        with _folder(root, path, create=data is not None) as folder:
            current = _read_at(folder, path, MAX_FILE_BYTES)
            if content_hash(current) != expected:
                raise StaleFileError(f"{path.name} changed since it was read", "read it again, then repeat the change")
            if data is not None:
                _replace_at(folder, path.name, data)
            elif current is not None:
                os.unlink(path.name, dir_fd=folder)
    except OSError as error:
        raise TaskError(
            f"{path} could not be written: {error.strerror}. It is as it was.", "free space, or make its folder writable"
        ) from error


@contextlib.contextmanager
def _folder(root: Path, path: Path, create: bool) -> Iterator[int]:
    """The open folder of `path`, walked from `root` without following a link."""
    parts = path.relative_to(root).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = _open_at(folder, part, os.O_RDONLY | os.O_DIRECTORY, path)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_at(folder: int, name: str, flags: int, path: Path) -> int:
    if name in ("..", "."):
        raise PolicyError(f"{path} is not a plain path", "give it without '..'")
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(folder, name)):
            raise PolicyError(f"{path} leads through a symbolic link", "use the path that the link points to") from error
        raise


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _read_at(folder: int, path: Path, max_bytes: int) -> bytes | None:
    try:
        descriptor = _open_at(folder, path.name, os.O_RDONLY, path)
    except FileNotFoundError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise PolicyError(f"{path} is not a regular file", "choose a file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TaskError(f"{path.name} has {status.st_size:,} bytes; at most {max_bytes:,} are read", "choose a smaller file")
    return data


def _replace_at(folder: int, name: str, data: bytes) -> None:
    temporary = f".{name[:200]}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _keep_owner_and_mode(folder, name, file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _keep_owner_and_mode(folder: int, name: str, descriptor: int) -> None:
    try:
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    new = os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid) and os.geteuid() == 0:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))

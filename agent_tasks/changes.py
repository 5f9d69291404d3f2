"""What an agent changed in its worktree, and what of it may be proposed."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import TaskError
from .files import MAX_FILE_BYTES, read_file
from .git import Git
from .policy import protected_reason, secret_reason
from .staging import LeftOut
from .task import ChangeKind


class ChangedFile(NamedTuple):
    """`path` is relative to the worktree; bytes are None where there is no file."""

    path: Path
    base: bytes | None
    new: bytes | None
    kind: ChangeKind


class ChangeList(NamedTuple):
    files: list[ChangedFile]
    refused: list[LeftOut]
    """What the agent changed and may not propose: protected and secret names, links, permissions."""


class _Entry(NamedTuple):
    mode: bytes
    blob: bytes


async def list_changes(git: Git, tree: Path) -> ChangeList:
    """What differs in `tree` from the index of `git`, sorted by path. Ignored files do not count."""
    out = await git.run("ls-files", "-z", "--modified", "--deleted", "--others", "--exclude-standard")
    paths = sorted({path for path in out.split(b"\0") if path})
    if not paths:
        return ChangeList([], [])
    entries = await _base_entries(git, paths)
    blobs = await _read_blobs(git, [entry.blob for entry in entries.values()])
    return await asyncio.to_thread(_compare, tree, paths, entries, blobs)


async def _base_entries(git: Git, paths: Iterable[bytes]) -> dict[bytes, _Entry]:
    wanted = set(paths)
    entries: dict[bytes, _Entry] = {}
    for line in (await git.run("ls-files", "-z", "--stage")).split(b"\0"):
        head, _, path = line.partition(b"\t")
        if path in wanted:
            mode, blob, _ = head.split(b" ")
            entries[path] = _Entry(mode, blob)
    return entries


async def _read_blobs(git: Git, blobs: list[bytes]) -> dict[bytes, bytes]:
    out = await git.run("cat-file", "--batch", stdin=b"".join(blob + b"\n" for blob in blobs))
    found: dict[bytes, bytes] = {}
    position = 0
    for blob in blobs:
        head_end = out.index(b"\n", position)
        if out[position:head_end].endswith(b" missing"):
            raise TaskError("the snapshot's own copy of a file is gone", "send the task again")
        size = int(out[position:head_end].split(b" ")[2])
        found[blob] = out[head_end + 1 : head_end + 1 + size]
        position = head_end + size + 2
    return found


def _compare(tree: Path, paths: list[bytes], entries: Mapping[bytes, _Entry], blobs: Mapping[bytes, bytes]) -> ChangeList:
    changes = ChangeList([], [])
    for raw in paths:
        path = Path(os.fsdecode(raw))
        entry = entries.get(raw)
        base = blobs[entry.blob] if entry else None
        reason = _reason_to_refuse(tree, path, raw, entry)
        if not reason:
            try:
                new = read_file(tree, tree / path)
            except TaskError as error:
                reason = error.message
        if reason:
            changes.refused.append(LeftOut(path.as_posix(), reason))
        elif new != base:
            kind = ChangeKind.CREATE if base is None else ChangeKind.DELETE if new is None else ChangeKind.MODIFY
            changes.files.append(ChangedFile(path, base, new, kind))
        elif base is not None:
            changes.refused.append(LeftOut(path.as_posix(), "only its permissions changed"))
    return changes


def _reason_to_refuse(tree: Path, path: Path, raw: bytes, entry: _Entry | None) -> str:
    if raw.endswith(b"/"):
        return "a repository of its own"
    if reason := secret_reason(path) or protected_reason(path) or _name_reason(path):
        return reason
    try:
        status = os.lstat(tree / path)
    except OSError:
        return "a symbolic link was removed" if entry and entry.mode == b"120000" else ""
    if stat.S_ISLNK(status.st_mode) or (entry and entry.mode == b"120000"):
        return "symbolic links are not proposed"
    if stat.S_ISREG(status.st_mode) and status.st_size > MAX_FILE_BYTES:
        return f"it has {status.st_size:,} bytes"
    return ""


def _name_reason(path: Path) -> str:
    return "its name is not valid text" if any("\ud800" <= char <= "\udfff" for char in str(path)) else ""

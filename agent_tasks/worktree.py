"""Snapshot worktrees: a private copy of the user's folder, unsaved and untracked work included, for one task to work in.

Everything lives below one folder of our state directory: `<task id>/<task id>` (the copy), `<task id>/snapshot.json`, and
`.stores/*.git` (see staging.py). Nothing is ever written in the user's folder, not even below .git, so a crash leaves nothing.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .changes import ChangeList, list_changes
from .errors import TaskError
from .files import in_thread
from .git import Git, user_excludes_file
from .mounts import Mounts, holds_packages, python_folders
from .policy import protected_reason
from .staging import LeftOut, SnapshotLimits, open_store, stage

_STORES = ".stores"
_UNFINISHED = "objects/*/tmp_*"
"""What git leaves in a store when it fails or is killed."""
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DELETE_TRIES = 20
_HEAVY = (".venv", "venv", "node_modules")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The worktree `path` holds what `root` held when it was made."""

    path: Path
    root: Path
    base_commit: str
    git_dir: Path
    left_out: tuple[LeftOut, ...] = ()

    @property
    def mounts(self) -> Mounts:
        """What commands see: the worktree also at the user's own path, its git data and heavy ignored folders read-only."""
        present = [name for name in _HEAVY if holds_packages(self.root, name) and _is_absent(self.path / name)]
        heavy = [(self.root / name, name) for name in present]
        guarded = [(entry, entry.name) for entry in self.path.iterdir() if protected_reason(PurePosixPath(entry.name))]
        fixed = [(source, name) for source, name in guarded if not source.is_symlink()]
        readable = [self.git_dir.parent.parent, *python_folders(path for path, name in heavy if name != "node_modules")]
        return Mounts(shown_at=self.root, readable=tuple(readable), inside=tuple(fixed + heavy))

    def relative(self, path: str | Path) -> str:
        """A path below the worktree or below the user's root, as tools print them, relative to both; others as they are."""
        for folder in (self.path, self.root):
            if Path(path).is_relative_to(folder):
                return Path(path).relative_to(folder).as_posix()
        return str(path)

    async def changes(self) -> ChangeList:
        """What differs from the snapshot, sorted by path. Ignored files do not count."""
        return await list_changes(Git(self.git_dir, work_tree=self.path, excludes=await user_excludes_file()), self.path)

    async def remove(self) -> None:
        """Deletes the worktree and all that belongs to it alone. Nothing happens if it is gone."""
        await asyncio.to_thread(_delete, self.path.parent)
        await asyncio.to_thread(_delete, self.git_dir)


def _is_absent(path: Path) -> bool:
    """Not in the snapshot: at most the empty folder that a mount left."""
    return not path.is_symlink() and (not path.exists() or (path.is_dir() and not any(path.iterdir())))


async def create_snapshot(
    root: Path,
    task_id: str,
    worktrees: Path,
    overlays: Mapping[Path, bytes],
    limits: SnapshotLimits | None = None,
) -> Snapshot:
    """Copies `root` as it is now, with `overlays` (absolute path to bytes) for files with unsaved text, or raises TaskError."""
    if not _TASK_ID.fullmatch(task_id):
        raise TaskError(f"{task_id!r} is no task id", "use letters, digits, '-' and '_'")
    worktrees = await asyncio.to_thread(worktrees.resolve)
    folder = worktrees / task_id
    try:
        root = await asyncio.to_thread(_checked_root, root)
        _make_folders(worktrees, folder)  # no thread and no await: a cancelled snapshot must know whether it made them
        return await _create(root, folder, worktrees, overlays, limits or SnapshotLimits())
    except OSError as error:
        raise TaskError(
            f"the snapshot of {root} could not be made: {error}. Your files are as they were.",
            f"free space below {worktrees}, or point XDG_STATE_HOME to another disk",
        ) from error


def reopen(worktrees: Path, root: Path, task_id: str) -> Snapshot:
    """The snapshot of a task after a restart. TaskError if it is not there whole."""
    folder = worktrees.resolve() / task_id
    try:
        data = json.loads((folder / "snapshot.json").read_text())
        snapshot = Snapshot(
            path=folder / task_id,
            root=Path(data["root"]),
            base_commit=data["base_commit"],
            git_dir=_git_dir(folder.parent / _STORES / data["store"], task_id),
            left_out=tuple(LeftOut(path, reason) for path, reason in data["left_out"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"the worktree of task {task_id} is gone or broken: {error}", "send the task again") from error
    if snapshot.root != root.resolve() or not snapshot.git_dir.is_dir() or not snapshot.path.is_dir():
        raise TaskError(f"the worktree of task {task_id} is gone, or belongs to another folder", "send the task again")
    return snapshot


async def remove_leftovers(worktrees: Path, keep: Collection[str]) -> list[str]:
    """Deletes what tasks other than `keep` left, for instance at a crash, and stores that no kept task uses. Returns the ids."""
    return await asyncio.to_thread(_remove_leftovers, worktrees, frozenset(keep))


async def remove_leftovers_of(worktrees: Path, task_id: str) -> None:
    """Deletes what an interrupted run of the task left, so that it can begin again."""
    if not _TASK_ID.fullmatch(task_id):
        raise TaskError(f"{task_id!r} is no task id", "use letters, digits, '-' and '_'")
    await asyncio.to_thread(_delete, worktrees / task_id)
    for store in await asyncio.to_thread(list, (worktrees / _STORES).glob("*.git")):
        await asyncio.to_thread(_delete, _git_dir(store, task_id))


async def _create(root: Path, folder: Path, worktrees: Path, overlays: Mapping[Path, bytes], limits: SnapshotLimits) -> Snapshot:
    task_id, scratch = folder.name, folder / "scratch"
    store: Path | None = None
    done = False
    try:
        store = await open_store(root, worktrees / _STORES)
        staged = await stage(root, store, scratch, overlays=overlays, limits=limits, private=worktrees)
        # Named after the task, so that git's data of one worktree is never taken for that of another.
        snapshot = Snapshot(folder / task_id, root, staged.commit, _git_dir(store, task_id), staged.left_out)
        await Git(store).run("worktree", "add", "--quiet", "--detach", str(snapshot.path), staged.commit)
        await in_thread(shutil.rmtree, scratch)
        await in_thread(_record, snapshot, store.name)
        done = True
        return snapshot
    finally:
        if not done:
            await asyncio.shield(_clean_up(worktrees, task_id, store))


async def _clean_up(worktrees: Path, task_id: str, store: Path | None) -> None:
    """After a snapshot that failed: it leaves nothing that would keep a full disk full."""
    await remove_leftovers_of(worktrees, task_id)
    if store is not None:
        await asyncio.to_thread(_delete_all, _abandoned(worktrees, task_id, store))


def _abandoned(worktrees: Path, task_id: str, store: Path) -> list[Path]:
    """What of a store nobody needs: unfinished files, or all of it. Runs on the event loop, where snapshots begin: none of them
    may come between the look and the rename."""
    if any(worktrees.glob("*/scratch")):
        return []  # another snapshot is being made, and may be writing into this store
    if any((store / "worktrees").glob("*")):
        return list(store.glob(_UNFINISHED))
    return [store.rename(store.with_name(f".old-{task_id}"))]


def _delete_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            _delete(path)
        else:
            path.unlink(missing_ok=True)


def _git_dir(store: Path, task_id: str) -> Path:
    return store / "worktrees" / task_id


def _checked_root(root: Path) -> Path:
    try:
        root = root.resolve(strict=True)
    except OSError as error:
        raise TaskError(f"{root} cannot be opened: {error.strerror}", "choose an existing folder") from error
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK) or root == Path(root.anchor):
        raise TaskError(f"{root} is not a folder that a task can work on", "open the project's own folder")
    return root


def _make_folders(worktrees: Path, folder: Path) -> None:
    worktrees.mkdir(mode=0o700, parents=True, exist_ok=True)
    worktrees.chmod(0o700)
    (worktrees / _STORES).mkdir(exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        raise TaskError(f"task {folder.name} has a worktree already", "remove it, or reopen it") from error
    (folder / "scratch").mkdir()


def _record(snapshot: Snapshot, store: str) -> None:
    """Written last: a folder without it is a leftover."""
    data = {
        "root": str(snapshot.root),
        "base_commit": snapshot.base_commit,
        "store": store,
        "left_out": [(item.path, item.reason) for item in snapshot.left_out],
    }
    temporary = snapshot.path.with_name("snapshot.json.new")
    temporary.write_text(json.dumps(data))
    temporary.replace(snapshot.path.with_name("snapshot.json"))


def _remove_leftovers(worktrees: Path, keep: frozenset[str]) -> list[str]:
    if not worktrees.is_dir():
        return []
    removed: list[str] = []
    used: set[Path] = set()
    for folder in sorted(worktrees.iterdir()):
        if folder.name == _STORES:
            continue
        store = _store_of(folder) if folder.name in keep else None
        if store:
            used.add(worktrees / _STORES / store)
        else:
            _delete(folder)
            removed.append(folder.name)
    for path in (worktrees / _STORES).glob("*"):
        if path not in used:
            _delete(path)
    _delete_all((worktrees / _STORES).glob(f"*.git/{_UNFINISHED}"))
    for git_dir in (worktrees / _STORES).glob("*.git/worktrees/*"):
        if git_dir.name not in keep:
            _delete(git_dir)
    return removed


def _store_of(folder: Path) -> str | None:
    """The name of the store of a whole worktree; None for a broken one."""
    try:
        return str(json.loads((folder / "snapshot.json").read_text())["store"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _delete(folder: Path) -> None:
    """Deletes a tree even where commands took its permissions away, and while a git of a killed daemon still writes into it.

    Links are not followed.
    """
    for _ in range(_DELETE_TRIES):
        try:
            _delete_once(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        else:
            return
    _delete_once(folder)


def _delete_once(folder: Path) -> None:
    if folder.is_symlink() or not folder.exists():
        return
    for directory, folders, _ in os.walk(folder):
        for name in folders:
            inner = Path(directory, name)
            if not inner.is_symlink() and not os.access(inner, os.R_OK | os.W_OK | os.X_OK):
                inner.chmod(0o700)
    shutil.rmtree(folder)

"""How the user's folder becomes a commit in a store of our own, without git ever working in the user's repository.

A store is a bare repository per workspace folder in our state directory. Its index is kept between snapshots, so only files
that changed are read again. Conversions are switched off for every path: a blob is the file, byte for byte.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath

from .errors import TaskError
from .files import in_thread
from .git import Git, GitError, user_excludes_file
from .policy import secret_reason

_RAW = "* -text !eol !crlf !ident !filter !working-tree-encoding !diff !merge\n"
_JUNK = (
    *("__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/"),
    *(".hypothesis/", ".tox/", ".nox/", ".coverage", ".coverage.*", ".DS_Store", "*.egg-info/"),
)
_MAX_LISTING = 1 << 26
_MANY = 500


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """What a snapshot may hold: it is a copy of the folder."""

    max_files: int = 100_000
    max_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of the folder, or of a result, that was not taken. `path` is relative to the folder."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Staged:
    commit: str
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class UserRepository:
    """Where the user's git keeps its things. They are read as files, never used by git as its own."""

    top: Path
    git_dir: Path
    common_dir: Path


def find_repository(root: Path) -> UserRepository | None:
    """The repository that holds `root`, found as git finds it: the nearest .git upwards, a folder or a "gitdir:" file."""
    for top in (root, *root.parents):
        marker = top / ".git"
        git_dir = _redirected(marker, "gitdir: ") if marker.is_file() else marker
        if git_dir is not None and (git_dir / "HEAD").is_file():
            common = _redirected(git_dir / "commondir", "") or git_dir
            return UserRepository(top, git_dir, common)
    return None


async def open_store(root: Path, stores: Path) -> Path:
    """The store of `root`, made if there is none. It appears in one step, so a crash leaves no half of it."""
    repository = await in_thread(find_repository, root)
    top = repository.top if repository else root
    store = stores / f"{sha256(os.fsencode(root) + b'//' + os.fsencode(top)).hexdigest()[:20]}.git"
    if not store.is_dir():
        new = stores / f".new-{secrets.token_hex(6)}"
        object_format = await in_thread(_object_format, repository)
        await Git(new).run("init", "--quiet", "--bare", "--template=", f"--object-format={object_format}")
        (new / "info").mkdir(exist_ok=True)
        (new / "info" / "attributes").write_text(_RAW)
        try:
            new.rename(store)
        except OSError:  # another snapshot of the same folder was faster
            shutil.rmtree(new)
    return store


async def stage(
    root: Path, store: Path, scratch: Path, *, overlays: Mapping[Path, bytes], limits: SnapshotLimits, private: Path
) -> Staged:
    """Commit `root` as it is now, with `overlays` (absolute path to bytes) in place of the files on disk.

    In: tracked and untracked files. Out: ignored ones, secrets, nested repositories, unreadable files, and `private` (our own
    state, should it lie inside). `scratch` is an empty folder for temporary files.
    """
    repository = await in_thread(find_repository, root)
    top = repository.top if repository else root
    prefix = "" if root == top else root.relative_to(top).as_posix() + "/"
    git = Git(store, work_tree=top, index=scratch / "index", excludes=await user_excludes_file())
    await in_thread(_prepare, store, scratch, repository, top, private)
    tracked = await _tracked_but_ignored(git, repository, scratch, prefix)
    listed = set(await _list(git, prefix, "--modified", "--deleted", "--others"))
    take, left_out = await in_thread(_select, top, prefix, listed | tracked, limits)
    await _add(git, take)
    unwanted = set(await _list(git, prefix, "--cached", "--ignored")) - tracked
    await git.run("update-index", "--force-remove", "-z", "--stdin", stdin=b"".join(p + b"\0" for p in unwanted))
    await in_thread(_publish_index, scratch / "index", store / "index")
    left_out += await _overlay(git, root, prefix, overlays)
    return Staged(await _commit(git, prefix), tuple(left_out))


def _prepare(store: Path, scratch: Path, repository: UserRepository | None, top: Path, private: Path) -> None:
    """The ignore rules of this moment, and the index of the last snapshot to start from."""
    rules = [*_JUNK]
    if private.is_relative_to(top):
        rules.append(f"/{private.relative_to(top).as_posix()}/")
    exclude = repository.common_dir / "info" / "exclude" if repository else None
    text = exclude.read_bytes() if exclude and _is_plain(exclude) else b""
    temporary = store / "info" / f"exclude-{secrets.token_hex(4)}"
    temporary.write_bytes("\n".join(rules).encode() + b"\n" + text)
    temporary.replace(store / "info" / "exclude")
    if (store / "index").exists():
        # With its times: git tells files changed in the moment of the last listing by the age of the index.
        shutil.copy2(store / "index", scratch / "index")


async def _tracked_but_ignored(git: Git, repository: UserRepository | None, scratch: Path, prefix: str) -> set[bytes]:
    """Files that the user tracks although a rule ignores them. The user's index is read from a copy."""
    if repository is None or not _is_plain(repository.git_dir / "index"):
        return set()
    copy = scratch / "user-index"
    await in_thread(_copy_index, repository.git_dir, copy, git.git_dir)
    try:
        return set(await _list(replace(git, index=copy), prefix, "--cached", "--ignored"))
    except GitError as error:
        raise TaskError(
            f"the index of {repository.top} cannot be read: {error.output}", f"see `git -C {repository.top} status`"
        ) from error


def _copy_index(git_dir: Path, copy: Path, store: Path) -> None:
    shutil.copy2(git_dir / "index", copy)
    for shared in git_dir.glob("sharedindex.*"):  # the other part of a split index is looked up in the git directory
        if _is_plain(shared):
            shutil.copy2(shared, store / shared.name)


async def _add(git: Git, paths: list[bytes]) -> None:
    # Many files go into one pack, which git does for "big" ones: a file for each would take several times as long.
    config = ("core.bigFileThreshold=1",) if len(paths) >= _MANY else ()
    listing = b"".join(path + b"\0" for path in paths)
    await git.run("update-index", "--add", "--remove", "--replace", "-z", "--stdin", stdin=listing, config=config)


async def _list(git: Git, prefix: str, *options: str) -> list[bytes]:
    paths = ["--", prefix] if prefix else []
    try:
        out = await git.run("ls-files", "-z", *options, "--exclude-standard", *paths, max_output=_MAX_LISTING)
    except GitError as error:
        if "wrote more than" in error.message:
            raise TaskError("the folder has too many files for a snapshot", "open the project's own folder") from error
        raise
    return [path for path in out.split(b"\0") if path]


def _select(top: Path, prefix: str, listed: Iterable[bytes], limits: SnapshotLimits) -> tuple[list[bytes], list[LeftOut]]:
    take: list[bytes] = []
    left_out: list[LeftOut] = []
    sizes: dict[bytes, int] = {}
    base = os.fsencode(top) + b"/"
    for path in sorted(listed):
        name = os.fsdecode(path)[len(prefix) :]
        if reason := _reason_to_leave(base, path, name, sizes):
            left_out.append(LeftOut(name, reason))
        else:
            take.append(path)
    _check_limits(top, sizes, limits)
    return take, left_out


def _reason_to_leave(base: bytes, path: bytes, name: str, sizes: dict[bytes, int]) -> str:
    """Empty for a file to take. Notes its size."""
    if path.endswith(b"/"):
        return "a repository of its own"
    if reason := secret_reason(PurePosixPath(name)):
        return reason
    try:
        status = os.lstat(base + path)
    except OSError:
        return ""  # deleted: the index must hear of it
    sizes[path] = status.st_size
    if stat.S_ISREG(status.st_mode) and not os.access(base + path, os.R_OK):
        return "it cannot be read"
    return ""


def _check_limits(top: Path, sizes: Mapping[bytes, int], limits: SnapshotLimits) -> None:
    total = sum(sizes.values())
    if len(sizes) <= limits.max_files and total <= limits.max_bytes:
        return
    largest = ", ".join(os.fsdecode(path) for path in sorted(sizes, key=lambda path: -sizes[path])[:3])
    raise TaskError(
        f"{top} has {len(sizes):,} files of {total / 1e6:,.0f} MB to copy; a snapshot holds at most {limits.max_files:,} files "
        f"and {limits.max_bytes / 1e6:,.0f} MB. The largest: {largest}",
        "name what tasks do not need in .gitignore, or open a smaller folder",
    )


async def _overlay(git: Git, root: Path, prefix: str, overlays: Mapping[Path, bytes]) -> list[LeftOut]:
    left_out: list[LeftOut] = []
    entries: list[bytes] = []
    for path, data in overlays.items():
        real = await in_thread(path.resolve)
        if not real.is_relative_to(root):
            continue
        name = real.relative_to(root)
        if reason := secret_reason(name):
            left_out.append(LeftOut(name.as_posix(), reason))
            continue
        blob = await git.run("hash-object", "-w", "--no-filters", "--stdin", stdin=data)
        mode = b"100755" if os.access(real, os.X_OK) else b"100644"
        entries.append(mode + b" " + blob.strip() + b"\t" + os.fsencode(prefix) + os.fsencode(name.as_posix()) + b"\0")
    await git.run("update-index", "--add", "--replace", "-z", "--index-info", stdin=b"".join(entries))
    return left_out


async def _commit(git: Git, prefix: str) -> str:
    if prefix and not await _list(git, prefix, "--cached"):
        tree = await git.run("mktree")
    else:
        tree = await git.run("write-tree", *([f"--prefix={prefix}"] if prefix else []))
    commit = await git.run("commit-tree", "-m", "snapshot", tree.decode().strip())
    return commit.decode().strip()


def _publish_index(index: Path, kept: Path) -> None:
    if not index.exists():  # nothing was ever staged
        return
    temporary = kept.with_name(f"index-{secrets.token_hex(4)}")
    shutil.copy2(index, temporary)
    temporary.replace(kept)


def _is_plain(path: Path) -> bool:
    """A file of the user's git directory that is no link: that could lead to something that commands must not see."""
    return path.is_file() and not path.is_symlink()


def _redirected(marker: Path, start: str) -> Path | None:
    """The folder that a one-line file of git names, relative to where the file lies."""
    try:
        with marker.open("rb") as file:
            text = os.fsdecode(file.read(8192)).rstrip("\r\n")
    except OSError:
        return None
    if not text.startswith(start) or len(text) == len(start) or "\0" in text:
        return None
    return (marker.parent / text[len(start) :]).resolve()


def _object_format(repository: UserRepository | None) -> str:
    config = repository.common_dir / "config" if repository else None
    if config and config.is_file():
        return "sha256" if re.search(rb"(?im)^\s*objectformat\s*=\s*sha256\b", config.read_bytes()) else "sha1"
    return "sha1"

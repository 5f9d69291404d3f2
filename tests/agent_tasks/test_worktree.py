"""A snapshot holds what the user sees, and the user's folder stays byte for byte as it was, also when we are killed."""

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from quadjet.agent_tasks import worktree
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.staging import LeftOut, SnapshotLimits
from quadjet.agent_tasks.task import ChangeKind
from quadjet.agent_tasks.worktree import create_snapshot, remove_leftovers, reopen

GIT_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"), "user"),
}

ODD_NAME = "new/untracked \u00e9 \udcff\n.py"


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, env=GIT_ENVIRONMENT, capture_output=True, text=True, check=True)
    return done.stdout


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes | str]:
    """Files and links, without git's and empty folders."""
    paths = [path for path in folder.rglob("*") if ".git" not in path.relative_to(folder).parts]
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def fingerprint(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every entry below `folder`, .git included: mode, times, target and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with committed, staged, unstaged, untracked, ignored and deleted work."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet", "-b", "main")
    write(
        root,
        {
            ".gitignore": b"ignored/\n*.log\n",
            "committed.py": b"a\r\nb\r\n",
            "staged.py": b"old\n",
            "unstaged.py": b"old\n",
            "both.py": b"old\n",
            "deleted.py": b"old\n",
            "forced.log": b"tracked although ignored\n",
            "run.sh": b"#!/bin/sh\n",
            "latin.txt": b"caf\xe9\n",
            "data.bin": bytes(range(256)),
        },
    )
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("committed.py")
    git(root, "add", "-A")
    git(root, "add", "-f", "forced.log")
    git(root, "commit", "--quiet", "-m", "first")
    write(root, {"staged.py": b"staged\n", "both.py": b"staged\n"})
    git(root, "add", "staged.py", "both.py")
    write(
        root,
        {"unstaged.py": b"unstaged\n", "both.py": b"unstaged\n", ODD_NAME: b"u\n"},
    )
    write(root, {"ignored/build.o": b"x", "debug.log": b"x", ".env": b"TOKEN=1\n"})
    (root / "deleted.py").unlink()
    return root


EXPECTED: dict[str, bytes | str] = {
    ".gitignore": b"ignored/\n*.log\n",
    "committed.py": b"a\r\nb\r\n",
    "staged.py": b"staged\n",
    "unstaged.py": b"unstaged\n",
    "both.py": b"unstaged\n",
    "forced.log": b"tracked although ignored\n",
    "run.sh": b"#!/bin/sh\n",
    "latin.txt": b"caf\xe9\n",
    "data.bin": bytes(range(256)),
    "link": "committed.py",
    ODD_NAME: b"u\n",
}


async def test_a_snapshot_holds_the_work_in_progress(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {root / "committed.py": b"unsaved\r\n"})
    assert contents(snapshot.path) == {**EXPECTED, "committed.py": b"unsaved\r\n"}
    assert stat.S_IMODE((snapshot.path / "run.sh").stat().st_mode) & 0o111
    assert snapshot.left_out == (LeftOut(".env", "it usually holds secrets"),)
    assert await snapshot.changes() == ([], [])


async def test_the_user_s_folder_is_untouched(root: Path, tmp_path: Path) -> None:
    status, refs = git(root, "status", "--porcelain=v2", "--branch"), git(root, "log", "--all", "--oneline")
    before = fingerprint(root)
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {root / "staged.py": b"unsaved\n"})
    write(snapshot.path, {"staged.py": b"agent\n", "made.py": b"agent\n"})
    await snapshot.changes()
    assert list(snapshot.mounts.inside)
    await snapshot.remove()
    assert fingerprint(root) == before
    assert (git(root, "status", "--porcelain=v2", "--branch"), git(root, "log", "--all", "--oneline")) == (status, refs)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [".stores"]


async def test_a_second_snapshot_sees_what_changed_since(root: Path, tmp_path: Path) -> None:
    await create_snapshot(root, "t1", tmp_path / "state", {root / "both.py": b"unsaved\n"})
    write(root, {"staged.py": b"later.\n", "more.py": b"x\n", ".gitignore": b"ignored/\n*.log\nnew/\n"})
    (root / "unstaged.py").unlink()
    shutil.move(root / "latin.txt", root / "renamed.txt")
    (root / "data.bin").unlink()
    write(root, {"data.bin/inner": b"now a folder\n"})
    second = await create_snapshot(root, "t2", tmp_path / "state", {})
    expected = {
        **EXPECTED,
        "staged.py": b"later.\n",
        "more.py": b"x\n",
        "renamed.txt": b"caf\xe9\n",
        "data.bin/inner": b"now a folder\n",
    }
    for gone in ("unstaged.py", "latin.txt", "data.bin", ODD_NAME):
        del expected[gone]
    expected[".gitignore"] = b"ignored/\n*.log\nnew/\n"
    assert contents(second.path) == expected


async def test_nothing_of_the_repository_s_configuration_runs(root: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    script = tmp_path / "trap.sh"
    script.write_text(f"#!/bin/sh\ntouch {trap}\ncat\n")
    script.chmod(0o755)
    for name in ("post-checkout", "pre-commit", "post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (root / ".git" / "hooks" / name).write_text(script.read_text())
        (root / ".git" / "hooks" / name).chmod(0o755)
    for key in (
        "filter.x.clean",
        "filter.x.smudge",
        "filter.x.process",
        "core.fsmonitor",
        "diff.x.textconv",
        "core.pager",
        "alias.ls-files",
    ):
        git(root, "config", key, str(script))
    git(root, "config", "filter.x.required", "true")
    git(root, "config", "core.autocrlf", "true")
    write(
        root,
        {".gitattributes": b"* filter=x diff=x text eol=crlf ident working-tree-encoding=UTF-16\n", "unstaged.py": b"$Id$\n"},
    )
    (root / ".git" / "info" / "attributes").write_bytes(b"* filter=x\n")
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {root / "both.py": b"x\n"})
    write(snapshot.path, {"staged.py": b"agent\n"})
    await snapshot.changes()
    await snapshot.remove()
    assert not trap.exists()
    second = await create_snapshot(root, "t2", tmp_path / "state", {})
    assert contents(second.path)["unstaged.py"] == b"$Id$\n"
    assert contents(second.path)["committed.py"] == b"a\r\nb\r\n"
    with contextlib.suppress(subprocess.CalledProcessError):
        git(root, "add", "-A")
    assert trap.exists(), "the user's own git should have run the traps"


async def test_changes_list_what_the_agent_did(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {root / "committed.py": b"unsaved\r\n"})
    write(snapshot.path, {"committed.py": b"agent\r\n", "made/new.bin": b"\0\1", "data.bin": b"\0", "__pycache__/x.pyc": b"x"})
    (snapshot.path / "both.py").unlink()
    files, refused = await snapshot.changes()
    assert [(str(f.path), f.base, f.new, f.kind) for f in files] == [
        ("both.py", b"unstaged\n", None, ChangeKind.DELETE),
        ("committed.py", b"unsaved\r\n", b"agent\r\n", ChangeKind.MODIFY),
        ("data.bin", bytes(range(256)), b"\0", ChangeKind.MODIFY),
        ("made/new.bin", None, b"\0\1", ChangeKind.CREATE),
    ]
    assert refused == []


async def test_changes_that_agents_may_not_propose_are_named(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    names = [".vscode/settings.json", ".github/workflows/x.yml", ".env", "sub/AGENTS.md", "odd\udcff.py"]
    write(snapshot.path, dict.fromkeys(names, b"x"))
    (snapshot.path / "out").symlink_to("/etc/passwd")
    (snapshot.path / "link").unlink()
    (snapshot.path / "staged.py").unlink()
    (snapshot.path / "staged.py").symlink_to("../../outside")
    (snapshot.path / "both.py").chmod(0o755)
    git(snapshot.path, "init", "--quiet", "nested")
    files, refused = await snapshot.changes()
    assert files == []
    assert {item.path for item in refused} == {*names, "out", "link", "staged.py", "both.py", "nested"}


async def test_a_modified_git_link_in_the_worktree_leads_nowhere(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    evil = tmp_path / "evil.git"
    git(tmp_path, "init", "--quiet", "--bare", str(evil))
    git(evil, "config", "core.fsmonitor", f"touch {tmp_path / 'ran'}")
    (snapshot.path / ".git").write_text(f"gitdir: {evil}\n")
    write(snapshot.path, {"both.py": b"agent\n"})
    files, _ = await snapshot.changes()
    assert [str(file.path) for file in files] == ["both.py"]
    assert not (tmp_path / "ran").exists()


async def test_an_empty_repository(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    git(root, "init", "--quiet")
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert contents(snapshot.path) == {}
    write(snapshot.path, {"a.py": b"x"})
    assert [file.kind for file in (await snapshot.changes()).files] == [ChangeKind.CREATE]


async def test_a_folder_without_git(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    write(root, {"a.py": b"a\n", "sub/b.py": b"b\n", "node_modules/x/y.js": b"x", "__pycache__/a.pyc": b"x"})
    before = fingerprint(root)
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert contents(snapshot.path) == {"a.py": b"a\n", "sub/b.py": b"b\n"}
    assert fingerprint(root) == before


async def test_a_folder_inside_a_repository_is_copied_alone_under_the_rules_of_its_parents(root: Path, tmp_path: Path) -> None:
    write(root, {"inner/a.py": b"a\n", "inner/deep/b.py": b"b\n", "inner/x.log": b"ignored above\n"})
    snapshot = await create_snapshot(
        root / "inner", "t1", tmp_path / "state", {root / "inner/a.py": b"unsaved\n", root / "both.py": b"no"}
    )
    assert contents(snapshot.path) == {"a.py": b"unsaved\n", "deep/b.py": b"b\n"}
    write(snapshot.path, {"a.py": b"agent\n"})
    assert [str(file.path) for file in (await snapshot.changes()).files] == ["a.py"]
    empty = root / "ignored"
    assert contents((await create_snapshot(empty, "t2", tmp_path / "state", {})).path) == {}


async def test_nested_repositories_and_submodules_are_left_out_by_name(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    write(other, {"o.py": b"o\n"})
    git(other, "add", "-A")
    git(other, "commit", "--quiet", "-m", "o")
    git(root, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "sub")
    (root / "nested").mkdir()
    git(root / "nested", "init", "--quiet")
    write(root / "nested", {"n.py": b"n\n"})
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert {item.path for item in snapshot.left_out} == {".env", "nested/", "sub/"}
    assert not (snapshot.path / "nested").exists()


async def test_a_linked_worktree_of_the_user_works(root: Path, tmp_path: Path) -> None:
    git(root, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    write(tmp_path / "linked", {"forced.log": b"changed\n"})
    snapshot = await create_snapshot(tmp_path / "linked", "t1", tmp_path / "state", {})
    assert contents(snapshot.path)["forced.log"] == b"changed\n"


@pytest.mark.parametrize("name", ["info/exclude", "index", "sharedindex.0123", "config"])
async def test_links_in_the_git_folder_are_not_followed(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    (root / ".git" / name).unlink(missing_ok=True)
    (root / ".git" / name).symlink_to(tmp_path / "secret")
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    store = snapshot.git_dir.parent.parent
    assert not any(b"hunter2" in path.read_bytes() for path in store.rglob("*") if path.is_file())


async def test_split_and_sha256_indexes_are_read(tmp_path: Path) -> None:
    for name, options in (("split", []), ("sha256", ["--object-format=sha256"])):
        root = tmp_path / name
        root.mkdir()
        git(root, "init", "--quiet", *options)
        write(root, {".gitignore": b"*.log\n", "kept.log": b"x\n", "other.log": b"y\n"})
        git(root, "add", "-f", "kept.log")
        if name == "split":
            git(root, "update-index", "--split-index")
        snapshot = await create_snapshot(root, name, tmp_path / "state", {})
        assert set(contents(snapshot.path)) == {".gitignore", "kept.log"}


async def test_a_folder_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path / "big", {f"f{n}": b"x" * 100 for n in range(20)})
    for limits in (SnapshotLimits(max_files=19), SnapshotLimits(max_bytes=1999)):
        with pytest.raises(TaskError, match=r"20 files .* largest: f0, f1, f10.*\n.*name what tasks do not need in .gitignore"):
            await create_snapshot(tmp_path / "big", "t1", tmp_path / "state", {}, limits)
    assert (await create_snapshot(tmp_path / "big", "t1", tmp_path / "state", {})).path.is_dir()


@pytest.mark.parametrize("name", ["missing", "file"])
async def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TaskError):
        await create_snapshot(tmp_path / name, "t1", tmp_path / "state", {})


async def test_state_inside_the_workspace_is_not_copied(root: Path) -> None:
    await create_snapshot(root, "t1", root / ".state" / "worktrees", {})
    second = await create_snapshot(root, "t2", root / ".state" / "worktrees", {})
    assert contents(second.path) == EXPECTED


async def test_two_snapshots_at_once(root: Path, tmp_path: Path) -> None:
    made = await asyncio.gather(*(create_snapshot(root, f"t{n}", tmp_path / "state", {}) for n in range(4)))
    assert [contents(snapshot.path) for snapshot in made] == [EXPECTED] * 4


async def test_a_snapshot_that_fails_harms_no_other_that_is_being_made(root: Path, tmp_path: Path) -> None:
    state, small = tmp_path / "state", SnapshotLimits(max_files=1)
    failing = [create_snapshot(root, f"small{number}", state, {}, small) for number in range(3)]
    made, *failed = await asyncio.gather(create_snapshot(root, "t1", state, {}), *failing, return_exceptions=True)
    assert [type(error) for error in failed] == [TaskError] * 3
    assert isinstance(made, worktree.Snapshot), made
    assert contents(made.path) == EXPECTED
    assert (await made.changes()).files == []


async def test_a_task_has_one_worktree(root: Path, tmp_path: Path) -> None:
    await create_snapshot(root, "t1", tmp_path / "state", {})
    with pytest.raises(TaskError, match="has a worktree already"):
        await create_snapshot(root, "t1", tmp_path / "state", {})
    with pytest.raises(TaskError, match="no task id"):
        await create_snapshot(root, "../t2", tmp_path / "state", {})


async def test_a_snapshot_is_reopened_after_a_restart(root: Path, tmp_path: Path) -> None:
    made = await create_snapshot(root, "t1", tmp_path / "state", {})
    write(made.path, {"both.py": b"agent\n"})
    again = reopen(tmp_path / "state", root, "t1")
    assert again == made
    assert [file.new for file in (await again.changes()).files] == [b"agent\n"]
    await again.remove()
    with pytest.raises(TaskError, match="is gone"):
        reopen(tmp_path / "state", root, "t1")


async def test_leftovers_are_removed_and_kept_tasks_stay(root: Path, tmp_path: Path) -> None:
    kept = await create_snapshot(root, "kept", tmp_path / "state", {})
    dead = await create_snapshot(root, "dead", tmp_path / "state", {})
    (dead.path / "locked").mkdir(mode=0o000)
    write(tmp_path / "other", {"x": b"x"})
    await create_snapshot(tmp_path / "other", "gone", tmp_path / "state", {})
    unfinished = kept.git_dir.parent.parent / "objects" / "fe" / "tmp_obj_1"
    write(unfinished.parent, {unfinished.name: b"of a git that was killed"})
    assert await remove_leftovers(tmp_path / "state", keep=["kept"]) == ["dead", "gone"]
    assert contents(kept.path) == EXPECTED
    assert not unfinished.exists()
    assert len(list((tmp_path / "state" / ".stores").iterdir())) == 1
    assert await remove_leftovers(tmp_path / "state", keep=[]) == ["kept"]


async def test_an_interrupted_task_begins_again(root: Path, tmp_path: Path) -> None:
    other = await create_snapshot(root, "other", tmp_path / "state", {})
    broken = await create_snapshot(root, "t1", tmp_path / "state", {})
    (broken.path.parent / "snapshot.json").unlink()
    with pytest.raises(TaskError, match="gone or broken"):
        reopen(tmp_path / "state", root, "t1")
    await worktree.remove_leftovers_of(tmp_path / "state", "t1")
    assert contents((await create_snapshot(root, "t1", tmp_path / "state", {})).path) == EXPECTED
    shutil.rmtree(broken.path.parent)
    await remove_leftovers(tmp_path / "state", keep=["other"])
    again = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert contents(again.path) == EXPECTED
    assert (await other.changes(), await again.changes()) == (([], []), ([], []))


async def test_removing_twice_harms_no_other_task(root: Path, tmp_path: Path) -> None:
    first = await create_snapshot(root, "t1", tmp_path / "state", {})
    await first.remove()
    second = await create_snapshot(root, "t2", tmp_path / "state", {})
    await first.remove()
    write(second.path, {"both.py": b"agent\n"})
    assert len((await second.changes()).files) == 1


async def test_removal_does_not_follow_links(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    (snapshot.path / "trap").symlink_to(root)
    before = fingerprint(root)
    await snapshot.remove()
    assert fingerprint(root) == before


def _exists(path: Path) -> bool:
    return path.exists()


@pytest.mark.parametrize("moment", ["t1", "t1/scratch/index", "t1/t1/.git"])
async def test_a_cancelled_snapshot_leaves_nothing(root: Path, tmp_path: Path, moment: str) -> None:
    state = tmp_path / "state"
    making = asyncio.create_task(create_snapshot(root, "t1", state, {}))
    while not _exists(state / moment):  # noqa: ASYNC110  it appears in another process
        await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not (state / "t1").exists()
    assert contents((await create_snapshot(root, "t1", state, {})).path) == EXPECTED


SCRIPT = """
import asyncio, pathlib, sys
from quadjet.agent_tasks.worktree import create_snapshot
async def main():
    root, state = map(pathlib.Path, sys.argv[1:])
    print("go", flush=True)
    snapshot = await create_snapshot(root, "t1", state, {root / "both.py": b"unsaved"})
    print("made", flush=True)
    await snapshot.remove()
asyncio.run(main())
"""


def _run_and_kill(root: Path, state: Path, after_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(root), str(state)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "go\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


async def test_a_kill_at_any_moment_leaves_the_user_s_folder_as_it_was(root: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = fingerprint(root)
    for step in range(8):
        _run_and_kill(root, state, after_s=step * 0.02)
        assert fingerprint(root) == before
        await remove_leftovers(state, keep=["t1"] if step % 2 else [])
        await worktree.remove_leftovers_of(state, "t1")
        snapshot = await create_snapshot(root, f"after{step}", state, {})
        assert contents(snapshot.path) == EXPECTED
        await snapshot.remove()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [(os.urandom(3_000_000), "No space left"), (b"a" * 3_000_000, "unable to write file 'large'")],
    ids=["when it is stored", "when it is checked out"],
)
@pytest.mark.parametrize("others", [0, 1])
async def test_a_full_disk_is_named_and_costs_nothing(
    root: Path, small_disk: Path, data: bytes, message: str, others: int
) -> None:
    for number in range(others):
        await create_snapshot(root, f"other{number}", small_disk / "state", {})
    used = shutil.disk_usage(small_disk).used
    write(root, {"large": data})
    before = fingerprint(root)
    with pytest.raises(TaskError, match=message) as caught:
        await create_snapshot(root, "t1", small_disk / "state", {})
    assert "free space" in caught.value.fix
    assert not (small_disk / "state" / "t1").exists()
    assert fingerprint(root) == before
    assert shutil.disk_usage(small_disk).used < used + 200_000


@pytest.fixture
def read_only(root: Path) -> Iterator[Path]:
    folders = [path for path in [root, *root.rglob("*")] if path.is_dir() and not path.is_symlink()]
    for folder in folders:
        folder.chmod(0o555)
    yield root
    for folder in folders:
        folder.chmod(0o755)


async def test_a_read_only_folder_is_copied(read_only: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(read_only, "t1", tmp_path / "state", {})
    assert contents(snapshot.path) == EXPECTED


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_unreadable_files_are_left_out_by_name(root: Path, tmp_path: Path) -> None:
    write(root, {"private.txt": b"x"})
    (root / "private.txt").chmod(0)
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert LeftOut("private.txt", "it cannot be read") in snapshot.left_out


async def test_paths_that_tools_print_are_made_relative(root: Path, tmp_path: Path) -> None:
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert [snapshot.relative(path) for path in (root / "a/b.py", snapshot.path / "a/b.py", "a/b.py", "/usr/x")] == [
        *["a/b.py", "a/b.py", "a/b.py", "/usr/x"]
    ]

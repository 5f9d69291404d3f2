"""Files are written whole or not at all, never through a link."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.files import StaleFileError, content_hash, read_file, write_file
from quadjet.agent_tasks.policy import PolicyError


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_with_its_mode_and_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(b"old")
    path.chmod(0o750)
    write_file(tmp_path, path, b"new", content_hash(b"old"))
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o750)
    assert _names(tmp_path) == ["run.sh"]


def test_a_file_is_created_with_its_folders_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "new.py"
    write_file(tmp_path, path, b"x", content_hash(None))
    assert read_file(tmp_path, path) == b"x"
    write_file(tmp_path, path, None, content_hash(b"x"))
    assert read_file(tmp_path, path) is None


@pytest.mark.parametrize("seen", [b"older", None])
def test_a_file_that_changed_since_it_was_read_is_not_written(tmp_path: Path, seen: bytes | None) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"typed meanwhile")
    with pytest.raises(StaleFileError):
        write_file(tmp_path, path, b"new", content_hash(seen))
    assert path.read_bytes() == b"typed meanwhile"


def test_a_file_that_vanished_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StaleFileError):
        write_file(tmp_path, tmp_path / "a.py", b"new", content_hash(b"old"))
    assert _names(tmp_path) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "f").write_bytes(b"theirs")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "f")
    for path in (root / "folder" / "f", root / "file"):
        with pytest.raises(PolicyError, match="symbolic link"):
            read_file(root, path)
        with pytest.raises(PolicyError, match="symbolic link"):
            write_file(root, path, b"ours", content_hash(b"theirs"))
    with pytest.raises(PolicyError):
        write_file(root, root / "x" / ".." / ".." / "outside" / "f", b"ours", content_hash(b"theirs"))
    assert (outside / "f").read_bytes() == b"theirs"


def test_a_hard_link_outside_keeps_its_content(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "theirs").write_bytes(b"old")
    os.link(tmp_path / "theirs", root / "f")
    write_file(root, root / "f", b"new", content_hash(b"old"))
    assert ((tmp_path / "theirs").read_bytes(), (root / "f").read_bytes()) == (b"old", b"new")


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(PolicyError, match="not a regular file"):
            read_file(tmp_path, tmp_path / name)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 1000)
    with pytest.raises(TaskError, match="has 1,000 bytes"):
        read_file(tmp_path, tmp_path / "big", max_bytes=999)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"old")
    script = (
        "import pathlib, resource, signal, sys\n"
        "from quadjet.agent_tasks.files import content_hash, write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "write_file(root, root / 'a.py', b'x' * 100_000, content_hash(b'old'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert f"{os.strerror(errno.EFBIG)}. It is as it was." in done.stderr
    assert (path.read_bytes(), _names(tmp_path)) == (b"old", ["a.py"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(TaskError, match="Permission denied"):
        write_file(tmp_path, folder / "a.py", b"x", content_hash(None))

"""The one place that runs git, and never with a person's repository as its git directory.

Git works in stores of our own: their configuration is ours, so hooks, filters, file system monitors, aliases and credential
helpers of the user's repository have nowhere to act from. The user's global and system configuration is not read either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import TaskError

_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.protectNTFS=false",
    "core.compression=1",
    "core.fsync=none",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
    "checkout.workers=0",
)
_ENVIRONMENT = {
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_PAGER": "cat",
    "GIT_AUTHOR_NAME": "Quadjet",
    "GIT_AUTHOR_EMAIL": "quadjet@localhost",
    "GIT_COMMITTER_NAME": "Quadjet",
    "GIT_COMMITTER_EMAIL": "quadjet@localhost",
}


class GitError(TaskError):
    """git failed. `output` is what it said."""

    def __init__(self, message: str, fix: str = "", output: str = "") -> None:
        super().__init__(message, fix)
        self.output = output


@dataclass(frozen=True, slots=True)
class Git:
    """git bound to one of our stores. `excludes` is one more file of ignore rules, such as the user's own."""

    git_dir: Path
    work_tree: Path | None = None
    index: Path | None = None
    excludes: Path | None = None

    async def run(
        self, *args: str, stdin: bytes = b"", config: tuple[str, ...] = (), max_output: int = 1 << 28, timeout_s: float = 300
    ) -> bytes:
        """stdout. GitError on failure, too much output or too much time. Cancelling kills git and what it started."""
        environment = _environment(GIT_DIR=str(self.git_dir))
        if self.work_tree:
            environment["GIT_WORK_TREE"] = str(self.work_tree)
        if self.index:
            environment["GIT_INDEX_FILE"] = str(self.index)
        options = (f"core.excludesFile={self.excludes or os.devnull}", *config)
        process = await asyncio.create_subprocess_exec(
            *_command(*args, options=options),
            cwd=self.work_tree or self.git_dir.parent,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await _communicate(process, stdin, max_output)
        except TimeoutError as error:
            raise GitError(f"git {args[0]} did not end within {timeout_s:.0f} s", "see whether the disk answers") from error
        finally:
            await _end(process)
        if process.returncode != 0:
            raise _failure(args, err)
        return out


def run_merge_file(folder: Path, ours: str, base: str, theirs: str, labels: tuple[str, str, str]) -> tuple[int, bytes]:
    """(number of conflicts, merged text) of three files in `folder`. Blocks for some milliseconds."""
    names = [option for label in labels for option in ("-L", label)]
    command = _command("merge-file", "-p", *names, ours, base, theirs)
    environment = _environment(GIT_CEILING_DIRECTORIES=str(folder.parent))
    done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode < 0 or done.returncode > 127:
        raise _failure(("merge-file",), done.stderr)
    return done.returncode, done.stdout


async def user_excludes_file() -> Path | None:
    """The user's global ignore file. Asking git for one value of the global configuration runs nothing."""
    command = [_program(), "config", "--global", "--includes", "--type=path", "--get", "core.excludesFile"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    process = await asyncio.create_subprocess_exec(
        *command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    configured = os.fsdecode(out.rstrip(b"\n"))
    path = Path(configured) if configured else _config_home() / "git" / "ignore"
    return path if path.is_file() else None


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _program() -> str:
    path = shutil.which("git")
    if path is None:
        raise TaskError("git is not installed", "apt-get install git")
    return str(Path(path).absolute())


def _command(*args: str, options: tuple[str, ...] = ()) -> list[str]:
    return [_program(), *(word for option in (*_OPTIONS, *options) for word in ("-c", option)), *args]


def _environment(**more: str) -> dict[str, str]:
    return {**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), **more}


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes, max_output: int) -> tuple[bytes, bytes]:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    _, out, err = await asyncio.gather(
        _feed(process.stdin, stdin), _read(process.stdout, max_output), _read(process.stderr, 1 << 20)
    )
    await process.wait()
    return out, err


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # git ended early; its exit code says why
        pipe.write(data)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


async def _read(pipe: asyncio.StreamReader, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await pipe.read(1 << 16):
        size += len(chunk)
        if size > limit:
            raise GitError(f"git wrote more than {limit:,} bytes", "choose a smaller folder")
        chunks.append(chunk)
    return b"".join(chunks)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _failure(args: tuple[str, ...], stderr: bytes) -> GitError:
    output = stderr.decode("utf-8", "replace").strip()
    fix = "free space, or point XDG_STATE_HOME to another disk" if _cannot_write(output) else ""
    return GitError(f"git {args[0]} failed: {output[-2000:]}", fix, output)


def _cannot_write(output: str) -> bool:
    """Whether the disk is full, as far as git says: of a file that it checks out it says only that it cannot write it."""
    return any(text in output for text in ("No space left", "Disk quota exceeded", "File too large", "unable to write file"))

"""Runs commands under bubblewrap, and nowhere else: without it there are no commands.

A command sees the system read-only, its worktree writable, an empty home and /tmp, and no network, terminal, input, other
process, token or socket. When the call returns, everything it started is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import TaskError
from .mounts import MADE_UP, Mounts, isolation, shown, view
from .text import neutralise

_SETTLE_S = 5
_FIRST_TO_DIE = ("/usr/bin/choom", "-n", "1000", "--")
"""Under memory pressure the kernel ends the command, not the daemon or the engine."""


class SandboxUnavailable(TaskError):
    """Commands are off. `message` says why, `fix` how to turn them on."""


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    available: bool
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Per command; memory, file size and open files hold for each of its processes. root is exempt from `max_processes`."""

    max_processes: int = 1024
    max_memory_bytes: int = 8 << 30
    max_file_bytes: int = 1 << 30
    max_open_files: int = 4096
    max_tmp_bytes: int = 1 << 30
    kept_output_bytes: int = 64 << 10
    max_output_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`output` is stdout and stderr together, safe to show; exit_code is 128 + the signal for a killed command."""

    exit_code: int
    output: str
    timed_out: bool
    elapsed_s: float


@dataclass(slots=True)
class _Output:
    """Keeps the first and the last part of what a command writes."""

    keep: int
    total: int = 0
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = max(self.keep // 2 - len(self.head), 0)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > self.keep:
            del self.tail[: len(self.tail) - self.keep // 2]

    def text(self) -> str:
        tail = self.tail[-(self.keep // 2) :]
        left_out = self.total - len(self.head) - len(tail)
        if not left_out:
            return neutralise((self.head + tail).decode("utf-8", "replace"))
        note = f"\n[... {left_out:,} bytes left out ...]\n"
        return neutralise(self.head.decode("utf-8", "replace")) + note + neutralise(tail.decode("utf-8", "replace"))


class Sandbox:
    """One way to run commands. Holds no state between them."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()

    def probe(self) -> SandboxStatus:
        """Whether commands can run: one is tried with everything but a worktree. Blocks for some 10 ms."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return SandboxStatus(False, "bubblewrap is not installed", "apt-get install bubblewrap")
        with _descriptors() as inherited:
            command = [*self._bubblewrap(bwrap, inherited), "--", *self._launcher(10), "true"]
            try:
                done = subprocess.run(
                    command,
                    env={},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    pass_fds=inherited.all,
                    timeout=10,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return SandboxStatus(False, f"{bwrap} does not run: {error}", "apt-get install --reinstall bubblewrap")
        if done.returncode == 0:
            return SandboxStatus(True)
        reason = neutralise(done.stderr.decode("utf-8", "replace")).strip() or f"it ends with {done.returncode}"
        return SandboxStatus(False, f"bubblewrap cannot make a sandbox: {reason}", _fix_for(reason))

    async def run(
        self,
        argv: Sequence[str],
        *,
        worktree: Path,
        cwd: Path | None = None,
        timeout_s: float = 120,
        on_output: Callable[[str], None] | None = None,
        mounts: Mounts | None = None,
        readable: Sequence[Path] = (),
    ) -> CommandResult:
        """Runs `argv` in `cwd` (default: the worktree) and waits for its end. Cancelling kills it with all it started.

        `on_output` gets complete lines as they come, until the output is longer than what is kept. `readable` adds to `mounts`.
        SandboxUnavailable when no sandbox can be made: the command has not run.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable("bubblewrap is not installed", "apt-get install bubblewrap")
        start = time.monotonic()
        mounts = mounts or Mounts()
        with _descriptors() as inherited:
            command = [*self._bubblewrap(bwrap, inherited), *view(worktree, mounts, readable), "--remount-ro", "/"]
            command += ["--chdir", str(shown(cwd or worktree, worktree, mounts)), "--", *self._launcher(timeout_s), *argv]
            process = await _start(command, inherited)
            output = _Output(self.limits.kept_output_bytes)
            reader = asyncio.create_task(self._read(process, output, on_output))
            try:
                timed_out = await _wait(process, timeout_s)
            finally:
                _kill(process)  # the sandbox dies with bubblewrap, so its output ends
                await asyncio.shield(_settle(process, reader, inherited))
            exit_code = inherited.report().get("exit-code")
        if exit_code is None:
            # bubblewrap exits when it cannot make a sandbox. Killed, by us or for want of memory, it took the command along.
            if process.returncode is not None and process.returncode >= 0:
                reason = output.text().strip() or f"bubblewrap ended with {process.returncode}"
                raise SandboxUnavailable(f"the command could not be started in the sandbox: {reason}", _fix_for(reason))
            exit_code = 128 + signal.SIGKILL
        return CommandResult(exit_code, output.text(), timed_out, time.monotonic() - start)

    async def _read(self, process: asyncio.subprocess.Process, output: _Output, on_output: Callable[[str], None] | None) -> None:
        assert process.stdout
        pending = b""
        while data := await process.stdout.read(1 << 16):
            output.add(data)
            if output.total > self.limits.max_output_bytes:
                _kill(process)
            if on_output and output.total <= output.keep:
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    on_output(neutralise(line.decode("utf-8", "replace")) + "\n")

    def _bubblewrap(self, bwrap: str, inherited: _Inherited) -> list[str]:
        isolated = isolation(inherited.made_up, self.limits.max_tmp_bytes)
        return [*_FIRST_TO_DIE, bwrap, "--json-status-fd", str(inherited.status), *isolated]

    def _launcher(self, timeout_s: float) -> list[str]:
        """Limits are set inside, so that only processes inside count."""
        cpu_s = int(timeout_s + 1) * (os.cpu_count() or 1)
        limits = {
            "core": 0,
            "nproc": self.limits.max_processes,
            "data": self.limits.max_memory_bytes,
            "fsize": self.limits.max_file_bytes,
            "nofile": self.limits.max_open_files,
            "cpu": cpu_s,
        }
        return ["/usr/bin/prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]


@dataclass(frozen=True, slots=True)
class _Inherited:
    """Descriptors that bubblewrap inherits: where it reports, and files made up for the sandbox."""

    status: int
    made_up: tuple[tuple[int, str], ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (self.status, *(descriptor for descriptor, _ in self.made_up))

    def report(self) -> dict[str, int]:
        """What bubblewrap said: "child-pid", the first process inside, and "exit-code" if the command ended by itself."""
        text = b""
        while chunk := os.pread(self.status, 4096, len(text)):
            text += chunk
        return {key: value for line in text.splitlines() for key, value in json.loads(line).items() if isinstance(value, int)}


@contextlib.contextmanager
def _descriptors() -> Iterator[_Inherited]:
    with contextlib.ExitStack() as stack:
        status = os.memfd_create("status")
        stack.callback(os.close, status)
        made_up: list[tuple[int, str]] = []
        for target, content in MADE_UP.items():
            descriptor = os.memfd_create("quadjet")
            stack.callback(os.close, descriptor)
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)
            made_up.append((descriptor, target))
        yield _Inherited(status, tuple(made_up))


async def _start(command: list[str], inherited: _Inherited) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=inherited.all,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxUnavailable(f"the sandbox could not be started: {error}", "apt-get install util-linux bubblewrap") from error


async def _wait(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Whether the time ran out before the end."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return True
    return False


async def _settle(process: asyncio.subprocess.Process, reader: asyncio.Task[None], inherited: _Inherited) -> None:
    """Returns when every process of the sandbox is gone: the first one inside ends after the others, but after bubblewrap too."""
    await process.wait()
    first = inherited.report().get("child-pid")
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(first)
            try:
                await _readable(descriptor)
            finally:
                os.close(descriptor)
    await reader


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(_SETTLE_S):
            await ready.wait()
    except TimeoutError:
        return  # the number has gone to another process meanwhile
    finally:
        loop.remove_reader(descriptor)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _fix_for(reason: str) -> str:
    """What an administrator does about a kernel, or a container, that bars user namespaces."""
    if "namespace" not in reason and "uid map" not in reason and "proc" not in reason:
        return "see `quadjet doctor`"
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "let AppArmor allow bubblewrap: apt-get install apparmor-profiles && cp /usr/share/apparmor/extra-profiles/"
            "bwrap-userns-restrict /etc/apparmor.d/ && systemctl reload apparmor"
        )
    for name, value in (("kernel/unprivileged_userns_clone", "0"), ("user/max_user_namespaces", "0")):
        if _sysctl(name) == value:
            return f"sysctl -w {name.replace('/', '.')}={1 if value == '0' and 'clone' in name else 15000}"
    return "in a container, start it with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""

"""What a kind and its tools work on: the files of one worktree, commands in the sandbox, progress. Never the user's tree."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import TaskError
from .files import content_hash, read_file, write_file
from .policy import check_path
from .sandbox import CommandResult, Sandbox
from .task import TaskSpec
from .worktree import Snapshot

MAX_FILE_BYTES = 2_000_000
MAX_REPORT_BYTES = 16_000_000
_SKIPPED = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Workbench:
    """Paths are relative to the worktree, with forward slashes. `no_commands` says why commands are off, or is empty."""

    spec: TaskSpec
    snapshot: Snapshot
    sandbox: Sandbox
    no_commands: str
    command_timeout_s: float
    progress: Callable[[str, int, int], None]
    seen: Callable[[str, bytes], None] = lambda path, data: None
    """Told of every file that the model reads or writes, by its path, with what is in it by then."""

    @property
    def tree(self) -> Path:
        return self.snapshot.path

    @property
    def target(self) -> str:
        """The file or folder that was asked for; "." for the whole workspace."""
        return self.spec.path.relative_to(self.spec.root).as_posix()

    def canonical(self, path: str) -> str:
        """Raises PolicyError for a path that leads out of the worktree or may not be written."""
        return check_path(self.tree, path, write=True).relative_to(self.tree).as_posix()

    def read(self, path: str) -> bytes:
        """Raises TaskError for what is missing, too large, secret, or outside."""
        data = read_file(self.tree, check_path(self.tree, path, write=False), MAX_FILE_BYTES)
        if data is None:
            raise TaskError(f"there is no file {path}")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Replace a file whole, keeping its mode."""
        full = check_path(self.tree, path, write=True)
        write_file(self.tree, full, data, content_hash(read_file(self.tree, full)))

    def files(self, folder: str = ".") -> list[str]:
        """Files under `folder` that a task may read, sorted; links and caches are left out."""
        top = check_path(self.tree, folder, write=False)
        found: list[str] = []
        for directory, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name not in _SKIPPED]
            paths = (Path(directory, name) for name in names if name not in _SKIPPED)
            found += [path.relative_to(self.tree).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
        return sorted(path for path in found if self._is_readable(path))

    def _is_readable(self, path: str) -> bool:
        try:
            check_path(self.tree, path, write=False)
        except TaskError:
            return False
        return True

    async def run(self, argv: Sequence[str], *, readable: Sequence[Path] = ()) -> CommandResult:
        """Run a command in the sandbox, where the worktree lies at the user's own path. Raises TaskError without a sandbox."""
        if self.no_commands:
            raise TaskError(f"commands are off: {self.no_commands}")
        return await self.sandbox.run(
            argv, worktree=self.tree, timeout_s=self.command_timeout_s, mounts=self.snapshot.mounts, readable=readable
        )

    async def run_for_report(
        self, argv: Callable[[str], Sequence[str]], *, readable: Sequence[Path] = ()
    ) -> tuple[CommandResult, bytes | None]:
        """Run a command that writes its result to a file, whose name in the worktree is handed to `argv`.

        None: it wrote none. Code of the workspace may have written it: treat it as any input.
        """
        name = f".quadjet-report-{secrets.token_hex(8)}"
        try:
            result = await self.run(argv(name), readable=readable)
            return result, read_file(self.tree, self.tree / name, MAX_REPORT_BYTES)
        finally:
            (self.tree / name).unlink(missing_ok=True)

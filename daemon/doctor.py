"""`quadjet doctor`: what a task needs, checked piece by piece. Each finding says what is wrong, why, and what mends it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..agent_tasks.edits import apply_edit
from ..agent_tasks.errors import TaskError
from ..agent_tasks.sandbox import Sandbox
from ..agent_tasks.worktree import create_snapshot
from ..engine.backend import CHECKPOINTS_PER_SLOT
from ..engine.budget import memory_budget
from ..engine.chat import Message, ToolSpec
from ..engine.errors import QuadjetError
from ..engine.gguf_file import GgufFile
from ..engine.grammar import GrammarCompiler
from ..engine.model import load_config
from ..engine.sequence import pages_for
from ..engine.template import ChatTemplate
from ..engine.tokenizer import Tokenizer
from ..engine.worker import DEFAULT_CONTEXT
from .bridge import try_connect
from .config import EngineConfig, Loaded, Places, load
from .endpoint import check_socket_path, prepare_folder
from .model_check import verify
from .models import ModelStore, Progress

_CUPY = ("cupy-cuda12x", "cupy-cuda13x")
_PROBE_TOOL = ToolSpec("probe", "Does nothing.", {"type": "object", "properties": {"text": {"type": "string", "maxLength": 8}}})


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, with less than it could."""
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    level: Level
    why: str
    fix: str = ""


def examine(flags: dict[str, str], places: Places, on_progress: Progress) -> Iterator[Finding]:
    """Every check in turn; one that fails does not stop the others, except that a model which does not open ends its own."""
    yield from _programs()
    yield _guarded("places", lambda: _places(places))
    try:
        loaded = load(flags, places)
    except QuadjetError as error:
        yield _broken("settings", error)
        return
    yield Finding("settings", Level.OK, _settings(loaded))
    yield from _model(loaded.config.engine, ModelStore(places.models), on_progress)
    yield from _gpu()
    yield _guarded("edit", lambda: asyncio.run(_edit()))


def _guarded(what: str, check: Callable[[], str]) -> Finding:
    """OK with what the check returns, or broken with what it raises."""
    try:
        return Finding(what, Level.OK, check())
    except (QuadjetError, TaskError, OSError) as error:
        return _broken(what, error)


def _broken(what: str, error: Exception) -> Finding:
    return Finding(what, Level.BROKEN, getattr(error, "message", str(error)), getattr(error, "fix", ""))


def _programs() -> Iterator[Finding]:
    yield Finding("python", Level.OK, f"{sys.version.split()[0]} at {sys.executable}")
    git = shutil.which("git")
    if git is None:
        yield Finding("git", Level.BROKEN, "git is not installed; tasks work in snapshots that git makes", "apt-get install git")
    else:
        version = subprocess.run([git, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        yield Finding("git", Level.OK, version)
    status = Sandbox().probe()
    why = (
        "commands of agents run in bubblewrap"
        if status.available
        else f"{status.reason}: agents run no commands, results stay unverified"
    )
    yield Finding("sandbox", Level.OK if status.available else Level.NOTE, why, status.fix)


def _places(places: Places) -> str:
    check_socket_path(places.socket)
    prepare_folder(places.runtime_dir)
    for folder in (places.data_dir, places.state_dir):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(existing, os.W_OK):
            raise QuadjetError(f"{folder} cannot be written", "mend its permissions, or set XDG_DATA_HOME and XDG_STATE_HOME")
    connection = try_connect(places)
    if connection is not None:
        connection.close()
    return f"socket {places.socket}, " + ("a daemon runs" if connection is not None else "no daemon runs")


def _settings(loaded: Loaded) -> str:
    changed = [key for key, origin in loaded.origins.items() if origin != "default"]
    return f"changed from the defaults: {', '.join(changed)}" if changed else "all defaults"


def _model(config: EngineConfig, models: ModelStore, on_progress: Progress) -> Iterator[Finding]:
    try:
        entry = verify(config.model, models, on_progress)
    except QuadjetError as error:
        yield _broken("model", error)
        return
    yield Finding("model", Level.OK, f"{config.model}: {entry.path}, sha256 {'as recorded' if entry.name else entry.sha256}")
    yield _guarded("memory", lambda: _memory(entry.path, config))
    with GgufFile.open(entry.path) as file:
        metadata = file.metadata
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
        template = ChatTemplate.from_gguf(metadata, tokenizer)
    except QuadjetError as error:
        yield _broken("template", error)
        return
    try:
        yield _guarded("template", lambda: _template(template))
        yield _guarded("grammar", lambda: _grammar(template, tokenizer))
    finally:
        template.close()


def _memory(path: Path, config: EngineConfig) -> str:
    with GgufFile.open(path) as file:
        model = load_config(file)
        context = config.context or min(model.context, DEFAULT_CONTEXT)
        slots = config.max_sequences
        saved = CHECKPOINTS_PER_SLOT * slots
        budget = memory_budget(file, model, num_pages=slots * pages_for(context), num_slots=slots, num_checkpoints=saved)
    budget.check()
    return f"{budget.total_bytes / 1e9:.1f} GB needed by {config.model}, {budget.free_bytes / 1e9:.1f} GB free"


def _template(template: ChatTemplate) -> str:
    count = len(template.render([Message("system", "s"), Message("user", "u")], [_PROBE_TOOL]))
    return f"renders, tools included ({count} tokens)"


def _grammar(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    GrammarCompiler(tokenizer).compile(template.dialect.tool_grammar([_PROBE_TOOL]))
    return "tool calls of this model's dialect compile"


def _gpu() -> Iterator[Finding]:
    installed = [name for name in _CUPY if _is_installed(name)]
    if len(installed) > 1:
        yield Finding(
            "gpu",
            Level.BROKEN,
            f"{' and '.join(installed)} are both installed and shadow each other",
            f"pip uninstall {installed[0]}",
        )
        return
    yield Finding("gpu", Level.NOTE, "not used: this version computes on the CPU, with the reference backend")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


async def _edit() -> str:
    """A real edit in a snapshot of a small repository: the parts that every task uses, without a model."""
    with tempfile.TemporaryDirectory(prefix="quadjet-doctor-") as folder:
        root, before = Path(folder) / "project", b"answer = 41\r\n"
        root.mkdir()
        (root / "a.py").write_bytes(before)
        await asyncio.to_thread(subprocess.run, ["git", "init", "--quiet", str(root)], check=True, capture_output=True)
        snapshot = await create_snapshot(root, "doctor", Path(folder) / "worktrees", {})
        try:
            edited = snapshot.path / "a.py"
            edited.write_bytes(apply_edit(edited.read_bytes(), "answer = 41", "answer = 42"))
            changes = await snapshot.changes()
        finally:
            await snapshot.remove()
        if [change.new for change in changes.files] != [b"answer = 42\r\n"] or (root / "a.py").read_bytes() != before:
            raise QuadjetError("an edit in a snapshot did not give the expected bytes", "report this")
    return "a snapshot was made, edited and compared, and its source stayed as it was"

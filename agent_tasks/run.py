"""One run of one task: snapshot, harness work, loop, gate, proposal. What it leaves in the journal is enough to go on from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..engine.chat import ChatModel, Message
from . import worktree
from .agent import Agent, Ending, EndReason, Limits
from .codec import to_json
from .draft_feed import DraftFeed
from .edits import make_hunks
from .errors import TaskError
from .kind import Kind, Verdict
from .kinds import KINDS
from .sandbox import Sandbox
from .store import TaskStore
from .task import Card, FileChange, Hunk, HunkState, NeedsYou, Proposal, Task, TaskSpec, TaskState
from .text import TextError
from .workbench import Workbench
from .workspace import OpenDocument, Overlays, Workspace, unsaved
from .worktree import Snapshot

ProgressCallback = Callable[[str, int, int], None]
ModelSource = Callable[[ProgressCallback], Awaitable[ChatModel]]
"""Raises ModelError if the model cannot be had."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Budgets of one run; a task that reaches one is parked, and resuming it grants the same again."""

    max_turns: int = 12
    timeout_s: float = 900.0
    max_running: int = 4
    command_timeout_s: float = 120.0


class Desk(Protocol):
    """How a run tells what happens. Everything goes to the journal."""

    def current(self) -> Task: ...

    def move(self, state: TaskState, message: str, **changes: Any) -> object: ...

    def park(self, reason: NeedsYou, message: str, **changes: Any) -> object: ...

    def emit(self, kind: str, data: dict[str, Any], **changes: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class TaskRun:
    task_id: str
    desk: Desk
    model_source: ModelSource
    store: TaskStore
    workspace: Workspace
    worktrees: Path
    settings: TaskSettings
    sandbox: Sandbox
    drafts: DraftFeed

    async def run(self) -> None:
        """To a proposal, or to a park. Raises TaskError or ModelError when the task cannot go on."""
        kind = KINDS[self.desk.current().spec.kind]
        self.desk.move(TaskState.RUNNING, "starting")
        checkpoint = await self.store.checkpoint(self.task_id)
        if checkpoint is None or "facts" not in checkpoint:
            checkpoint = await self._prepare(kind)
        bench = await self._bench(self._snapshot())
        transcript = await self.store.messages(self.task_id)
        ending = await self._loop(kind, bench, checkpoint, transcript) if transcript else Ending(EndReason.NO_MODEL)
        self.desk.move(TaskState.VERIFYING, "checking the result")
        verdict = await kind.verify(bench, checkpoint["facts"], ending)
        checkpoint["feedback"] = verdict.feedback
        await self.store.save_checkpoint(self.task_id, checkpoint)
        await self._propose(bench, checkpoint, verdict, ending)

    # -- before the loop -------------------------------------------------------------------------------------------------

    async def _prepare(self, kind: Kind) -> dict[str, Any]:
        """A fresh worktree and the kind's own work in it. Interrupted, it starts from the beginning."""
        spec = self.desk.current().spec
        if not spec.path.is_relative_to(spec.root):
            raise TaskError(f"{spec.path} is not in the workspace folder {spec.root}", "open the folder that holds it")
        if not await asyncio.to_thread(spec.path.exists):
            raise TaskError(f"{spec.path} does not exist", "it may have been deleted or moved: send the task from the new place")
        with contextlib.suppress(TaskError):  # there is one only if an earlier run was interrupted here
            await self._snapshot().remove()
        self._progress("taking a snapshot")
        await self.store.save_checkpoint(self.task_id, {})
        documents = self.workspace.open_under(spec.root)
        overlays = await asyncio.to_thread(unsaved, documents)
        snapshot = await worktree.create_snapshot(spec.root, self.task_id, self.worktrees, overlays.data)
        _check_target(snapshot, spec)
        plan = await kind.prepare(await self._bench(snapshot))
        await self.store.append_messages(self.task_id, 0, plan.messages)
        checkpoint = {
            "facts": plan.facts,
            "versions": {str(path): documents[path].version for path in overlays.data},
            "notes": _overlay_notes(overlays, documents, spec.root),
            "feedback": "",
        }
        await self.store.save_checkpoint(self.task_id, checkpoint)
        return checkpoint

    def _snapshot(self) -> Snapshot:
        return worktree.reopen(self.worktrees, self.desk.current().spec.root, self.task_id)

    async def _bench(self, snapshot: Snapshot) -> Workbench:
        status = await asyncio.to_thread(self.sandbox.probe)
        no_commands = "" if status.available else status.reason
        spec = self.desk.current().spec
        seen = partial(self.drafts.add_file, self.task_id)
        return Workbench(spec, snapshot, self.sandbox, no_commands, self.settings.command_timeout_s, self._progress, seen)

    def _progress(self, message: str, done: int = 0, total: int = 0) -> None:
        self.desk.emit("progress", {"message": message, "done": done, "total": total}, message=message)

    # -- the loop --------------------------------------------------------------------------------------------------------

    async def _loop(self, kind: Kind, bench: Workbench, checkpoint: dict[str, Any], transcript: list[Message]) -> Ending:
        model = await self.model_source(self._progress)
        self.drafts.attach(model)
        with contextlib.suppress(TaskError):  # a folder, or what no tool may read either: there is just nothing to copy from
            bench.seen(bench.target, await asyncio.to_thread(bench.read, bench.target))
        self._progress(f"{model.name} is working")
        task = self.desk.current()
        agent = Agent(
            model=model,
            toolbox=kind.toolbox(bench, checkpoint["facts"]),
            transcript=transcript,
            append=self._append,
            emit=self.desk.emit,
            move=self.desk.move,
            limits=Limits(self.settings.max_turns, self.settings.timeout_s),
            key=self.task_id,
            turns_before=task.turns,
        )
        return await agent.run(checkpoint.get("feedback", ""))

    async def _append(self, position: int, messages: Sequence[Message]) -> None:
        await self.store.append_messages(self.task_id, position, messages)

    # -- after the loop --------------------------------------------------------------------------------------------------

    async def _propose(self, bench: Workbench, checkpoint: dict[str, Any], verdict: Verdict, ending: Ending) -> None:
        card = await self._with_totals(verdict.card)
        proposal, notes = await self._proposal(bench, checkpoint["versions"], verdict.paths)
        card = replace(card, notes=(*card.notes, *checkpoint["notes"], *notes))
        self.desk.emit("card", {"card": to_json(card)}, card=card)
        self.desk.emit("hunks", {"hunks": to_json(proposal.hunks)}, proposal=proposal)
        if ending.reason in (EndReason.BUDGET, EndReason.STUCK):
            reason = NeedsYou.BUDGET if ending.reason is EndReason.BUDGET else NeedsYou.STUCK
            self.desk.park(reason, f"{ending.note}; resume it for another try, or review what there is: {card.title}")
        else:
            self.desk.move(TaskState.PROPOSED, card.title)

    async def _proposal(self, bench: Workbench, versions: dict[str, int], paths: Sequence[str]) -> tuple[Proposal, list[str]]:
        """The files that the kind vouches for; what else changed in the worktree is named and left out."""
        listed = await bench.snapshot.changes()
        spec = self.desk.current().spec
        decided = _decided(self.desk.current().proposal)
        changes: list[FileChange] = []
        notes: list[str] = []
        for file in listed.files:
            path = file.path.as_posix()
            if path not in paths:
                notes.append(f"left out, not part of the task: {path}")
                continue
            full = spec.root / file.path
            try:
                change = await asyncio.to_thread(make_hunks, full, file.base, file.new, versions.get(str(full)))
            except TextError as error:
                notes.append(f"left out: {error.message}")
                continue
            hunks = tuple(replace(hunk, state=decided.get(hunk.id, HunkState.PENDING)) for hunk in change.hunks)
            changes.append(replace(change, hunks=hunks))
            if change.flagged:
                notes.append(f"{path} deserves a second look: {change.flagged}")
        notes += [f"left out: {item.path}, {item.reason}" for item in listed.refused]
        return Proposal(tuple(changes)), notes

    async def _with_totals(self, card: Card) -> Card:
        """Tokens and time of all runs of this task, from its journal."""
        events = await self.store.events(self.task_id)
        turns = [event.data for event in events if event.type == "turn"]
        started = next((event.time for event in events if event.data.get("state") == TaskState.RUNNING.value), time.time())
        return replace(
            card,
            turns=len(turns),
            prompt_tokens=sum(turn["prompt_tokens"] for turn in turns),
            cached_tokens=sum(turn["cached_tokens"] for turn in turns),
            completion_tokens=sum(turn["completion_tokens"] for turn in turns),
            elapsed_s=round(time.time() - started, 1),
        )


def _check_target(snapshot: Snapshot, spec: TaskSpec) -> None:
    target = spec.path.relative_to(spec.root)
    if (snapshot.path / target).exists():
        return
    reasons = {item.path: item.reason for item in snapshot.left_out}
    why = reasons.get(target.as_posix(), "git ignores it, or it was deleted meanwhile")
    raise TaskError(f"{spec.path} is not in the snapshot that the task works on: {why}", "choose a file that git does not ignore")


def _overlay_notes(overlays: Overlays, documents: Mapping[Path, OpenDocument], root: Path) -> list[str]:
    names = {path: path.relative_to(root).as_posix() for path in documents}
    notes = [f"includes the unsaved text of {names[path]} in {documents[path].editor.name}" for path in overlays.data]
    return notes + [f"without the unsaved text of {names[path]}: {reason}" for path, reason in overlays.left_out.items()]


def _decided(proposal: Proposal | None) -> dict[str, HunkState]:
    """What a person said to hunks of an earlier proposal of the same task holds for equal hunks of the next."""
    hunks: Sequence[Hunk] = proposal.hunks if proposal else ()
    return {hunk.id: hunk.state for hunk in hunks if hunk.state in (HunkState.ACCEPTED, HunkState.REJECTED)}

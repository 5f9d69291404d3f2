"""The registry of tasks: who runs, who waits, what a person decided. Every change is an event, journaled before it is told.

All methods run on one event loop. A task's coroutine can be thrown away at any await: what it needs to go on is in the journal,
so pause, stop, restart and parking are one mechanism.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.chat import ModelError
from . import worktree
from .codec import to_json
from .draft_feed import DraftFeed
from .errors import TaskError, UnknownTaskError, WrongStateError
from .proposal import AcceptResult, Conflict, apply_change, is_decided, select, with_states
from .run import ModelSource, ProgressCallback, TaskRun, TaskSettings
from .sandbox import Sandbox
from .store import TaskStore
from .task import HunkState, NeedsYou, Proposal, Task, TaskEvent, TaskSpec, TaskState, can_follow
from .workspace import Workspace

__all__ = ["ModelSource", "ProgressCallback", "TaskManager", "TaskSettings"]

log = logging.getLogger(__name__)

_INTERRUPTED = (TaskState.RUNNING, TaskState.WAITING_TOOL, TaskState.VERIFYING)


@dataclass(frozen=True, slots=True)
class _Desk:
    """What a run may do to its own task."""

    current: Callable[[], Task]
    move: Callable[..., object]
    park: Callable[..., object]
    emit: Callable[..., object]


class TaskManager:
    """`model_source` gives the model and may load it or start it again; it is called once for every run that needs a model."""

    def __init__(
        self,
        model_source: ModelSource,
        store: TaskStore,
        workspace: Workspace,
        worktrees: Path,
        settings: TaskSettings | None = None,
        *,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._model_source = model_source
        self._store = store
        self._workspace = workspace
        self._worktrees = worktrees
        self._settings = settings or TaskSettings()
        self._sandbox = sandbox or Sandbox()
        self._drafts = DraftFeed(workspace)
        self._tasks: dict[str, Task] = {}
        self._queue: list[str] = []
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._subscribers: list[Callable[[TaskEvent], None]] = []
        self._review = asyncio.Lock()
        self._closing = False

    async def start(self) -> None:
        """Read the journal: tasks that were running are parked, queued ones are queued again, stray worktrees go."""
        for task in await self._store.tasks():
            self._tasks[task.id] = task
        for task in self.tasks():
            if task.state in _INTERRUPTED:
                self._park(task.id, NeedsYou.RESTART, "interrupted by a restart of the daemon; resume it to go on")
            elif task.state is TaskState.QUEUED:
                self._queue.append(task.id)
        live = {task.id for task in self.tasks() if not task.state.is_final}
        await worktree.remove_leftovers(self._worktrees, keep=live)
        self._schedule()

    async def close(self) -> None:
        """Stop all work and park it. The journal stays open: it belongs to the caller."""
        self._closing = True
        for task_id in list(self._runs):
            await self._halt(task_id)
            if self._tasks[task_id].state in _INTERRUPTED:
                self._park(task_id, NeedsYou.RESTART, "the daemon was stopped; resume it to go on")
        while self._chores:
            await asyncio.wait(self._chores)
        await self._drafts.close()

    def tasks(self) -> list[Task]:
        """All tasks, oldest first."""
        return list(self._tasks.values())

    def task(self, task_id: str) -> Task:
        """Raises UnknownTaskError."""
        if task_id not in self._tasks:
            raise UnknownTaskError(f"there is no task {task_id}", "quadjet tasks lists them")
        return self._tasks[task_id]

    async def events(self, task_id: str, after_seq: int = 0, limit: int = -1) -> list[TaskEvent]:
        """The journal of a task from `after_seq` + 1 on; at most `limit` events, -1 for all."""
        self.task(task_id)
        return await self._store.events(task_id, after_seq, limit)

    def subscribe(self, callback: Callable[[TaskEvent], None]) -> Callable[[], None]:
        """Call back with every event from here on, in order per task, once it is journaled. Returns the way out."""
        self._subscribers.append(callback)
        return partial(self._subscribers.remove, callback)

    async def send(self, spec: TaskSpec) -> Task:
        """Take a task on. Returns as soon as it is journaled; it starts when one of `max_running` places is free."""
        task = Task(id=self._fresh_id(), spec=spec, state=TaskState.QUEUED, created=time.time(), message="queued")
        self._tasks[task.id] = task
        written = self._record(task, [("state", _state_data(task))])
        self._queue.append(task.id)
        self._schedule()
        await written
        return self._tasks[task.id]

    async def stop(self, task_id: str) -> Task:
        """End a task for good: its completion and its commands are cancelled, its worktree goes. No effect on a final task."""
        if self.task(task_id).state.is_final:
            return self.task(task_id)
        await self._halt(task_id)
        if not self.task(task_id).state.is_final:
            self._end(task_id, TaskState.STOPPED, "stopped")
        return self.task(task_id)

    async def pause(self, task_id: str) -> Task:
        """Hold a queued or running task. Its place becomes free; `resume` goes on from its transcript."""
        if self.task(task_id).state not in (*_INTERRUPTED, TaskState.QUEUED):
            raise WrongStateError(f"task {task_id} is {self.task(task_id).state}, so it cannot be paused")
        await self._halt(task_id)
        if self.task(task_id).state not in (*_INTERRUPTED, TaskState.QUEUED):
            return self.task(task_id)  # it ended by itself while it was being halted
        self._settle(task_id)
        self._move(task_id, TaskState.PAUSED, "paused; resume it to go on")
        return self.task(task_id)

    async def resume(self, task_id: str) -> Task:
        """Let a paused or parked task go on, with a fresh budget. One parked by a conflict goes back to review."""
        task = self.task(task_id)
        if task.state not in (TaskState.PAUSED, TaskState.NEEDS_YOU):
            raise WrongStateError(f"task {task_id} is {task.state}, so it cannot be resumed")
        if task.reason is NeedsYou.CONFLICT and task.proposal is not None:
            self._review_again(task, task.proposal)
        else:
            self._enqueue(task_id)
        return self.task(task_id)

    async def accept(self, task_id: str, hunk_ids: Collection[str] | None = None) -> AcceptResult:
        """Bring hunks (None: all that are open) into the user's files, merged with what they hold by now.

        Raises WrongStateError when the task proposes nothing, UnknownHunkError for an id that it does not have.
        """
        async with self._review:
            task = self._reviewable(task_id)
            proposal = task.proposal or Proposal(())
            chosen = select(proposal, hunk_ids)
            applied: list[str] = []
            conflicts: list[Conflict] = []
            for change in proposal.changes:
                wanted = chosen.get(change.path, frozenset())
                if not wanted:
                    continue
                problem = await apply_change(
                    change, wanted, self._workspace, task.spec.root, f"Quadjet {task.spec.kind} {task_id}"
                )
                states = dict.fromkeys(wanted, HunkState.CONFLICT if problem else HunkState.ACCEPTED)
                proposal = with_states(proposal, states)
                if problem:
                    conflicts.append(Conflict(change.path, problem))
                else:
                    applied += sorted(wanted)
                    # Each file's outcome is journaled before the next is touched: a crash must not forget an applied hunk.
                    self._record(replace(self._tasks[task_id], proposal=proposal), [])
            await self._decide(task_id, proposal, conflicts)
            return AcceptResult(self.task(task_id), tuple(applied), tuple(conflicts))

    async def reject(self, task_id: str, hunk_ids: Collection[str] | None = None, comment: str = "") -> Task:
        """Decline hunks (None: all that are open). With a comment the task takes them up again, if a model worked on it."""
        async with self._review:
            task = self._reviewable(task_id)
            proposal = task.proposal or Proposal(())
            chosen = select(proposal, hunk_ids)
            states = {hunk_id: HunkState.REJECTED for ids in chosen.values() for hunk_id in ids}
            proposal = with_states(proposal, states)
            if comment:
                self._record(self._tasks[task_id], [("comment", {"text": comment, "hunk_ids": sorted(states)})])
                if await self._take_up_comment(task_id, proposal, comment):
                    return self.task(task_id)
            await self._decide(task_id, proposal, (), rejecting=True)
            return self.task(task_id)

    # -- how a task moves ------------------------------------------------------------------------------------------------

    def _record(self, task: Task, entries: list[tuple[str, Mapping[str, Any]]]) -> asyncio.Future[None]:
        """Make `task` the current one and journal it with new events. They are told to subscribers once they are on disk."""
        now = time.time()
        events = [TaskEvent(task.id, task.last_seq + n, now, kind, dict(data)) for n, (kind, data) in enumerate(entries, 1)]
        task = replace(task, last_seq=task.last_seq + len(events))
        self._tasks[task.id] = task
        written = self._store.save(task, events)
        written.add_done_callback(partial(self._tell, task.id, events))
        return written

    def _tell(self, task_id: str, events: list[TaskEvent], written: asyncio.Future[None]) -> None:
        error = written.exception() if not written.cancelled() else None
        for event in events:
            for callback in list(self._subscribers):
                callback(event)
        if error is not None:
            log.error("journal: %s", error)
            run = self._runs.get(task_id)
            if run is not None:
                run.cancel()
                self._fail(task_id, str(error))

    def _emit(self, task_id: str, kind: str, data: Mapping[str, Any], **changes: Any) -> asyncio.Future[None]:
        return self._record(replace(self._tasks[task_id], **changes), [(kind, data)])

    def _move(
        self, task_id: str, state: TaskState, message: str, *, reason: NeedsYou | None = None, **changes: Any
    ) -> asyncio.Future[None]:
        before = self._tasks[task_id]
        if not can_follow(before.state, state):
            raise WrongStateError(f"task {task_id} is {before.state} and cannot become {state}")
        task = replace(before, state=state, reason=reason, message=message, **changes)
        return self._record(task, [("state", _state_data(task))])

    def _settle(self, task_id: str) -> None:
        """Leave an inner state of a run, so that any state which follows `running` can follow."""
        if self._tasks[task_id].state in (TaskState.WAITING_TOOL, TaskState.VERIFYING):
            self._move(task_id, TaskState.RUNNING, self._tasks[task_id].message)

    def _park(self, task_id: str, reason: NeedsYou, message: str, **changes: Any) -> None:
        self._settle(task_id)
        self._move(task_id, TaskState.NEEDS_YOU, message, reason=reason, **changes)

    def _end(self, task_id: str, state: TaskState, message: str) -> asyncio.Future[None]:
        """Move to a final state and let go of what the task holds."""
        written = self._move(task_id, state, message)
        self._spawn(self._discard(task_id))
        self._drafts.drop_task(task_id)
        return written

    def _fail(self, task_id: str, message: str) -> None:
        if not self._tasks[task_id].state.is_final:  # a failing journal may have ended it before
            self._end(task_id, TaskState.FAILED, message)

    # -- the queue and the runs ------------------------------------------------------------------------------------------

    def _fresh_id(self) -> str:
        while (task_id := secrets.token_hex(4)) in self._tasks:
            pass
        return task_id

    def _enqueue(self, task_id: str, **changes: Any) -> None:
        self._move(task_id, TaskState.QUEUED, "queued", **changes)
        self._queue.append(task_id)
        self._schedule()

    def _schedule(self) -> None:
        while self._queue and len(self._runs) < self._settings.max_running and not self._closing:
            task_id = self._queue.pop(0)
            self._runs[task_id] = asyncio.create_task(self._run(task_id), name=f"task {task_id}")
        for position, task_id in enumerate(self._queue, 1):
            message = f"queued, {position} of {len(self._queue)} waiting"
            if self._tasks[task_id].message != message:
                self._emit(
                    task_id, "progress", {"message": message, "done": position, "total": len(self._queue)}, message=message
                )

    async def _run(self, task_id: str) -> None:
        desk = _Desk(
            current=partial(self.task, task_id),
            move=partial(self._move, task_id),
            park=partial(self._park, task_id),
            emit=partial(self._emit, task_id),
        )
        run = TaskRun(
            task_id,
            desk,
            self._model_source,
            self._store,
            self._workspace,
            self._worktrees,
            self._settings,
            self._sandbox,
            self._drafts,
        )
        try:
            await run.run()
        except (TaskError, ModelError) as error:
            self._fail(task_id, str(error))
        except OSError as error:
            self._fail(task_id, f"a file could not be used: {error}")
        except Exception as error:  # a fault of ours ends this task only, and is not hidden
            log.exception("task %s", task_id)
            self._fail(task_id, f"internal error: {type(error).__name__}: {error}")
        finally:
            del self._runs[task_id]
            self._schedule()

    async def _halt(self, task_id: str) -> None:
        """Cancel the run of a task, or take it out of the queue, and wait until that is done."""
        if task_id in self._queue:
            self._queue.remove(task_id)
            self._schedule()
        run = self._runs.get(task_id)
        if run is not None:
            run.cancel()
            await asyncio.wait([run])

    def _spawn(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _discard(self, task_id: str) -> None:
        """Remove the worktree and the transcript of a task that is over."""
        try:
            checkpoint = await self._store.checkpoint(task_id)
            if checkpoint is not None:
                await worktree.reopen(self._worktrees, self._tasks[task_id].spec.root, task_id).remove()
            await self._store.save_checkpoint(task_id, None)
        except (TaskError, OSError) as error:
            log.warning("cleaning up after task %s: %s", task_id, error)

    # -- review ----------------------------------------------------------------------------------------------------------

    def _reviewable(self, task_id: str) -> Task:
        task = self.task(task_id)
        if task.state not in (TaskState.PROPOSED, TaskState.NEEDS_YOU) or task.proposal is None:
            raise WrongStateError(f"task {task_id} is {task.state} and has nothing to review", f"quadjet show {task_id}")
        return task

    def _decide(
        self, task_id: str, proposal: Proposal, conflicts: Collection[Conflict], *, rejecting: bool = False
    ) -> asyncio.Future[None]:
        """Journal the hunks as they stand, then the state that follows from them. The future ends when both are on disk."""
        written = self._emit(task_id, "hunks", {"hunks": to_json(proposal.hunks)}, proposal=proposal)
        state = self._tasks[task_id].state
        if state.is_final:  # stopped while an editor was applying: the hunks above are the truth, the state stays
            return written
        if conflicts:
            message = "; ".join(f"{conflict.path}: {conflict.message}" for conflict in conflicts)
            if state is TaskState.NEEDS_YOU:
                self._move(task_id, TaskState.PROPOSED, message)
            return self._move(task_id, TaskState.NEEDS_YOU, message, reason=NeedsYou.CONFLICT)
        if is_decided(proposal):
            taken = any(hunk.state is HunkState.ACCEPTED for hunk in proposal.hunks)
            # Without hunks, as for a cause without a fix, what the person called for counts.
            declined = rejecting or any(hunk.state is HunkState.REJECTED for hunk in proposal.hunks)
            return self._end(task_id, TaskState.REJECTED if declined and not taken else TaskState.ACCEPTED, "")
        if self._tasks[task_id].reason is NeedsYou.CONFLICT and not _has_conflict(proposal):
            return self._move(task_id, TaskState.PROPOSED, "partly reviewed")
        return written

    def _review_again(self, task: Task, proposal: Proposal) -> None:
        states = {hunk.id: HunkState.PENDING for hunk in proposal.hunks if hunk.state is HunkState.CONFLICT}
        proposal = with_states(proposal, states)
        self._emit(task.id, "hunks", {"hunks": to_json(proposal.hunks)}, proposal=proposal)
        self._move(task.id, TaskState.PROPOSED, "back in review")

    async def _take_up_comment(self, task_id: str, proposal: Proposal, comment: str) -> bool:
        """Queue the task again with the comment for the model. False if no model worked on it."""
        checkpoint = await self._store.checkpoint(task_id)
        if not checkpoint or not await self._store.messages(task_id):
            return False
        checkpoint["feedback"] = f"The reviewer rejected your change and wrote: {comment}"
        await self._store.save_checkpoint(task_id, checkpoint)
        self._emit(task_id, "hunks", {"hunks": to_json(proposal.hunks)}, proposal=proposal)
        self._enqueue(task_id)
        return True


def _state_data(task: Task) -> dict[str, Any]:
    return {"state": task.state.value, "reason": task.reason.value if task.reason else None, "message": task.message}


def _has_conflict(proposal: Proposal) -> bool:
    return any(hunk.state is HunkState.CONFLICT for hunk in proposal.hunks)

"""States, queue, stop, pause, restart and review, with real repositories, commands and journals."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import FakeEditor, ScriptedModel, call
from quadjet.agent_tasks.errors import UnknownHunkError, UnknownTaskError, WrongStateError
from quadjet.agent_tasks.task import HunkState, NeedsYou, Task, TaskState, can_follow
from quadjet.engine.chat import Message, ModelError
from task_harness import Harness, fingerprint, git, make_repository, open_harness

TWO_PLACES = "import os\nx = 1\ny = 2\nz = 3\n\n\ndef f():\n    return f''\n"
CLEANED = "x = 1\ny = 2\nz = 3\n\n\ndef f():\n    return ''\n"
MUTABLE = "def f(x=[]):\n    return x\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """a.py: mended by the linter in two places. b.py: needs a model."""
    return make_repository(tmp_path / "project", {"a.py": TWO_PLACES, "b.py": MUTABLE})


def hunks(task: Task) -> list[tuple[str, HunkState]]:
    assert task.proposal is not None
    return [(hunk.id, hunk.state) for hunk in task.proposal.hunks]


def blocked() -> tuple[ScriptedModel, asyncio.Event]:
    """A model that answers when the event is set."""
    go = asyncio.Event()
    return ScriptedModel([go, call("edit_file", path="b.py", search="x=[]", replace="x=()")]), go


# -- running ---------------------------------------------------------------------------------------------------------------


async def test_events_have_no_gaps_and_states_follow_the_table(project: Path, state: Path) -> None:
    model, go = blocked()
    go.set()
    async with open_harness(state, project, model) as harness:
        task = await harness.run("cleanup", "b.py")
        journal = await harness.manager.events(task.id)
        tail = await harness.manager.events(task.id, after_seq=3, limit=2)
    assert [event.seq for event in journal] == list(range(1, task.last_seq + 1))
    assert journal == harness.events
    assert [event.seq for event in tail] == [4, 5]
    states = [TaskState(name) for name in harness.states(task.id)]
    assert states[0] is TaskState.QUEUED
    assert all(can_follow(a, b) for a, b in itertools.pairwise(states))
    assert TaskState.WAITING_TOOL in states


async def test_four_run_and_the_fifth_waits_with_its_place(project: Path, state: Path) -> None:
    models = [blocked() for _ in range(6)]
    async with open_harness(state, project, [model for model, _ in models]) as harness:
        tasks = [await harness.send("cleanup", "b.py") for _ in range(6)]
        for model, _ in models[:4]:
            await model.waiting.wait()
        assert [harness.manager.task(task.id).message for task in tasks[4:]] == [
            "queued, 1 of 2 waiting",
            "queued, 2 of 2 waiting",
        ]
        models[0][1].set()
        await harness.finished(models[0][0].keys[0])
        await models[4][0].waiting.wait()
        assert harness.manager.task(tasks[5].id).message == "queued, 1 of 1 waiting"
        for _, go in models:
            go.set()
        assert [(await harness.finished(task.id)).state for task in tasks] == [TaskState.PROPOSED] * 6


async def test_the_snapshot_holds_unsaved_text(project: Path, state: Path) -> None:
    editor = FakeEditor()
    async with open_harness(state, project, ScriptedModel([])) as harness:
        harness.workspace.open(project / "a.py", "import sys\nx = 1\n", 7, editor)
        task = await harness.run("cleanup", "a.py")
        assert task.proposal is not None
        (change,) = task.proposal.changes
    assert change.base == b"import sys\nx = 1\n"
    assert change.hunks[0].base_version == 7
    assert task.card is not None
    assert "includes the unsaved text of a.py in editor" in task.card.notes
    assert (project / "a.py").read_text() == TWO_PLACES


@pytest.mark.parametrize(
    ("path", "says"),
    [("missing.py", "does not exist"), ("image.py", "binary"), ("large.py", "bytes"), (".env", "secret"), ("../x.py", "")],
)
async def test_what_cannot_be_worked_on_fails_with_the_reason(project: Path, state: Path, path: str, says: str) -> None:
    (project / "image.py").write_bytes(b"\x00\x01\x02")
    (project / "large.py").write_bytes(b"x = 1\n" * 10_000_000)
    (project / ".env").write_text("KEY=1\n")
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", path)
    assert task.state is TaskState.FAILED
    assert says in task.message
    assert "internal" not in task.message


async def test_a_folder_without_git_and_an_empty_repository_work(tmp_path: Path, state: Path) -> None:
    for name in ("plain", "empty"):
        root = tmp_path / name
        root.mkdir()
        (root / "a.py").write_text("import os\n")
        if name == "empty":
            git(root, "init", "-q")
        async with open_harness(state, root, ScriptedModel([])) as harness:
            task = await harness.run("cleanup", "a.py")
            await harness.manager.accept(task.id)
        assert (root / "a.py").read_text() == "", task.message


async def test_an_ignored_file_fails_with_the_reason(project: Path, state: Path) -> None:
    (project / ".gitignore").write_text("c.py\n")
    (project / "c.py").write_text("import os\n")
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "c.py")
    assert task.state is TaskState.FAILED
    assert "git ignores it" in task.message


async def test_a_vanished_workspace_fails(project: Path, state: Path) -> None:
    async with open_harness(state, project / "gone", ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert task.state is TaskState.FAILED
    assert "does not exist" in task.message


async def test_a_model_error_fails_the_task_with_its_message(project: Path, state: Path) -> None:
    model = ScriptedModel([ModelError("the engine process died", "quadjet logs shows why")])
    async with open_harness(state, project, model) as harness:
        task = await harness.run("cleanup", "b.py")
    assert task.state is TaskState.FAILED
    assert task.message == "the engine process died\n  fix: quadjet logs shows why"
    assert not (state / "worktrees" / task.id).exists()


async def test_the_turn_budget_parks_and_resume_grants_another(project: Path, state: Path) -> None:
    reads = [call("read_file", path="b.py", first=n) for n in (1, 2)]
    mend = call("edit_file", path="b.py", search="x=[]", replace="x=()")
    async with open_harness(state, project, ScriptedModel([*reads, mend]), max_turns=2) as harness:
        parked = await harness.run("cleanup", "b.py")
        await harness.manager.resume(parked.id)
        task = await harness.finished(parked.id)
    assert (parked.state, parked.reason) == (TaskState.NEEDS_YOU, NeedsYou.BUDGET)
    assert parked.card is not None
    assert task.state is TaskState.PROPOSED
    assert task.turns == 3


async def test_the_time_budget_parks(project: Path, state: Path) -> None:
    model, _ = blocked()
    async with open_harness(state, project, model, timeout_s=0.05) as harness:
        task = await harness.run("cleanup", "b.py")
    assert (task.state, task.reason) == (TaskState.NEEDS_YOU, NeedsYou.BUDGET)
    assert model.cancelled == 1


# -- stop, pause, restart --------------------------------------------------------------------------------------------------


async def test_stop_cancels_the_completion_at_once(project: Path, state: Path) -> None:
    model, _ = blocked()
    async with open_harness(state, project, model) as harness:
        sent = await harness.send("cleanup", "b.py")
        await model.waiting.wait()
        start = time.monotonic()
        task = await harness.manager.stop(sent.id)
        elapsed = time.monotonic() - start
        again = await harness.manager.stop(sent.id)
    assert task.state is again.state is TaskState.STOPPED
    assert elapsed < 2.0  # 0.1 s on an idle machine
    assert model.cancelled == 1
    assert not (state / "worktrees" / task.id).exists()


async def test_stop_kills_a_running_command(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"test_m.py": "import time\n\n\ndef test():\n    time.sleep(600.123)\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        sent = await harness.send("triage", "test_m.py")
        async with asyncio.timeout(30):
            while not _commands_of(sent.id):  # noqa: ASYNC110  a process of the system sets no event
                await asyncio.sleep(0.02)
        start = time.monotonic()
        await harness.manager.stop(sent.id)
        elapsed = time.monotonic() - start
        assert not _commands_of(sent.id)
    assert elapsed < 2.0  # 0.1 s on an idle machine


def _commands_of(task_id: str) -> list[bytes]:
    """Sandboxed commands of the machine that work in the task's worktree."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands.append((process / "cmdline").read_bytes())
    return [command for command in commands if b"bwrap" in command and task_id.encode() in command]


async def test_pause_frees_the_place_and_resume_asks_again_with_the_same_transcript(project: Path, state: Path) -> None:
    first, go = blocked()
    second, second_go = blocked()
    second_go.set()
    async with open_harness(state, project, [first, second, first], max_running=1) as harness:
        held = await harness.send("cleanup", "b.py")
        other = await harness.send("cleanup", "b.py")
        await first.waiting.wait()
        assert (await harness.manager.pause(held.id)).state is TaskState.PAUSED
        assert (await harness.finished(other.id)).state is TaskState.PROPOSED
        go.set()
        await harness.manager.resume(held.id)
        task = await harness.finished(held.id)
    assert task.state is TaskState.PROPOSED
    assert first.cancelled == 1
    assert first.prompts[0] == first.prompts[1]


async def test_a_queued_task_can_be_paused_resumed_and_stopped(project: Path, state: Path) -> None:
    model, _ = blocked()
    async with open_harness(state, project, model, max_running=1) as harness:
        await harness.send("cleanup", "b.py")
        waiting = await harness.send("cleanup", "b.py")
        assert (await harness.manager.pause(waiting.id)).state is TaskState.PAUSED
        assert (await harness.manager.resume(waiting.id)).state is TaskState.QUEUED
        assert (await harness.manager.stop(waiting.id)).state is TaskState.STOPPED


async def test_what_does_not_fit_the_state_is_refused(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
        for act in (harness.manager.pause, harness.manager.resume):
            with pytest.raises(WrongStateError):
                await act(task.id)
        await harness.manager.stop(task.id)
        with pytest.raises(WrongStateError):
            await harness.manager.accept(task.id)
        with pytest.raises(UnknownTaskError):
            await harness.manager.stop("nonsense")


async def test_closing_parks_and_the_next_start_goes_on(project: Path, state: Path) -> None:
    model, go = blocked()
    async with open_harness(state, project, model) as harness:
        sent = await harness.send("cleanup", "b.py")
        await model.waiting.wait()
    go.set()
    async with open_harness(state, project, model) as harness:
        parked = harness.manager.task(sent.id)
        await harness.manager.resume(sent.id)
        task = await harness.finished(sent.id)
        journal = await harness.manager.events(sent.id)
    assert (parked.state, parked.reason) == (TaskState.NEEDS_YOU, NeedsYou.RESTART)
    assert task.state is TaskState.PROPOSED
    assert [event.seq for event in journal] == list(range(1, task.last_seq + 1))


_KILLED = """
import asyncio, sys
from pathlib import Path
from fakes import ScriptedModel, call
from task_harness import open_harness

async def main():
    model = ScriptedModel([call("read_file", path="b.py"), asyncio.Event()])
    async with open_harness(Path(sys.argv[1]), Path(sys.argv[2]), model, max_running=1) as harness:
        first = await harness.send("cleanup", "b.py")
        second = await harness.send("cleanup", "a.py")
        await model.waiting.wait()
        print(first.id, second.id, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_after_a_kill_tasks_are_parked_or_queued_and_nothing_is_lost(project: Path, state: Path) -> None:
    before = fingerprint(project)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-P", "-c", _KILLED, str(state), str(project)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    first, second = (await process.stdout.readline()).decode().split()
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    mend = call("edit_file", path="b.py", search="x=[]", replace="x=()")
    async with open_harness(state, project, ScriptedModel([mend])) as harness:
        parked = harness.manager.task(first)
        assert (parked.state, parked.reason) == (TaskState.NEEDS_YOU, NeedsYou.RESTART)
        queued = await harness.finished(second)
        await harness.manager.resume(first)
        task = await harness.finished(first)
        journals = [await harness.manager.events(task_id) for task_id in (first, second)]
    assert queued.state is task.state is TaskState.PROPOSED
    for journal in journals:
        assert [event.seq for event in journal] == list(range(1, len(journal) + 1))
    assert fingerprint(project) == before


async def test_stray_worktrees_are_removed_at_the_start(project: Path, state: Path) -> None:
    (state / "worktrees" / "deadbeef" / "tree").mkdir(parents=True)
    async with open_harness(state, project, ScriptedModel([])):
        assert not (state / "worktrees" / "deadbeef").exists()


async def test_a_journal_that_cannot_be_written_fails_the_task(project: Path, state: Path) -> None:
    model, go = blocked()
    async with open_harness(state, project, model) as harness:
        sent = await harness.send("cleanup", "b.py")
        await model.waiting.wait()
        with sqlite3.connect(state / "tasks.sqlite3") as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END")
        go.set()
        task = await harness.finished(sent.id)
        other.execute("DROP TRIGGER full")
        other.close()
        again = await harness.run("cleanup", "a.py")
        journal = await harness.manager.events(sent.id)
    assert task.state is TaskState.FAILED
    assert "disk is full" in task.message
    assert again.state is TaskState.PROPOSED
    assert [event.seq for event in journal] == list(range(1, len(journal) + 1))
    assert journal[-1].data["state"] == "failed"


# -- review ----------------------------------------------------------------------------------------------------------------


async def reviewed(harness: Harness) -> Task:
    task = await harness.run("cleanup", "a.py")
    assert len(hunks(task)) == 2, task.message
    return task


async def test_accepting_all_writes_the_file_and_keeps_its_mode(project: Path, state: Path) -> None:
    (project / "a.py").chmod(0o755)
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        result = await harness.manager.accept(task.id)
    assert result.task.state is TaskState.ACCEPTED
    assert result.applied == tuple(sorted(hunk_id for hunk_id, _ in hunks(task)))
    assert (project / "a.py").read_text() == CLEANED
    assert (project / "a.py").stat().st_mode & 0o777 == 0o755
    assert git(project, "status", "--porcelain") == " M a.py\n"


async def test_accepting_one_hunk_leaves_the_task_proposed(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        first, second = (hunk_id for hunk_id, _ in hunks(task))
        partly = await harness.manager.accept(task.id, [second])
        text = (project / "a.py").read_text()
        rest = await harness.manager.accept(task.id, [first, second])
    assert partly.task.state is TaskState.PROPOSED
    assert [state for _, state in hunks(partly.task)] == [HunkState.PENDING, HunkState.ACCEPTED]
    assert text == TWO_PLACES.replace("f''", "''")
    assert rest.task.state is TaskState.ACCEPTED
    assert rest.applied == (first,)
    assert (project / "a.py").read_text() == CLEANED


async def test_what_the_user_typed_meanwhile_is_merged(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        (project / "a.py").write_text(TWO_PLACES.replace("y = 2", "y = 22"))
        result = await harness.manager.accept(task.id)
    assert result.task.state is TaskState.ACCEPTED
    assert (project / "a.py").read_text() == CLEANED.replace("y = 2", "y = 22")


async def test_a_conflict_writes_nothing_and_says_where(project: Path, state: Path) -> None:
    typed = TWO_PLACES.replace("f''", "f'mine'")
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        (project / "a.py").write_text(typed)
        result = await harness.manager.accept(task.id)
        again = await harness.manager.resume(task.id)
        (project / "a.py").write_text(TWO_PLACES)
        end = await harness.manager.accept(task.id)
    assert (result.task.state, result.task.reason) == (TaskState.NEEDS_YOU, NeedsYou.CONFLICT)
    assert [state for _, state in hunks(result.task)] == [HunkState.CONFLICT] * 2
    assert "line 8" in result.conflicts[0].message
    assert "line 8" in result.task.message
    assert again.state is TaskState.PROPOSED
    assert end.task.state is TaskState.ACCEPTED
    assert (project / "a.py").read_text() == CLEANED


async def test_a_conflict_in_one_file_does_not_hold_up_the_other(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"a.py": "import os\n", "b.py": "import sys\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", ".")
        (root / "a.py").write_text("import os as mine\n")
        result = await harness.manager.accept(task.id)
    assert [conflict.path for conflict in result.conflicts] == [root / "a.py"]
    assert (root / "a.py").read_text() == "import os as mine\n"
    assert (root / "b.py").read_text() == ""


async def test_an_open_file_is_changed_through_its_editor(project: Path, state: Path) -> None:
    editor = FakeEditor()
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        harness.workspace.open(project / "a.py", TWO_PLACES.replace("z = 3", "z = 33"), 3, editor)
        result = await harness.manager.accept(task.id)
    assert result.task.state is TaskState.ACCEPTED
    assert editor.texts == {project / "a.py": CLEANED.replace("z = 3", "z = 33")}
    assert editor.edits[0]["version"] == 3
    assert (project / "a.py").read_text() == TWO_PLACES


async def test_an_editor_that_moved_on_is_asked_once_more_with_a_fresh_merge(project: Path, state: Path) -> None:
    editor = FakeEditor(refusals=1)
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        harness.workspace.open(project / "a.py", TWO_PLACES, 3, editor)
        editor.on_refusal = lambda: harness.workspace.change(project / "a.py", TWO_PLACES.replace("z = 3", "z = 33"), 4, editor)
        result = await harness.manager.accept(task.id)
    assert result.task.state is TaskState.ACCEPTED
    assert editor.edits[0]["version"] == 4
    assert editor.texts == {project / "a.py": CLEANED.replace("z = 3", "z = 33")}


async def test_an_editor_that_keeps_refusing_leaves_a_conflict(project: Path, state: Path) -> None:
    editor = FakeEditor(refusals=2)
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        harness.workspace.open(project / "a.py", TWO_PLACES, 3, editor)
        result = await harness.manager.accept(task.id)
    assert result.task.reason is NeedsYou.CONFLICT
    assert editor.edits == []


async def test_a_file_deleted_or_replaced_by_a_link_is_left_alone(project: Path, state: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text(TWO_PLACES)
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        (project / "a.py").unlink()
        deleted = await harness.manager.accept(task.id)
        (project / "a.py").symlink_to(outside)
        linked = await harness.manager.accept(task.id)
    assert "deleted" in deleted.conflicts[0].message
    assert "link" in linked.conflicts[0].message
    assert outside.read_text() == TWO_PLACES


async def test_a_vanished_folder_leaves_a_conflict(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        shutil.rmtree(project)
        result = await harness.manager.accept(task.id)
    assert result.task.reason is NeedsYou.CONFLICT
    assert fingerprint(project) == {}


async def test_rejecting_leaves_the_file_alone(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        first, second = (hunk_id for hunk_id, _ in hunks(task))
        partly = await harness.manager.reject(task.id, [first])
        end = await harness.manager.reject(task.id, [second])
    assert partly.state is TaskState.PROPOSED
    assert end.state is TaskState.REJECTED
    assert (project / "a.py").read_text() == TWO_PLACES


async def test_accepting_one_and_rejecting_the_other_ends_accepted(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        first, second = (hunk_id for hunk_id, _ in hunks(task))
        await harness.manager.reject(task.id, [first])
        result = await harness.manager.accept(task.id)
    assert result.task.state is TaskState.ACCEPTED
    assert result.applied == (second,)


async def test_a_result_without_hunks_ends_as_the_person_says(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "clean", {"a.py": "x = 1\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        accepted, rejected = [await harness.run("cleanup", "a.py") for _ in range(2)]
        await harness.manager.accept(accepted.id)
        await harness.manager.reject(rejected.id)
        ends = [harness.manager.task(task.id).state for task in (accepted, rejected)]
    assert ends == [TaskState.ACCEPTED, TaskState.REJECTED]


async def test_unknown_hunks_are_refused(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        with pytest.raises(UnknownHunkError):
            await harness.manager.accept(task.id, ["nonsense"])
        with pytest.raises(UnknownHunkError):
            await harness.manager.reject(task.id, ["nonsense"])


async def test_two_accepts_at_once_apply_every_hunk_once(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        first, second = (hunk_id for hunk_id, _ in hunks(task))
        results = await asyncio.gather(harness.manager.accept(task.id, [first]), harness.manager.accept(task.id, [first, second]))
    assert [result.applied for result in results] == [(first,), (second,)]
    assert (project / "a.py").read_text() == CLEANED


async def test_a_rejection_with_a_comment_goes_back_to_the_model(project: Path, state: Path) -> None:
    mend = call("edit_file", path="b.py", search="x=[]", replace="x=()")
    model = ScriptedModel([mend, call("finish", summary="nothing else to do")])
    async with open_harness(state, project, model) as harness:
        task = await harness.run("cleanup", "b.py")
        queued = await harness.manager.reject(task.id, comment="keep the list")
        end = await harness.until(task.id, "proposed", "needs-you", "failed")
        comments = [event.data for event in await harness.manager.events(task.id) if event.type == "comment"]
    assert queued.state is TaskState.QUEUED
    assert comments == [{"text": "keep the list", "hunk_ids": [hunk_id for hunk_id, _ in hunks(task)]}]
    assert "keep the list" in next(message for message in reversed(model.prompts[1]) if message.role == "user").content
    assert end.state is TaskState.PROPOSED
    assert HunkState.PENDING not in [state for _, state in hunks(end)]


async def test_a_comment_on_work_without_a_model_is_kept_and_the_task_rejected(project: Path, state: Path) -> None:
    async with open_harness(state, project, ScriptedModel([])) as harness:
        task = await reviewed(harness)
        end = await harness.manager.reject(task.id, comment="no thanks")
        journal = await harness.manager.events(task.id)
    assert end.state is TaskState.REJECTED
    assert "comment" in [event.type for event in journal]


async def test_prose_instead_of_a_call_is_told_so(project: Path, state: Path) -> None:
    mend = call("edit_file", path="b.py", search="x=[]", replace="x=()")
    thinking = Message("assistant", "<think>secret plans</think>I would change x.")
    model = ScriptedModel([thinking, mend])
    async with open_harness(state, project, model) as harness:
        task = await harness.run("cleanup", "b.py")
    assert task.state is TaskState.PROPOSED
    assert model.prompts[1][2].content == "I would change x."
    assert "not a tool call" in model.prompts[1][3].content

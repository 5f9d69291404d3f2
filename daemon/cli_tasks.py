"""`quadjet run` and the verbs that look at tasks and decide about them. All of them ask the daemon, and start it if need be."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..agent_tasks.task import TaskKind
from . import cli_output as out
from .cli_settings import Settings, pass_settings

if TYPE_CHECKING:
    from .task_client import TaskClient

_TARGET = re.compile(r"(?P<path>.+?):(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?", re.DOTALL)


class Target(NamedTuple):
    """What a person points at; lines count from 1, both included."""

    path: Path
    first: int = 0
    last: int = 0


class TargetType(click.ParamType[Target]):
    name = "PATH[:LINE[-LINE]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        match = _TARGET.fullmatch(value)
        if not value:
            self.fail("name a file or a folder; the one you are in is .", param, ctx)
        # os.path.exists has an answer also for names that no file can have and folders that cannot be looked into.
        if is_path := os.path.exists(value) or match is None:  # noqa: PTH110
            target = Target(Path(value).absolute())
        else:
            first = int(match["first"])
            target = Target(Path(match["path"]).absolute(), first, int(match["last"] or first))
        if not os.path.exists(target.path):  # noqa: PTH110
            self.fail(f"there is no {target.path}", param, ctx)
        if not is_path and target.first < 1:
            self.fail(f"{value}: lines count from 1", param, ctx)
        if target.first > target.last or (target.first and target.path.is_dir()):
            self.fail(f"{value}: lines belong to a file, and the first comes before the last", param, ctx)
        return target


@click.command()
@click.argument("kind", type=click.Choice([kind.value for kind in TaskKind]))
@click.argument("target", type=TargetType(), metavar=TargetType.name)
@click.option("-m", "--message", default="", help="What the agent should know or mind.")
@click.option("--apply", "apply_", is_flag=True, help="Accept the whole proposal.")
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def run(settings: Settings, kind: str, target: Target, message: str, apply_: bool, as_json: bool) -> int:
    """Give one task to an agent and wait for its result. Exit code 0 with a proposal, 1 without."""
    request: dict[str, Any] = {"kind": kind, "uri": target.path.as_uri(), "instruction": message}
    if target.first:
        request["range"] = {"start": {"line": target.first - 1, "character": 0}, "end": {"line": target.last, "character": 0}}

    async def work(client: TaskClient) -> int:
        from .task_view import follow

        task_id = await client.send(request)
        try:
            await follow(client, {task_id: f"{kind} {target.path.name}"})
        except asyncio.CancelledError:
            out.say(f"the task goes on without this terminal: quadjet show {task_id}, or end it with: quadjet cancel {task_id}")
            raise
        return await _conclude(client, task_id, apply_=apply_, as_json=as_json)

    return _with_daemon(settings, work)


async def _conclude(client: TaskClient, task_id: str, *, apply_: bool, as_json: bool) -> int:
    from .task_view import show_proposal, show_task

    task, proposal, accepted = await client.task(task_id), await client.proposal(task_id), None
    has_proposal = task["state"] == "proposed" and bool(proposal["hunks"])
    if apply_ and has_proposal:
        accepted = await client.accept(task_id)
        task = accepted["task"]
    if as_json:
        out.result_json({"task": task, **proposal, "accepted": accepted})
    else:
        show_task(task)
        show_proposal(proposal)
    if accepted is not None:
        _say_accepted(accepted)
    elif proposal["hunks"]:
        out.say(f"accept it with: quadjet accept {task_id}    decline it with: quadjet reject {task_id}")
    if accepted is None and task["state"] in ("needs-you", "paused"):
        out.say(f"another try: quadjet resume {task_id}    end it: quadjet cancel {task_id}")
    return 0 if has_proposal and not (accepted and accepted["conflicts"]) else 1


@click.command()
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def tasks(settings: Settings, as_json: bool) -> int:
    """All tasks, the newest last."""

    async def work(client: TaskClient) -> int:
        found = await client.tasks()
        if as_json:
            out.result_json(found)
        else:
            out.table(("id", "sent", "kind", "file", "state", ""), [_row(task) for task in found])
        return 0

    return _with_daemon(settings, work)


def _row(task: dict[str, Any]) -> tuple[str, ...]:
    sent = f"{datetime.fromtimestamp(task['created']):%m-%d %H:%M}"
    title = task["card"]["title"] if task["card"] else task["message"]
    return task["taskId"], sent, task["kind"], out.path_of(task["uri"]), task["state"], title


@click.command()
@click.argument("id_", metavar="ID")
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def show(settings: Settings, id_: str, as_json: bool) -> int:
    """The result card of a task, or where it stands."""

    async def work(client: TaskClient) -> int:
        from .task_view import show_task

        task = await client.task(await client.find(id_))
        if as_json:
            out.result_json(task)
        else:
            show_task(task)
        return 0

    return _with_daemon(settings, work)


@click.command()
@click.argument("id_", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Hunks with their ids and states.")
@pass_settings
def diff(settings: Settings, id_: str, as_json: bool) -> int:
    """What a task proposes, as a unified diff. Exit code 1 if it proposes nothing."""

    async def work(client: TaskClient) -> int:
        from .task_view import show_proposal

        proposal = await client.proposal(await client.find(id_))
        if as_json:
            out.result_json(proposal)
        else:
            show_proposal(proposal)
        return 0 if proposal["files"] else 1

    return _with_daemon(settings, work)


@click.command()
@click.argument("id_", metavar="ID")
@click.option("--hunk", "hunks", multiple=True, help="Only this hunk; can be given several times. Ids: quadjet diff ID --json")
@pass_settings
def accept(settings: Settings, id_: str, hunks: tuple[str, ...]) -> int:
    """Bring a proposal into your files, merged with what they hold by now. Exit code 1 if a file conflicts."""

    async def work(client: TaskClient) -> int:
        answer = await client.accept(await client.find(id_), hunks)
        _say_accepted(answer)
        return 1 if answer["conflicts"] else 0

    return _with_daemon(settings, work)


def _say_accepted(answer: dict[str, Any]) -> None:
    out.say(f"{len(answer['applied'])} hunks are in your files")
    for conflict in answer["conflicts"]:
        out.say(f"not applied: {out.path_of(conflict['uri'])}: {conflict['message']}")


@click.command()
@click.argument("id_", metavar="ID")
@click.option("--hunk", "hunks", multiple=True, help="Only this hunk; can be given several times.")
@click.option("-m", "--message", default="", help="What was wrong: the task tries again with it.")
@pass_settings
def reject(settings: Settings, id_: str, hunks: tuple[str, ...], message: str) -> int:
    """Decline a proposal."""
    return _change(settings, id_, lambda client, task_id: client.reject(task_id, hunks, message))


@click.command()
@click.argument("id_", metavar="ID")
@pass_settings
def cancel(settings: Settings, id_: str) -> int:
    """End a task for good."""
    return _change(settings, id_, lambda client, task_id: client.stop(task_id))


@click.command()
@click.argument("id_", metavar="ID")
@pass_settings
def pause(settings: Settings, id_: str) -> int:
    """Hold a task; its place becomes free."""
    return _change(settings, id_, lambda client, task_id: client.pause(task_id))


@click.command()
@click.argument("id_", metavar="ID")
@pass_settings
def resume(settings: Settings, id_: str) -> int:
    """Let a paused or parked task go on."""
    return _change(settings, id_, lambda client, task_id: client.resume(task_id))


def _change(settings: Settings, id_: str, change: Callable[[TaskClient, str], Awaitable[dict[str, Any]]]) -> int:
    async def work(client: TaskClient) -> int:
        task = await change(client, await client.find(id_))
        out.say(f"task {task['taskId']} is {task['state']}")
        return 0

    return _with_daemon(settings, work)


def _with_daemon(settings: Settings, work: Callable[[TaskClient], Awaitable[int]]) -> int:
    from .bridge import try_connect
    from .task_client import TaskClient

    running = try_connect(settings.places) if settings.flags else None
    if running is not None:
        running.close()
        out.say("a daemon runs already, with the settings it was started with; --set counts after: quadjet stop")

    async def main() -> int:
        client = await TaskClient.connect(settings.places, settings.serve_command)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


VERBS = (run, tasks, show, diff, accept, reject, cancel, pause, resume)

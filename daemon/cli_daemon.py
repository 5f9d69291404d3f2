"""`quadjet serve`, `status`, `stop`, `logs`, `lsp`: the daemon itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from . import cli_output as out
from .cli_settings import Settings, pass_settings

_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.2


@click.command()
@pass_settings
def serve(settings: Settings) -> None:
    """Run the daemon in the foreground until it is stopped. Editors and `quadjet run` start it by themselves."""
    from .model_source import EngineSource
    from .server import serve as run_daemon

    config, places = settings.config, settings.places
    out.say(f"starting on {places.socket}, model {config.engine.model}, log {places.daemon_log}")
    asyncio.run(run_daemon(config, places, EngineSource(config, settings.models)))


@click.command()
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def status(settings: Settings, as_json: bool) -> int:
    """What the daemon does. Exit code 1 if none runs."""
    from ..lsp.messages import STATUS

    found = asyncio.run(_ask_running(settings, STATUS))
    if as_json:
        out.result_json({"running": found is not None} | (found or {}))
    elif found is None:
        out.result("no daemon is running; it starts with the first task, or with: quadjet serve")
    else:
        for line in _status_lines(found):
            out.result(line)
    return 0 if found is not None else 1


@click.command()
@pass_settings
def stop(settings: Settings) -> int:
    """End the daemon. Tasks are parked, and can be resumed when it runs again."""
    from ..lsp.messages import STOP_DAEMON

    if asyncio.run(_ask_running(settings, STOP_DAEMON)) is None:
        out.say("no daemon is running")
        return 0
    from .bridge import try_connect

    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        connection = try_connect(settings.places)
        if connection is None:
            out.say("the daemon has ended")
            return 0
        connection.close()
        time.sleep(_POLL_S)
    out.say(f"the daemon was asked to end, and still runs after {_STOP_TIMEOUT_S:.0f} s; see: quadjet logs")
    return 1


@click.command()
@click.option("-n", "--lines", default=100, show_default=True, type=click.IntRange(min=0), help="How many lines from the end.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until interrupted.")
@pass_settings
def logs(settings: Settings, lines: int, follow: bool) -> int:
    """The end of the daemon's log."""
    path = settings.places.daemon_log
    if not path.exists():
        out.say(f"there is no log at {path}: no daemon has run yet")
        return 1
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=lines):
            out.result(line.rstrip("\n"))
        end = file.tell()
    for line in _lines_from(path, end) if follow else ():
        out.result(line)
        sys.stdout.flush()
    return 0


@click.command()
@pass_settings
def lsp(settings: Settings) -> int:
    """The language server on stdin and stdout: attaches to the daemon, and starts it if there is none."""
    from . import bridge

    return bridge.main(settings.places, settings.serve_command)


def _lines_from(path: Path, position: int) -> Iterator[str]:
    """Lines written after `position`, for ever; after a rotation those of the new file."""
    file = path.open(encoding="utf-8", errors="replace")
    file.seek(position)
    while True:
        if line := file.readline():
            yield line.rstrip("\n")
            continue
        time.sleep(_POLL_S)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = path.open(encoding="utf-8", errors="replace")


async def _ask_running(settings: Settings, method: str) -> dict[str, Any] | None:
    """The answer of the daemon, None if none runs."""
    from .bridge import NoDaemonError
    from .shell_client import connect

    try:
        client = await connect(settings.places, start=False)
    except NoDaemonError:
        return None
    async with client:
        answer: dict[str, Any] = await client.request(method)
        return answer


def _status_lines(found: dict[str, Any]) -> list[str]:
    model, tasks = found["model"], found["tasks"]
    return [
        f"running  process {found['pid']} since {datetime.fromtimestamp(found['started']):%F %T}, version {found['version']}",
        f"socket   {found['socket']}",
        f"log      {found['log']}",
        f"clients  {', '.join(found['sessions']) or 'none'}",
        f"tasks    {', '.join(f'{count} {state}' for state, count in sorted(tasks.items())) or 'none'}",
        f"model    {', '.join(f'{key} {value}' for key, value in model.items())}",
    ]


VERBS = (serve, status, stop, logs, lsp)

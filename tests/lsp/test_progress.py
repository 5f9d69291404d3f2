"""Progress bars on a real connection, with a client that answers `create` when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from editor_client import Client, connected
from quadjet.lsp.progress import REPORT_INTERVAL_S, TaskProgress
from quadjet.lsp.protocol import ConnectionProtocol

running: set[asyncio.Task[None]] = set()


def make(protocol: ConnectionProtocol) -> TaskProgress:
    def spawn(coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        running.add(task)
        task.add_done_callback(running.discard)

    return TaskProgress(protocol, spawn)


async def value(client: Client) -> tuple[str, str]:
    """Kind and message of the next $/progress."""
    message = await client.receive()
    assert message["method"] == "$/progress"
    return message["params"]["value"]["kind"], message["params"]["value"]["message"]


async def test_a_burst_is_one_report_of_the_last_message() -> None:
    async with connected() as (protocol, client):
        progress = make(protocol)
        progress.show("t", "title", "0")
        create = await client.receive()
        assert progress.task_of(create["params"]["token"]) == "t"
        client.send(id=create["id"], result=None)
        assert await value(client) == ("begin", "0")
        begun = time.monotonic()
        for count in range(1, 100):
            progress.show("t", "title", str(count))
        assert await value(client) == ("report", "99")
        assert time.monotonic() - begun > REPORT_INTERVAL_S * 0.9
        progress.end("t", "done")
        assert await value(client) == ("end", "done")


async def test_no_report_follows_the_end_and_a_task_that_goes_on_gets_a_new_token() -> None:
    async with connected() as (protocol, client):
        progress = make(protocol)
        progress.show("t", "title", "0")
        first = await client.receive()
        client.send(id=first["id"], result=None)
        await value(client)
        progress.show("t", "title", "1")
        progress.end("t", "parked")
        assert await value(client) == ("end", "parked")
        progress.show("t", "title", "again")
        second = await client.receive()
        assert second["method"] == "window/workDoneProgress/create"
        assert second["params"]["token"] != first["params"]["token"]
        client.send(id=second["id"], error={"code": -1, "message": "no"})


async def test_a_task_that_ends_before_the_client_answers_has_no_bar() -> None:
    async with connected() as (protocol, client):
        progress = make(protocol)
        progress.show("t", "title", "0")
        create = await client.receive()
        progress.end("t", "failed")
        client.send(id=create["id"], result=None)
        client.send(id=1, method="initialize", params={"processId": None, "rootUri": None, "capabilities": {}})
        assert (await client.receive())["id"] == 1

"""Requests of ours to a client that answers late, wrongly, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from editor_client import connected
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from quadjet.lsp.protocol import ConnectionProtocol

PARAMS = types.ApplyWorkspaceEditParams(types.WorkspaceEdit())


def ask(protocol: ConnectionProtocol, timeout_s: float = 20.0) -> asyncio.Task[Any]:
    return asyncio.create_task(protocol.ask(types.WORKSPACE_APPLY_EDIT, PARAMS, timeout_s))


async def test_an_answer_that_comes_too_late_harms_nothing() -> None:
    async with connected() as (protocol, client):
        with pytest.raises(TimeoutError):
            await ask(protocol, 0.01)
        late = await client.receive()
        client.send(id=late["id"], result={"applied": True})
        asked = ask(protocol)
        client.send(id=(await client.receive())["id"], result={"applied": True})
        assert (await asked).applied is True


@pytest.mark.parametrize("answer", [{"result": 5}, {"result": None}, {"result": {}}, {"error": {"code": 1, "message": "no"}}, {}])
async def test_a_refusal_or_a_wrong_answer_is_an_error(answer: dict[str, object]) -> None:
    async with connected() as (protocol, client):
        asked = ask(protocol)
        client.send(id=(await client.receive())["id"], **answer)
        with pytest.raises(JsonRpcException):
            await asked


async def test_a_client_cannot_take_back_our_request() -> None:
    async with connected() as (protocol, client):
        client.send(id=1, method="initialize", params={"processId": None, "rootUri": None, "capabilities": {}})
        await client.receive()
        asked = ask(protocol)
        msg_id = (await client.receive())["id"]
        client.send(method="$/cancelRequest", params={"id": msg_id})
        client.send(id=msg_id, result={"applied": False})
        assert (await asked).applied is False


async def test_whoever_waits_learns_that_the_client_left() -> None:
    async with connected() as (protocol, client):
        asked = ask(protocol)
        await client.receive()
        protocol.end()
        with pytest.raises(ConnectionError):
            await asked
        protocol.writer.close()
        with pytest.raises(ConnectionError):
            await ask(protocol)


async def test_two_answers_to_one_request_count_once() -> None:
    async with connected() as (protocol, client):
        asked = ask(protocol)
        msg_id = (await client.receive())["id"]
        client.send(id=msg_id, result={"applied": True})
        client.send(id=msg_id, result={"applied": False})
        assert (await asked).applied is True

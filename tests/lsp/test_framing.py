from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadjet.lsp.framing import (
    HIGH_WATER_BYTES,
    MAX_HEADER_BYTES,
    MAX_UNSENT_BYTES,
    ConnectionWriter,
    FramingError,
    read_frame,
    to_frame,
)

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v))


async def frames(data: bytes) -> list[bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while (body := await read_frame(reader, 1000)) is not None:
        found.append(body)
    return found


@given(st.lists(JSON, max_size=3))
async def test_frames_round_trip(values: list[object]) -> None:
    reader = asyncio.StreamReader()
    for value in values:
        reader.feed_data(to_frame(value))
    reader.feed_eof()
    for value in values:
        body = await read_frame(reader)
        assert body is not None
        assert json.loads(body) == value
    assert await read_frame(reader) is None


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 2\r\n\r\n",
        b"content-length:2\r\n\r\n",
        b"Content-Type: application/vscode-jsonrpc; charset=utf-8\r\nContent-Length:  2 \r\n\r\n",
    ],
)
async def test_headers_of_other_clients(header: bytes) -> None:
    assert await frames(header + b"{}" + header + b"[]") == [b"{}", b"[]"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"garbage\r\n\r\n", "header line"),
        (b"{}\n", "header line"),
        (b"\x00\xff\n", "header line"),
        (b"Content-Length: 2\n\n{}", "header line"),
        (b"Content-Length: -2\r\n\r\n{}", "whole number"),
        (b"Content-Length: 2x\r\n\r\n{}", "whole number"),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "whole number"),
        (b"Content-Length: \xb2\r\n\r\n{}", "whole number"),
        (b"Content-Type: x\r\n\r\n{}", "no Content-Length"),
        (b"Content-Length: 1001\r\n\r\n", "over the limit"),
        (b"Content-Length: " + b"9" * 3000 + b"\r\n\r\n", "over the limit"),
        (b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n", "longer"),
        (b"X: a\r\n" * MAX_HEADER_BYTES, "longer"),
        (b"a" * 100_000, "longer"),
        (b"Content-Length: 5\r\n\r\n{}", "after 2 of 5"),
        (b"Content-Length: 5\r\n", "inside a header"),
        (b"Content-Le", "inside a header"),
    ],
)
async def test_broken_framing_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        await frames(data)


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[ConnectionWriter, socket.socket]]:
    """A writer, and the socket at the other end, which nobody reads."""
    ours, theirs = socket.socketpair()
    _, stream = await asyncio.open_unix_connection(sock=ours)
    theirs.setblocking(False)
    with theirs:
        yield ConnectionWriter(stream), theirs
        stream.transport.abort()


async def test_a_client_that_does_not_read_is_behind_until_it_does() -> None:
    async with connection() as (writer, theirs):
        total = 4 * HIGH_WATER_BYTES
        writer.write(bytes(total))
        assert writer.is_behind
        draining = asyncio.create_task(writer.drained())
        loop = asyncio.get_running_loop()
        received = 0
        while received < total:
            received += len(await loop.sock_recv(theirs, 2**20))
        await draining
        assert (writer.is_behind, writer.is_closed) == (False, False)


async def test_more_than_the_limit_unsent_ends_the_connection() -> None:
    async with connection() as (writer, _):
        chunk = bytes(2**20)
        for _count in range(MAX_UNSENT_BYTES // len(chunk) + 2):
            writer.write(chunk)
        assert writer.is_closed
        await writer.drained()
        await writer.finish()

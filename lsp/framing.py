"""The base protocol's framing, with limits, and a writer that never buffers without bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 4096
HIGH_WATER_BYTES = 2**20
"""Unsent bytes above which a client counts as behind: events wait in the journal until it has caught up."""
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
STALL_S = 30.0
"""A client that is behind for this long without catching up is disconnected."""

FINISH_S = 2.0


class FramingError(Exception):
    """The stream does not follow the base protocol; where the next message starts is unknown."""


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """The body of the next message; None at the end of the stream. FramingError also for a stream that ends inside one."""
    length: int | None = None
    total = 0
    while True:
        line = await _read_line(reader)
        if line is None and total == 0:
            return None
        if line is None:
            raise FramingError("the stream ended inside a header")
        total += len(line)
        if total > MAX_HEADER_BYTES:
            raise FramingError(f"the header is longer than {MAX_HEADER_BYTES} bytes")
        if line == b"\r\n":
            break
        length = _content_length(line, length)
    if length is None:
        raise FramingError("the header has no Content-Length")
    if length > max_bytes:
        raise FramingError(f"a message of {length} bytes is over the limit of {max_bytes} bytes")
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise FramingError(f"the stream ended after {len(error.partial)} of {length} bytes of a message") from None


def to_frame(message: object) -> bytes:
    """A JSON value with its header, as sent."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FramingError("the stream ended inside a header") from None
        return None
    except asyncio.LimitOverrunError:
        raise FramingError(f"the header is longer than {MAX_HEADER_BYTES} bytes") from None


def _content_length(line: bytes, known: int | None) -> int | None:
    name, colon, value = line.partition(b":")
    if not colon or not line.endswith(b"\r\n") or not name.replace(b"-", b"").isalpha():
        raise FramingError("a header line is not of the form 'Name: value'")
    if name.lower() != b"content-length":
        return known
    digits = value.strip()
    if known is not None or not digits.isdigit():
        raise FramingError("Content-Length is not one whole number")
    return int(digits)


class ConnectionWriter:
    """The sending half of a connection, as pygls wants it. Holds at most MAX_UNSENT_BYTES, then drops the connection."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream
        stream.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    @property
    def is_behind(self) -> bool:
        return self._stream.transport.get_write_buffer_size() > HIGH_WATER_BYTES

    @property
    def is_closed(self) -> bool:
        return self._stream.transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.is_closed:
            return
        if self._stream.transport.get_write_buffer_size() + len(data) > MAX_UNSENT_BYTES:
            self.abort(f"over {MAX_UNSENT_BYTES} bytes wait for a client that does not read")
            return
        self._stream.write(data)

    async def drained(self) -> None:
        """Waits until the client is no longer behind. A client that takes longer than STALL_S is disconnected."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._stream.drain()
        except TimeoutError:
            self.abort(f"the client has not read for {STALL_S:.0f} s")
        except ConnectionError:
            pass  # the client is gone: the reading half sees the end and closes the session

    def abort(self, reason: str) -> None:
        logger.warning("Connection dropped: %s", reason)
        self._stream.transport.abort()

    def close(self) -> None:
        """Read no more; what was written is still sent, if the client takes it within FINISH_S."""
        if not self.is_closed:
            self._stream.close()
            asyncio.get_running_loop().call_later(FINISH_S, self._stream.transport.abort)

    async def finish(self) -> None:
        """Close, and wait until that is done."""
        self.close()
        with contextlib.suppress(ConnectionError):  # the client was gone first
            await self._stream.wait_closed()

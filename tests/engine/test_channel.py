"""Frames between hostile neighbours: what is said arrives, what is malformed is refused by name, nothing is read on a claim."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadjet.engine.backend import TokenSampling
from quadjet.engine.channel import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Alive,
    Cancel,
    ChannelError,
    Close,
    Done,
    Failed,
    Generate,
    GetStats,
    Hello,
    Load,
    LoadFailed,
    Logits,
    LogitsRows,
    Message,
    Progress,
    Ready,
    Stats,
    Token,
    encode,
    read_message,
    receive_message,
)

TOKENS = np.array([1, 2, 70000], np.int32)
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
MESSAGES: list[Message] = [
    Hello(1),
    Load("/models/ä.gguf", "auto", 4, 0, 64),
    Progress("loading", 1, 2),
    Ready("reference", 100, 2048, 32),
    LoadFailed(True, "no", "yes"),
    Generate(1, TOKENS, 0, TokenSampling(0.5, 3, 0.9, 0.1, 2**64 - 1), 7, None, "k", False),
    Generate(2, TOKENS[:0], 0, TokenSampling(), 7, "start: /a/", "", True),
    Logits(3, TOKENS),
    Cancel(4),
    GetStats(5),
    Token(6, 9),
    Token(7, 9, ROWS[:1]),
    LogitsRows(8, 0, ROWS),
    Done(9, "stop", 1, 2, 3, 0.5, 1),
    Failed(10, "bad", ""),
    Stats(11, {"steps": 3, "tokens_per_s": 0.25}),
    Alive("one step", 0.5),
    Close("bye"),
]


def frame(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + payload


def read(data: bytes) -> Message | None:
    return read_message(io.BytesIO(data))


def assert_same(a: Message | None, b: Message) -> None:
    assert type(a) is type(b)
    for field in fields(b):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert (np.array_equal(left, right) and left.dtype == right.dtype) if isinstance(right, np.ndarray) else left == right


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
async def test_what_is_sent_arrives(message: Message) -> None:
    assert_same(read(encode(message)), message)
    reader = asyncio.StreamReader()
    reader.feed_data(encode(message) + encode(Hello(1)))
    reader.feed_eof()
    assert_same(await receive_message(reader), message)
    assert await receive_message(reader) == Hello(1)
    assert await receive_message(reader) is None


async def test_half_a_frame_is_an_error_at_every_length() -> None:
    whole = encode(MESSAGES[5])
    for length in range(1, len(whole)):
        with pytest.raises(ChannelError, match="ended inside a frame"):
            read(whole[:length])
        reader = asyncio.StreamReader()
        reader.feed_data(whole[:length])
        reader.feed_eof()
        with pytest.raises(ChannelError, match="ended inside a frame"):
            await receive_message(reader)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", MAX_HEADER_BYTES + 1), "over the limit"),
        (struct.pack("<I", 2**32 - 1), "over the limit"),
        (struct.pack("<I", 3) + b"\xff\xfe\xfd", "not JSON"),
        (struct.pack("<I", 5) + b"{nope", "not JSON"),
        (struct.pack("<I", 200_000) + b"[" * 200_000, "not JSON"),
        (struct.pack("<I", 5000) + b"9" * 5000, "not JSON"),
        (struct.pack("<I", 30) + b'{"type":"Hello","version":NaN}', "not JSON"),
        (frame([1, 2]), "not a JSON object"),
        (frame({"type": "Hello", "version": 1}), "payload of None bytes"),
        (frame({"type": "Hello", "version": 1, "bytes": -1}), "payload of -1 bytes"),
        (frame({"type": "Hello", "version": 1, "bytes": True}), "payload of True bytes"),
        (frame({"type": "Hello", "version": 1, "bytes": MAX_PAYLOAD_BYTES + 1}), "is not between"),
        (frame({"type": "Nobody", "bytes": 0}), "no message of type 'Nobody'"),
        (frame({"type": ["Hello"], "bytes": 0}), "no message of type"),
        (frame({"bytes": 0}), "no message of type None"),
        (frame({"type": "Hello", "bytes": 0}), "Hello.version: not a whole number"),
        (frame({"type": "Hello", "version": 1.0, "bytes": 0}), "Hello.version: not a whole number"),
        (frame({"type": "Hello", "version": 2**64, "bytes": 0}), "Hello.version: not a whole number"),
        (frame({"type": "Hello", "version": True, "bytes": 0}), "Hello.version: not a whole number"),
        (frame({"type": "Hello", "version": 1, "more": 1, "bytes": 0}), "carries what it should not"),
        (frame({"type": "Hello", "version": 1, "bytes": 2}, b"ab"), "carries what it should not"),
        (frame({"type": "Close", "reason": None, "bytes": 0}), "Close.reason: not a text"),
        (frame({"type": "Stats", "id": 1, "values": {"a": "b"}, "bytes": 0}), "Stats.values: not an object of numbers"),
        (frame({"type": "Logits", "id": 1, "tokens": [2], "bytes": 4}, b"abcd"), "does not fit 4 bytes"),
        (frame({"type": "Logits", "id": 1, "tokens": [1, 1], "bytes": 4}, b"abcd"), "not a shape of 1 dimensions"),
        (frame({"type": "Logits", "id": 1, "tokens": [-1], "bytes": 4}, b"abcd"), "not a shape of 1 dimensions"),
        (frame({"type": "LogitsRows", "id": 1, "start": 0, "logits": [2**40, 2**40], "bytes": 0}), "does not fit 0 bytes"),
        (frame({"type": "Token", "id": 1, "token": 1, "logits": None, "bytes": 4}, b"abcd"), "carries what it should not"),
    ],
)
def test_malformed_messages_are_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(ChannelError, match=reason.replace(".", r"\.")):
        read(data)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1}, None, [], {"temperature": "1", "top_k": 0, "top_p": 1, "min_p": 0}])
def test_sampling_must_be_whole(sampling: object) -> None:
    header = {"type": "Generate", "id": 1, "tokens": [0], "num_generated": 0, "sampling": sampling, "max_tokens": 1}
    with pytest.raises(ChannelError, match=r"Generate\.sampling"):
        read(frame({**header, "return_logits": False, "bytes": 0}))


def test_a_message_that_would_be_refused_is_not_sent() -> None:
    with pytest.raises(ChannelError, match=r"Cancel\.id"):
        encode(Cancel("1"))  # type: ignore[arg-type]
    with pytest.raises(ChannelError, match=r"Generate\.sampling"):
        encode(Generate(1, TOKENS, 0, TokenSampling(float("nan")), 1, None, "", False))
    with pytest.raises(ChannelError, match=r"Logits\.tokens"):
        encode(Logits(1, TOKENS.astype(np.int64)))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_message_but_nothing_else(data: bytes) -> None:
    for candidate in (data, struct.pack("<I", len(data)) + data):
        try:
            read(candidate)
        except ChannelError:
            continue


@given(st.data())
def test_a_changed_byte_is_refused_or_a_message_but_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(encode(data.draw(st.sampled_from(MESSAGES))))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(whole))
    except ChannelError:
        return

"""The language between the engine process and its client: what may be said, and how it is framed.

A frame is a 4-byte little-endian length, a UTF-8 JSON header of that length, and as many raw bytes as the header's "bytes" names.
The header's "type" is a message class of this file and its other keys are that class's fields; an array travels as the raw bytes.
Both sides treat the other as hostile: sizes are checked before anything is read, every field before a message exists.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, BinaryIO, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray

from .backend import TokenSampling
from .errors import EngineError

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 16 * 2**20
MAX_PAYLOAD_BYTES = 256 * 2**20
_LENGTH = struct.Struct("<I")
_Reader = Callable[[object, bytes], object]
"""From a header's value and the raw bytes to a field's value; ValueError says what is wrong with it."""


class ChannelError(EngineError):
    """The other side sent what is not a message."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of each side."""

    version: int


@dataclass(frozen=True, slots=True)
class Load:
    """To the engine: open this model. Answered by Progress and then Ready or LoadFailed."""

    model_path: str
    backend: str
    max_sequences: int
    context: int
    """Tokens one sequence may have; 0: as many as the model and the memory allow."""
    max_step_rows: int


@dataclass(frozen=True, slots=True)
class Progress:
    message: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    backend: str
    vocab_size: int
    context: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    is_model_file: bool
    """The file is at fault, not the engine or its settings."""
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Generate:
    """To the engine: answered by Token for each token, then Done or Failed."""

    id: int
    tokens: NDArray[np.int32]
    num_generated: int
    """The last of the tokens that are no prompt: an engine that died generated them. They are not answered again."""
    sampling: TokenSampling
    max_tokens: int
    """Those among `tokens` included."""
    grammar: str | None
    key: str
    return_logits: bool


@dataclass(frozen=True, slots=True)
class Logits:
    """To the engine: answered by LogitsRows until all rows are there, then Done or Failed."""

    id: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine: end the sequence before the next step. Answered by Done unless it has ended already."""

    id: int


@dataclass(frozen=True, slots=True)
class GetStats:
    id: int


@dataclass(frozen=True, slots=True)
class UpdateSource:
    """To the engine: a text that drafts may be copied from is new or has changed."""

    name: str
    kind: str
    """What its drafts are counted under."""
    num_before: int
    """Tokens that it had; 0: it is sent whole, in the place of whatever there is under the name."""
    start: int
    num_removed: int
    tokens: NDArray[np.int32]
    """They take the place of tokens start .. start + num_removed - 1."""


@dataclass(frozen=True, slots=True)
class RemoveSource:
    """To the engine: forget a text, if it is there."""

    name: str


@dataclass(frozen=True, slots=True)
class SourceGone:
    """The engine has no such text, or not the one that was changed, or needed its memory. It must be sent whole."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    token: int
    logits: NDArray[np.float32] | None = None
    """[1, vocab] that the token was chosen from, where they were asked for; None for one that the grammar forced."""


@dataclass(frozen=True, slots=True)
class LogitsRows:
    id: int
    start: int
    logits: NDArray[np.float32]
    """[n, vocab] after the tokens at start .. start + n - 1."""


@dataclass(frozen=True, slots=True)
class Done:
    id: int
    reason: str
    """stop (end of generation or of the grammar), length, or cancelled."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    id: int
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Stats:
    id: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, about once a second from the beginning to the end."""

    work: str
    """What a thread of the process has been at for longest, or empty."""
    busy_s: float


@dataclass(frozen=True, slots=True)
class Close:
    """The sender ends the conversation, and why."""

    reason: str


ToEngine = Hello | Load | Generate | Logits | Cancel | GetStats | UpdateSource | RemoveSource | Close
FromEngine = Hello | Progress | Ready | LoadFailed | Token | LogitsRows | Done | Failed | Stats | SourceGone | Alive | Close
Message = ToEngine | FromEngine
_CLASSES: dict[str, type[Any]] = {c.__name__: c for c in get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as one frame. ChannelError if a field does not hold what it should."""
    header: dict[str, Any] = {"type": type(message).__name__}
    payload = b""
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray):
            payload = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
            value = list(value.shape)
        elif isinstance(value, TokenSampling):
            value = {f.name: getattr(value, f.name) for f in fields(value)}
        header[field.name] = value
    header["bytes"] = len(payload)
    _decode(dict(header), payload)  # what the other side would refuse, and end the conversation for, never leaves this one
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise EngineError(f"a message of {len(text)} + {len(payload)} bytes is larger than the engine channel carries")
    return _LENGTH.pack(len(text)) + text + payload


def read_message(stream: BinaryIO) -> Message | None:
    """The next message of a blocking stream; None where the stream ends between frames. Raises ChannelError."""
    prefix = stream.read(_LENGTH.size)
    if not prefix:
        return None
    header = _parse_header(_exactly(stream.read(length := _header_length(prefix)), length))
    return _decode(header, _exactly(stream.read(size := _payload_size(header)), size))


async def receive_message(reader: asyncio.StreamReader) -> Message | None:
    """The same for an asyncio stream."""
    try:
        prefix = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise ChannelError("the stream ended inside a frame") from error
    try:
        header = _parse_header(await reader.readexactly(_header_length(prefix)))
        return _decode(header, await reader.readexactly(_payload_size(header)))
    except asyncio.IncompleteReadError as error:
        raise ChannelError("the stream ended inside a frame") from error


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ChannelError("the stream ended inside a frame")
    return data


def _header_length(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(_exactly(prefix, _LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ChannelError(f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return int(length)


def _parse_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"a header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ChannelError("a header is not a JSON object")
    return header


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _payload_size(header: dict[str, Any]) -> int:
    size = header.get("bytes")
    if not _is_whole(size) or not 0 <= size <= MAX_PAYLOAD_BYTES:
        raise ChannelError(f"a payload of {size!r} bytes is not between 0 and {MAX_PAYLOAD_BYTES}")
    return size


def _decode(header: dict[str, Any], payload: bytes) -> Message:
    name = header.pop("type", None)
    del header["bytes"]
    if not isinstance(name, str) or name not in _CLASSES:
        raise ChannelError(f"there is no message of type {name!r}")
    values: dict[str, object] = {}
    payload_used = 0
    for field in fields(_CLASSES[name]):
        value = header.pop(field.name, MISSING)
        read = _READERS[str(field.type)]
        try:
            values[field.name] = read(value, payload)
        except ValueError as error:
            raise ChannelError(f"{name}.{field.name}: {error}") from error
        if isinstance(values[field.name], np.ndarray):
            payload_used = len(payload)
    if header or payload_used != len(payload):
        raise ChannelError(f"a {name} carries what it should not: {sorted(header) or 'bytes'}")
    message: Message = _CLASSES[name](**values)
    return message


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _plain(is_valid: Callable[[object], bool], wanted: str) -> _Reader:
    def read(value: object, _payload: bytes) -> object:
        if not is_valid(value):
            raise ValueError(f"not {wanted}")
        return value

    return read


def _array(dtype: str, num_dimensions: int) -> _Reader:
    def read(shape: object, payload: bytes) -> NDArray[Any]:
        if not isinstance(shape, list) or len(shape) != num_dimensions or not all(_is_whole(n) and n >= 0 for n in shape):
            raise ValueError(f"not a shape of {num_dimensions} dimensions")
        if math.prod(shape) * np.dtype(dtype).itemsize != len(payload):
            raise ValueError(f"a shape of {shape} does not fit {len(payload)} bytes")
        return np.frombuffer(payload, dtype).reshape(shape)

    return read


def _optional(read: _Reader) -> _Reader:
    return lambda value, payload: None if value is None else read(value, payload)


def _read_sampling(value: object, _payload: bytes) -> TokenSampling:
    names = {f.name for f in fields(TokenSampling)}
    if not isinstance(value, dict) or set(value) != names or not all(_is_number(v) for v in value.values()):
        raise ValueError(f"not an object of the numbers {sorted(names)}")
    return TokenSampling(**value)


_read_text = _plain(lambda v: isinstance(v, str), "a text")
_READERS: dict[str, _Reader] = {
    "int": _plain(_is_whole, "a whole number of 64 bits"),
    "float": _plain(_is_number, "a number"),
    "bool": _plain(lambda v: isinstance(v, bool), "true or false"),
    "str": _read_text,
    "str | None": _optional(_read_text),
    "dict[str, float]": _plain(lambda v: isinstance(v, dict) and all(map(_is_number, v.values())), "an object of numbers"),
    "TokenSampling": _read_sampling,
    "NDArray[np.int32]": _array("<i4", 1),
    "NDArray[np.float32]": _array("<f4", 2),
    "NDArray[np.float32] | None": _optional(_array("<f4", 2)),
}
"""By the annotation of a message's field."""

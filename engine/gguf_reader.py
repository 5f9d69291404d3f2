"""A cursor over the bytes of a GGUF header. Each read says what it wanted; none trusts a length that the file claims."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from .errors import ModelFileError

MetaValue = int | float | bool | str | NDArray[Any] | list[str]
"""A metadata value. Arrays of numbers or booleans are NumPy arrays, arrays of strings are lists."""

MAX_ARRAY = 1 << 26
"""Elements of one metadata array: far over any vocabulary."""
MAX_REASON = 300
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("u1"),
}


class Reader:
    """Reads forward from `position`; `size` is the length of the file in bytes."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.position = 0
        self.size = data.size
        self._bytes = data.data
        self._path = path

    def refuse(self, reason: str) -> NoReturn:
        if len(reason) > MAX_REASON:
            reason = reason[:MAX_REASON] + "..."  # a hostile key may be 64 KiB long
        raise ModelFileError(
            f"model file {self._path} is damaged: {reason}", "fetch the file again; `quadjet model verify` checks it"
        )

    def take(self, num_bytes: int, what: str) -> bytes:
        start = self._advance(num_bytes, what)
        return bytes(self._bytes[start : start + num_bytes])

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._bytes, self._advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._bytes, self._advance(8, what))[0]
        return value

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A number of things that follow, each of at least `least_bytes` bytes."""
        value = self.u64(what)
        if value > min(limit, (self.size - self.position) // least_bytes):
            self.refuse(f"{what} is {value}, more than the {self.size - self.position} bytes that follow can hold")
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            self.refuse(f"{what} is {length} bytes long, over the limit of {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")

    def value(self, key: str) -> MetaValue:
        kind = self._value_type(key)
        if kind is GGUFValueType.STRING:
            return self.string(f"the value of {key!r}")
        if kind is GGUFValueType.ARRAY:
            return self._array(key)
        number: MetaValue = self._numbers(kind, 1, key)[0].item()
        return number

    def _value_type(self, key: str) -> GGUFValueType:
        type_id = self.u32(f"the type of {key!r}")
        try:
            return GGUFValueType(type_id)
        except ValueError:
            self.refuse(f"metadata key {key!r} has the unknown value type {type_id}")

    def _array(self, key: str) -> NDArray[Any] | list[str]:
        kind = self._value_type(key)
        if kind is GGUFValueType.ARRAY:
            self.refuse(f"metadata key {key!r} is an array of arrays, which no supported model uses")
        what = f"the length of array {key!r}"
        if kind is GGUFValueType.STRING:
            return self._strings(self.count(what, MAX_ARRAY, 8), key)
        return self._numbers(kind, self.count(what, MAX_ARRAY, _NUMBERS[kind].itemsize), key)

    def _strings(self, count: int, key: str) -> list[str]:
        """A loop of its own: vocabularies and merge lists have 150,000 entries and more."""
        data, size, position, unpack = self._bytes, self.size, self.position, _U64.unpack_from
        texts: list[str] = []
        for index in range(count):
            if size - position < 8:
                self.refuse(f"it ends inside element {index} of {key!r}")
            length = unpack(data, position)[0]
            position += 8
            if length > size - position:
                self.refuse(f"element {index} of {key!r} claims {length} bytes, but {size - position} follow")
            try:
                texts.append(str(data[position : position + length], "utf-8"))
            except UnicodeDecodeError:
                self.refuse(f"element {index} of {key!r} is not UTF-8")
            position += length
        self.position = position
        return texts

    def _numbers(self, kind: GGUFValueType, count: int, key: str) -> NDArray[Any]:
        dtype = _NUMBERS[kind]
        start = self._advance(count * dtype.itemsize, f"the value of {key!r}")
        numbers = np.frombuffer(self._bytes, dtype, count, start).copy() if count else np.empty(0, dtype)
        if kind is not GGUFValueType.BOOL:
            return numbers
        if (numbers > 1).any():
            self.refuse(f"metadata key {key!r} holds a boolean that is neither 0 nor 1")
        return numbers.astype(np.bool_)

    def _advance(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            self.refuse(f"{what} needs {num_bytes} bytes at {start}, but the file ends at {self.size}")
        self.position = start + num_bytes
        return start

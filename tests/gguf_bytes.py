"""GGUF files built byte by byte, so that each part can be made wrong on its own."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

U32, STRING, ARRAY, BOOL = 4, 8, 9, 7


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One metadata key with its value as stored."""
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor(name: str | bytes, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor list; dims fastest first, as in the file."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@dataclass(frozen=True)
class Bytes:
    """A whole file. Counts are those of the lists unless given."""

    magic: bytes = b"GGUF"
    version: int = 3
    entries: tuple[bytes, ...] = (entry("general.name", STRING, text("a")), entry("n", U32, struct.pack("<I", 7)))
    tensors: tuple[bytes, ...] = (tensor("a"), tensor("b", (4, 2), 0, 32))
    num_entries: int | None = None
    num_tensors: int | None = None
    data: bytes = field(default=bytes(64))

    def __bytes__(self) -> bytes:
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.entries) if self.num_entries is None else self.num_entries,
        )
        head = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join(self.entries + self.tensors)
        return head + bytes(-len(head) % 32) + self.data

    def but(self, **changes: object) -> Bytes:
        return replace(self, **changes)  # type: ignore[arg-type]

    def write(self, folder: Path) -> Path:
        path = folder / "made.gguf"
        path.write_bytes(bytes(self))
        return path

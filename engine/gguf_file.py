"""GGUF container, versions 2 and 3: header read and checked in one pass, tensor bytes memory-mapped. A split model is one file.

The file is untrusted. Every count, length and offset is compared with the bytes that are really there before anything is
allocated or read, so opening costs time and memory in proportion to the header, and every fault is one ModelFileError.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import gguf
import numpy as np
from numpy.typing import NDArray

from .errors import ModelFileError
from .gguf_reader import MetaValue, Reader
from .gguf_split import check_part, other_parts

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_ENTRIES = 1 << 20
"""Metadata keys, and tensors: hundreds of times what the largest published files have."""
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 64
MAX_DIMS = 4
_LEAST_ENTRY_BYTES = 8 + 4 + 1  # empty key, value type, one byte of value
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, number of dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in NumPy order (slowest first), `offset` counts from the start of the file that is its part."""

    name: str
    shape: tuple[int, ...]
    ggml_type: gguf.GGMLQuantizationType
    offset: int
    nbytes: int
    part: int = 0


class GgufFile:
    """An open model file. Views from `raw` stay valid after `close`, which only drops this object's own reference."""

    def __init__(
        self,
        path: Path,
        metadata: dict[str, MetaValue],
        tensors: dict[str, TensorInfo],
        *data: NDArray[np.uint8],
    ) -> None:
        """`data` is the bytes of each part."""
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data: tuple[NDArray[np.uint8], ...] | None = data

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map and check `path` and, if it is the first part of a split model, the others. ModelFileError for what is wrong."""
        data = [_map(path)]
        metadata, tensors = _read_header(Reader(data[0], path))
        others = other_parts(path, metadata)
        for number, part in enumerate(others, start=1):
            data.append(_map(part))
            reader = Reader(data[-1], part)
            its_metadata, its_tensors = _read_header(reader)
            check_part(part, its_metadata, number, len(others) + 1)
            for name, info in its_tensors.items():
                if name in tensors:
                    reader.refuse(f"tensor {name!r} is in another part, too")
                tensors[name] = replace(info, part=number)
        return cls(path, metadata, tensors, *data)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as stored: a read-only view [nbytes] of the mapped file."""
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors[name]
        return self._data[info.part][info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            _refuse_path(path, "it is not a regular file")
        if status.st_size == 0:
            _refuse_path(path, "it is empty")
        data: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        _refuse_path(path, error.strerror or str(error))
    return data


def _refuse_path(path: Path, reason: str) -> NoReturn:
    raise ModelFileError(f"cannot read model file {path}: {reason}", "check the path; `quadjet model list` shows known models")


def _read_header(reader: Reader) -> tuple[dict[str, MetaValue], dict[str, TensorInfo]]:
    num_tensors, num_entries = _read_counts(reader)
    metadata: dict[str, MetaValue] = {}
    for _ in range(num_entries):
        key = reader.string("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            reader.refuse(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(key)
    alignment = _alignment(reader, metadata)
    infos = [_read_tensor(reader) for _ in range(num_tensors)]
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            reader.refuse(f"tensor {info.name!r} appears twice")
        tensors[info.name] = _place(reader, info, start, alignment)
    _refuse_overlaps(reader, tensors)
    return metadata, tensors


def _read_counts(reader: Reader) -> tuple[int, int]:
    magic = reader.take(4, "the magic")
    if magic != b"GGUF":
        reader.refuse(f"it starts with {magic!r}, not with b'GGUF', so it is not a GGUF file")
    version = reader.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "a big-endian file" if swapped in VERSIONS else f"version {version}"
        reader.refuse(f"it is {kind}; versions 2 and 3, little endian, are supported")
    num_tensors = reader.count("the number of tensors", MAX_ENTRIES, _LEAST_TENSOR_BYTES)
    num_entries = reader.count("the number of metadata keys", MAX_ENTRIES, _LEAST_ENTRY_BYTES)
    return num_tensors, num_entries


def _alignment(reader: Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.refuse(f"general.alignment is {alignment!r}, not a power of two from 8 to {MAX_ALIGNMENT}")
    return alignment


def _read_tensor(reader: Reader) -> TensorInfo:
    """One entry of the tensor list; its offset still counts from the start of the data section."""
    name = reader.string("a tensor name", MAX_NAME_BYTES)
    num_dims = reader.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        reader.refuse(f"tensor {name!r} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
    dims = [reader.u64(f"a dimension of {name!r}") for _ in range(num_dims)]
    type_id = reader.u32(f"the type of {name!r}")
    offset = reader.u64(f"the offset of {name!r}")
    try:
        ggml_type = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        reader.refuse(f"tensor {name!r} has the unknown type {type_id}")
    if 0 in dims:
        reader.refuse(f"tensor {name!r} has a dimension of 0: {dims}")
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    if dims[0] % block:
        reader.refuse(f"tensor {name!r} has rows of {dims[0]} values, not a multiple of the {block} of a {ggml_type.name} block")
    return TensorInfo(name, tuple(reversed(dims)), ggml_type, offset, prod(dims) // block * block_bytes)


def _place(reader: Reader, info: TensorInfo, start: int, alignment: int) -> TensorInfo:
    if info.offset % alignment:
        reader.refuse(f"tensor {info.name!r} is at offset {info.offset}, not a multiple of the alignment {alignment}")
    if start + info.offset + info.nbytes > reader.size:
        reader.refuse(
            f"tensor {info.name!r} needs {info.nbytes} bytes at {start + info.offset}, but the file ends at {reader.size}"
        )
    return TensorInfo(info.name, info.shape, info.ggml_type, start + info.offset, info.nbytes)


def _refuse_overlaps(reader: Reader, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            reader.refuse(f"tensors {before.name!r} and {after.name!r} overlap")

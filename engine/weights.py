"""Weights as the reference executor holds them: float32 matrices, stacked as its ops use them, and the embedding table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockType
from numpy.typing import NDArray

from ..kernels.abi import OpKind
from .gguf_file import GgufFile
from .program import Program
from .records import CHUNK, decode, decode_rows

Names = tuple[str, ...]
Progress = Callable[[int, int], None]
"""Called with the bytes read and the bytes to read."""
LOADERS = 4
"""Threads that decode: more bring nothing even on large machines, since the file's bytes arrive no faster."""


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows decoded as they are looked up: a table that is not the head too is never needed as a whole."""

    raw: NDArray[np.uint8]
    """[vocab, bytes of a row]"""
    block_type: BlockType

    def rows(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        return decode_rows(self.raw, self.block_type, tokens)


@dataclass(frozen=True, slots=True)
class Weights:
    matrices: dict[Names, NDArray[np.float32]]
    """By the names an op gives: its tensors stacked by rows, or one tensor."""
    embedding: NDArray[np.float32] | EmbeddingTable


def float32_names(program: Program) -> set[Names]:
    """What must be in memory as float32: every op's weights, biases and rope factors, but not a table only looked up."""
    names = {op.weights for op in program.ops if op.weights and op.kind is not OpKind.EMBED}
    names |= {op.biases for op in program.ops if op.biases}
    names |= {(name,) for op in program.ops for name in op.params}
    return names | {(op.rope.factors,) for op in program.ops if op.rope is not None and op.rope.factors is not None}


def load_weights(file: GgufFile, program: Program, on_progress: Progress | None = None) -> Weights:
    """Decode everything the program needs. The file may be closed afterwards."""
    matrices: dict[Names, NDArray[np.float32]] = {}
    jobs: list[_Job] = []
    for names in sorted(float32_names(program)):
        shapes = [program.tensors[name] for name in names]
        stacked = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
        matrices[names] = stacked
        jobs += _jobs(file, names, stacked.reshape(-1))
    _run(jobs, on_progress)
    table = next(op.weights for op in program.ops if op.kind is OpKind.EMBED)
    return Weights(matrices, matrices[table] if table in matrices else _read_table(file, table[0]))


def _read_table(file: GgufFile, name: str) -> EmbeddingTable:
    info = file.tensors[name]
    return EmbeddingTable(np.array(file.raw(name)).reshape(info.shape[0], -1), info.ggml_type)


@dataclass(frozen=True, slots=True)
class _Job:
    raw: NDArray[np.uint8]
    block_type: BlockType
    out: NDArray[np.float32]

    def run(self) -> int:
        decode(self.raw, self.block_type, self.out)
        return self.raw.size


def _jobs(file: GgufFile, names: Names, out: NDArray[np.float32]) -> Iterator[_Job]:
    """Pieces of about a few chunks, so that threads share large tensors and progress moves."""
    base = 0
    for name in names:
        info = file.tensors[name]
        raw = file.raw(name)
        block, block_bytes = GGML_QUANT_SIZES[info.ggml_type]
        size = prod(info.shape)
        for start in range(0, size, 8 * CHUNK):
            stop = min(size, start + 8 * CHUNK)
            yield _Job(
                raw[start // block * block_bytes : stop // block * block_bytes], info.ggml_type, out[base + start : base + stop]
            )
        base += size


def _run(jobs: list[_Job], on_progress: Progress | None) -> None:
    done, total = 0, sum(job.raw.size for job in jobs)
    with ThreadPoolExecutor(LOADERS, "weights") as pool:
        for read in pool.map(_Job.run, jobs):
            done += read
            if on_progress is not None:
                on_progress(done, total)

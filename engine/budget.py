"""How much memory a model needs on the CPU, and whether it is there: settled before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..kernels.abi import OpKind
from .backend import PAGE_TOKENS
from .errors import EngineError
from .gguf_file import GgufFile
from .lowering import lower
from .model import ModelConfig
from .program import Program
from .reference_attention import QUERY_COLUMNS
from .reference_deltanet import slot_bytes, state_bytes
from .weights import float32_names

WEIGHTS_SHARE = 0.7
"""Most of the free memory that weights may take: the rest is for the cache, the daemon, editors and what the agents run."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes needed, and bytes free when it was made."""

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.scratch_bytes

    def check(self) -> None:
        """Raise EngineError with the numbers if it does not fit."""
        if self.weights_bytes > WEIGHTS_SHARE * self.free_bytes:
            raise EngineError(
                f"the model's weights need {_gb(self.weights_bytes)} as float32 on the CPU, which is more than "
                f"{WEIGHTS_SHARE:.0%} of the {_gb(self.free_bytes)} of free memory",
                "choose a smaller model with engine.model (`quadjet model list`), or close other programs",
            )
        if self.total_bytes > self.free_bytes:
            raise EngineError(
                f"weights ({_gb(self.weights_bytes)}), KV cache ({_gb(self.kv_bytes)}), recurrent states "
                f"({_gb(self.state_bytes)}) and scratch ({_gb(self.scratch_bytes)}) exceed the {_gb(self.free_bytes)} of "
                "free memory",
                "lower engine.context or engine.max_sequences, or choose a smaller model",
            )


def memory_budget(
    file: GgufFile,
    config: ModelConfig,
    *,
    num_pages: int,
    max_rows: int = 64,
    num_slots: int = 4,
    num_checkpoints: int = 0,
    free_bytes: int | None = None,
) -> Budget:
    """What the reference executor allocates: float32 weights, the table if only looked up, cache, states, a step's scratch."""
    program = lower(config)
    return Budget(
        weights_bytes=_weights_bytes(file, program),
        kv_bytes=FLOAT_BYTES * num_pages * PAGE_TOKENS * sum(2 * shape.kv_width for shape in program.kv_layers),
        state_bytes=sum(
            num_slots * slot_bytes(shape, max_rows) + num_checkpoints * state_bytes(shape) for shape in program.delta_layers
        ),
        scratch_bytes=FLOAT_BYTES * _scratch_floats(program, num_pages, max_rows),
        free_bytes=free_memory() if free_bytes is None else free_bytes,
    )


def _weights_bytes(file: GgufFile, program: Program) -> int:
    floats = float32_names(program)
    tables = {op.weights for op in program.ops if op.kind is OpKind.EMBED} - floats
    total = FLOAT_BYTES * sum(prod(program.tensors[name]) for names in floats for name in names)
    return total + sum(file.tensors[name].nbytes for names in tables for name in names)


def _scratch_floats(program: Program, num_pages: int, max_rows: int) -> int:
    features = 2 * sum(buffer.features for buffer in program.buffers.values())
    # The inputs and outputs of one expert.
    features += max((2 * sum(program.tensors[op.params[0]][1:]) for op in program.ops if op.kind is OpKind.EXPERTS), default=0)
    scores = max((shape.kv_heads * (PAGE_TOKENS + shape.head_dim) for shape in program.kv_layers), default=0)
    return max_rows * features + num_pages * scores * QUERY_COLUMNS


def free_memory() -> int:
    """Bytes that can be taken without swapping: what the system reports, or what this control group has left if that is less."""
    free = _system_free()
    group = Path("/sys/fs/cgroup")
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max": no limit
        return free
    return max(0, min(free, left))


def _system_free() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: the whole memory is the best that the standard library knows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"

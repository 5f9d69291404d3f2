"""How much memory a model needs on the CPU, and whether it is there: settled before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .backend import PAGE_TOKENS
from .errors import EngineError
from .gguf_file import GgufFile
from .model import ModelConfig, tensor_shapes
from .reference_attention import QUERY_COLUMNS

WEIGHTS_SHARE = 0.7
"""Most of the free memory that weights may take: the rest is for the cache, the daemon, editors and what the agents run."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes needed, and bytes free when it was made."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes

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
                f"weights ({_gb(self.weights_bytes)}), KV cache ({_gb(self.kv_bytes)}) and scratch ({_gb(self.scratch_bytes)}) "
                f"exceed the {_gb(self.free_bytes)} of free memory",
                "lower engine.context or engine.max_sequences, or choose a smaller model",
            )


def memory_budget(
    file: GgufFile, config: ModelConfig, *, num_pages: int, max_rows: int = 64, free_bytes: int | None = None
) -> Budget:
    """What the reference executor allocates: float32 weights, the table if it is only looked up, cache and one step's scratch."""
    shapes = tensor_shapes(config)
    table = shapes.pop("token_embd.weight")
    weights = FLOAT_BYTES * sum(_size(shape) for shape in shapes.values())
    weights += FLOAT_BYTES * _size(table) if config.is_tied else file.tensors["token_embd.weight"].nbytes
    per_token = 2 * config.num_layers * config.kv_width * FLOAT_BYTES
    attention = num_pages * config.kv_heads * (PAGE_TOKENS + config.head_dim) * QUERY_COLUMNS
    features = 4 * config.hidden + 3 * config.ffn + 2 * (config.q_width + config.kv_width) + config.vocab_size
    return Budget(
        weights_bytes=weights,
        kv_bytes=num_pages * PAGE_TOKENS * per_token,
        scratch_bytes=(2 * max_rows * features + attention) * FLOAT_BYTES,
        free_bytes=free_memory() if free_bytes is None else free_bytes,
    )


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


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"

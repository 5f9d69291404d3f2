"""Model files with random weights, small enough to make and run inside a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.synth_gguf import SHAPES, write

VOCAB = 1024
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe")
HYBRIDS = ("qwen35", "qwen35moe")


def tiny_model(folder: Path, *, arch: str = "llama", quant: str = "F32", seed: int = 1, layers: int | None = None) -> Path:
    """Write a model with a byte-level vocabulary, a chat template and Hermes-style tool tags into `folder`.

    It has the few layers of the tiny shape, or `layers`.
    """
    shape = SHAPES[arch, "tiny"]
    path = folder / f"{arch}-{quant}-{seed}.gguf"
    write(str(path), arch, replace(shape, layers=layers or shape.layers), quant, seed)
    return path

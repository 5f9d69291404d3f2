"""Model files with random weights, small enough to make and run inside a test."""

from __future__ import annotations

from pathlib import Path

from tools.synth_gguf import SHAPES, write

VOCAB = 1024
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe")
HYBRIDS = ("qwen35", "qwen35moe")


def tiny_model(folder: Path, *, arch: str = "llama", quant: str = "F32", seed: int = 1) -> Path:
    """Write a model of a few layers with a byte-level vocabulary, a chat template and Hermes-style tool tags into `folder`."""
    path = folder / f"{arch}-{quant}-{seed}.gguf"
    write(str(path), arch, SHAPES[arch, "tiny"], quant, seed)
    return path

"""Decoding of every block type, against another decoder."""

from __future__ import annotations

import libgguf  # type: ignore[import-untyped]
import numpy as np
import pytest
from gguf import GGMLQuantizationType as BlockType
from quadjet.engine.records import CHUNK, DECODABLE, decode, decode_rows
from tools.synth_gguf import random_blocks

PLAIN = (BlockType.F32, BlockType.F16, BlockType.BF16)


@pytest.mark.parametrize("block_type", sorted(DECODABLE - set(PLAIN)), ids=lambda t: t.name)
def test_blocks_decode_like_libgguf(block_type: BlockType) -> None:
    raw = random_blocks(np.random.default_rng(1), block_type, 8, 512, 0.1)
    out = np.empty(8 * 512, np.float32)
    decode(raw.view(np.uint8).reshape(-1), block_type, out)
    assert np.array_equal(out.reshape(8, 512), libgguf.dequantize_rows(raw, int(block_type)))


@pytest.mark.parametrize("block_type", PLAIN, ids=lambda t: t.name)
def test_plain_types_keep_their_values(block_type: BlockType) -> None:
    values = np.array([0.0, -1.5, 3.25, 65280.0, 2.0**-10], np.float32)
    stored = {
        BlockType.F32: values.view(np.uint8),
        BlockType.F16: values.astype(np.float16).view(np.uint8),
        BlockType.BF16: (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
    }
    out = np.empty(len(values), np.float32)
    decode(stored[block_type], block_type, out)
    assert out.tolist() == values.tolist()


def test_a_tensor_longer_than_a_chunk_decodes_as_a_whole() -> None:
    raw = random_blocks(np.random.default_rng(2), BlockType.Q6_K, CHUNK // 256 + 3, 256, 0.1)
    out = np.empty(raw.shape[0] * 256, np.float32)
    decode(raw.reshape(-1), BlockType.Q6_K, out)
    assert np.array_equal(out.reshape(-1, 256), libgguf.dequantize_rows(raw, int(BlockType.Q6_K)))


def test_rows_of_a_table_are_those_of_the_whole() -> None:
    raw = random_blocks(np.random.default_rng(3), BlockType.Q5_0, 40, 96, 1.0)
    whole = np.empty(40 * 96, np.float32)
    decode(raw.reshape(-1), BlockType.Q5_0, whole)
    rows = np.array([39, 0, 7, 7])
    assert np.array_equal(decode_rows(raw, BlockType.Q5_0, rows), whole.reshape(40, 96)[rows])


def test_infinite_scales_decode_without_a_warning() -> None:
    raw = np.full(34, 0xFF, np.uint8)
    raw[:2] = np.float16(np.inf).reshape(1).view(np.uint8)
    out = np.empty(32, np.float32)
    decode(raw, BlockType.Q8_0, out)
    assert not np.isfinite(out).any()

"""Each op against its formula in float64, and columns that do not see each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import PAGE_TOKENS
from quadjet.engine.model import RopeStyle
from quadjet.engine.products import Products
from quadjet.engine.program import AttentionShape
from quadjet.engine.reference_attention import KvLayer, rows_views
from quadjet.engine.reference_ops import RopeTable, rms_norm, rotate, swiglu

Array = NDArray[np.float32]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def normed(x: Array) -> Array:
    out = np.empty_like(x)
    rms_norm(x, random(len(x), seed=9), 1e-6, out)
    return out


def gated(x: Array) -> Array:
    out = np.empty((len(x) // 2, x.shape[1]), np.float32)
    swiglu(x, out)
    return out


def test_rms_norm() -> None:
    x = random(100, 16)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt(np.mean(exact**2, axis=0) + 1e-6) * random(100, seed=9)[:, np.newaxis]
    assert np.allclose(normed(x), expected, rtol=1e-6, atol=1e-6)


def test_swiglu() -> None:
    x = 5 * random(64, 16)
    gate, up = x.astype(np.float64)[:32], x.astype(np.float64)[32:]
    assert np.allclose(gated(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_swiglu_of_extremes_is_finite() -> None:
    x = np.array([[-1e30, 1e30, -200.0, 0.0] * 4, [1.0] * 16], np.float32)
    with np.errstate(over="ignore"):
        assert gated(x)[0, :4].tolist() == [0.0, np.float32(1e30), 0.0, 0.0]


@pytest.mark.parametrize("function", [normed, gated])
@pytest.mark.parametrize("features", [2, 34, 500])
def test_a_column_has_the_same_bits_in_any_place(function: Callable[[Array], Array], features: int) -> None:
    x = 4 * random(features, 64)
    wide = function(x)
    for width in (16, 32, 48):
        order = np.random.default_rng(width).permutation(64)[:width]
        assert np.array_equal(function(np.ascontiguousarray(x[:, order])), wide[:, order])


@pytest.mark.parametrize("style", RopeStyle)
def test_rope_turns_each_pair_by_its_angle(style: RopeStyle) -> None:
    heads, positions = random(2, 8, 3), np.array([0, 5, 70])
    factors = np.array([1, 2, 4, 8], np.float32)
    turned = heads.copy()
    rotate(turned, *RopeTable(100.0, 8, factors).at(positions), style)
    pairs = [(2 * i, 2 * i + 1) if style is RopeStyle.ADJACENT else (i, i + 4) for i in range(4)]
    for i, (a, b) in enumerate(pairs):
        angle = positions * 100.0 ** (-2 * i / 8) / factors[i]
        expected = (heads[:, a] + 1j * heads[:, b]) * np.exp(1j * angle)
        assert np.allclose(turned[:, a], expected.real, atol=1e-6)
        assert np.allclose(turned[:, b], expected.imag, atol=1e-6)


def attention(shape: AttentionShape, q: Array, k: Array, v: Array) -> NDArray[np.float64]:
    """[heads, head_dim, n] of full causal attention, straight from the formula."""
    out = np.empty(q.shape)
    for head in range(shape.heads):
        kv = head // (shape.heads // shape.kv_heads)
        for row in range(q.shape[-1]):
            scores = k[kv, :, : row + 1].astype(np.float64).T @ q[head, :, row] / np.sqrt(shape.head_dim)
            weights = np.exp(scores - scores.max())
            out[head, :, row] = v[kv, :, : row + 1] @ (weights / weights.sum())
    return out


def attended(shape: AttentionShape, layer: KvLayer, q: Array, start: int, page_ids: NDArray[np.int32]) -> Array:
    """[heads, head_dim, n] of rows from position `start`, view by view."""
    products = Products()
    views = rows_views(shape, start, slice(0, q.shape[-1]), page_ids, products)
    return np.concatenate([layer.attend(q[:, :, view.columns], view, products) for view in views], axis=2)


@pytest.mark.parametrize("shape", [AttentionShape(6, 2, 16), AttentionShape(4, 4, 32), AttentionShape(71, 1, 8)], ids=str)
def test_attention_is_that_of_the_formula(shape: AttentionShape) -> None:
    count = 2 * PAGE_TOKENS + 9
    q = random(shape.heads, shape.head_dim, count, seed=1)
    k, v = random(2, shape.kv_heads, shape.head_dim, count, seed=2)
    layer, page_ids = KvLayer(shape, 8), np.array([6, 7, 2], np.int32)
    layer.append(k, v, 0, page_ids)
    out = attended(shape, layer, q, 0, page_ids)
    assert np.allclose(out, attention(shape, q, k, v), atol=1e-5)


def test_attention_of_a_row_has_the_same_bits_with_more_pages_behind_it() -> None:
    shape, count = AttentionShape(6, 2, 16), 4 * PAGE_TOKENS
    q = random(shape.heads, shape.head_dim, count, seed=1)
    k, v = random(2, shape.kv_heads, shape.head_dim, count, seed=2)
    layer, page_ids = KvLayer(shape, 8), np.array([1, 2, 7, 4], np.int32)
    layer.append(k, v, 0, page_ids)
    whole = attended(shape, layer, q, 0, page_ids)
    for row in (0, 63, 64, 100, 255):
        alone = attended(shape, layer, q[:, :, row : row + 1], row, page_ids)
        assert np.array_equal(alone[:, :, 0], whole[:, :, row])

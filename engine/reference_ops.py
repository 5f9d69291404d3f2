"""The ops that treat every row by itself. Arrays are [features, columns] with contiguous rows; a column is a row of the step.

Elementwise functions run over whole contiguous arrays and reductions go down the features in order, so the bits of a column do
not depend on its place.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import numpy as np
from numpy.typing import NDArray

from .backend import PAGE_TOKENS
from .model import RopeStyle, Yarn

Array = NDArray[np.float32]


def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    squares = np.square(x, dtype=np.float64)
    mean = np.add.reduce(squares, axis=0) / len(x)
    np.multiply(x, (1 / np.sqrt(mean + eps)).astype(np.float32), out=out)
    out *= weight[:, np.newaxis]


def swiglu(gate_up: Array, out: Array) -> None:
    gate, up = gate_up[: len(out)], gate_up[len(out) :]
    np.negative(gate, out=out)
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up


def norm_heads(heads: Array, weight: Array, eps: float) -> None:
    """rms_norm of each head of `heads` [heads, head_dim, columns] in place."""
    mean = np.add.reduce(np.square(heads, dtype=np.float64), axis=1, keepdims=True) / heads.shape[1]
    heads *= (1 / np.sqrt(mean + eps)).astype(np.float32)
    heads *= weight[:, np.newaxis]


def sigmoid(x: Array) -> Array:
    """Of a contiguous copy, so that every element goes through the same instructions."""
    out = np.array(x, order="C")
    np.negative(out, out=out)
    np.exp(out, out=out)
    out += 1
    np.reciprocal(out, out=out)
    return out


def add_gated(total: Array, x: Array, gate_input: Array, gate: Array) -> None:
    """Add x times the sigmoid of gate [features] . gate_input [features, columns], column by column."""
    logits = np.add.reduce(gate_input * gate.astype(np.float64)[:, np.newaxis], axis=0)
    total += x * sigmoid(logits.astype(np.float32))


class RopeTable:
    """Cosines and sines of the angles of all positions, made a page of positions at a time and kept."""

    def __init__(self, theta: float, dim: int, factors: Array | None, yarn: Yarn | None = None) -> None:
        self._frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        if factors is not None:
            self._frequencies = self._frequencies / factors.astype(np.float64)
        self._scale = 1.0
        if yarn is not None:
            kept = _kept_by_yarn(theta, dim, yarn)
            self._frequencies = self._frequencies * (kept + (1 - kept) / yarn.factor)
            self._scale = 1 + 0.1 * log(yarn.factor)
        self._pages: dict[int, tuple[Array, Array]] = {}

    def at(self, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        """(cosines, sines), each [dim / 2, len(positions)]."""
        pages = [self._page(page) for page in (positions // PAGE_TOKENS).tolist()]
        slots = (positions % PAGE_TOKENS).tolist()
        cosines = np.stack([cos[:, slot] for (cos, _), slot in zip(pages, slots, strict=True)], axis=1)
        sines = np.stack([sin[:, slot] for (_, sin), slot in zip(pages, slots, strict=True)], axis=1)
        return cosines, sines

    def _page(self, page: int) -> tuple[Array, Array]:
        if page not in self._pages:
            positions = np.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            angles = self._frequencies[:, np.newaxis] * positions
            cosines, sines = self._scale * np.cos(angles), self._scale * np.sin(angles)
            self._pages[page] = (cosines.astype(np.float32), sines.astype(np.float32))
        return self._pages[page]


def _kept_by_yarn(theta: float, dim: int, yarn: Yarn) -> NDArray[np.float64]:
    """How much of its frequency each pair keeps: 1 where it turns often in the original context, 0 where hardly once."""

    def pair_that_turns(times: float) -> float:
        return dim * log(yarn.original_context / (times * 2 * pi)) / (2 * log(theta))

    fast = max(0, floor(pair_that_turns(32)))
    slow = min(dim - 1, ceil(pair_that_turns(1)))
    return 1 - np.clip((np.arange(dim // 2) - fast) / max(0.001, slow - fast), 0, 1)


def rotate(heads: Array, cosines: Array, sines: Array, style: RopeStyle) -> None:
    """Rotate the leading features of `heads` [heads, head_dim, columns] in place by angles [rotated features / 2, columns]."""
    half = len(cosines)
    heads = heads[:, : 2 * half]
    if style is RopeStyle.ADJACENT:
        a, b = heads[:, 0::2], heads[:, 1::2]
    else:
        a, b = heads[:, :half], heads[:, half:]
    turned = a * cosines - b * sines
    b[...] = a * sines + b * cosines
    a[...] = turned

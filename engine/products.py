"""Matrix products whose column j depends on column j of the input only, bit for bit, whatever the other columns hold.

A BLAS picks other kernels, and so other orders of summation, for other numbers of columns and for columns at the edge of a
call. So rows of a step become columns of X [features, columns], columns are padded with zeros to a multiple of GROUP, and every
call W @ X takes one GROUP: OpenBLAS then treats all columns alike (measured on its Haswell, Zen and SkylakeX kernels with 1 and
2 threads). Wider calls are faster and alike on some kernels (SkylakeX) but not on others (Haswell): `find_widths` tries this
machine's BLAS on the shapes in question and allows only the widths that agree with GROUP in every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

GROUP = 16
WIDTHS = (64, 48, 32)
"""Candidates for wider calls."""
PANEL = 1536
"""Rows of W in one call: its packed copy stays in the cache (measured: 10 to 25 % faster than one call on the Haswell kernel)."""

Shape = tuple[int, int]
Array = NDArray[np.float32]


class Products:
    """Products with weights of known shapes, by the widest calls that are alike."""

    def __init__(self, widths: tuple[int, ...] = (GROUP,), group: int = GROUP) -> None:
        self._widths = widths
        self._group = group

    @classmethod
    def for_shapes(cls, shapes: Iterable[Shape]) -> Products:
        return cls(find_widths(frozenset(piece for shape in shapes for piece in _pieces(shape))))

    @classmethod
    def unpadded(cls) -> Products:
        """One call for all columns and none padded: what a step costs without identity, for benchmarks."""
        return cls((), 1)

    def padded(self, count: int) -> int:
        """Columns that hold `count` rows."""
        return -(-count // self._group) * self._group

    def multiply(self, weights: Array, x: Array, out: Array) -> None:
        """out [n, columns] = weights [n, m] @ x [m, columns]."""
        for top in range(0, len(weights), PANEL):
            self._multiply_panel(weights[top : top + PANEL], x, out[top : top + PANEL])

    def multiply_rows(self, weights: Array, x: Array, out: Array) -> None:
        """out [count, n] = the first `count` columns of weights [n, m] @ x [m, columns], as rows."""
        scratch = np.empty((min(PANEL, len(weights)), x.shape[1]), np.float32)
        for top in range(0, len(weights), PANEL):
            panel = weights[top : top + PANEL]
            part = scratch[: len(panel)]
            self._multiply_panel(panel, x, part)
            out[:, top : top + len(panel)] = part[:, : len(out)].T

    def calls(self, columns: int) -> Iterator[slice]:
        """Ranges of columns, each the width of one call."""
        start = 0
        while start < columns:
            width = next((width for width in self._widths if width <= columns - start), columns - start)
            yield slice(start, start + width)
            start += width

    def _multiply_panel(self, weights: Array, x: Array, out: Array) -> None:
        # `out` must have contiguous rows: for any other layout NumPy swaps the factors, which sums in another order.
        for columns in self.calls(x.shape[1]):
            np.matmul(weights, x[:, columns], out=out[:, columns])


def _pieces(shape: Shape) -> Iterator[Shape]:
    """The shapes of the calls that one matrix is cut into."""
    rows, inner = shape
    if rows >= PANEL:
        yield PANEL, inner
    if rows % PANEL:
        yield rows % PANEL, inner


def find_widths(shapes: Iterable[Shape]) -> tuple[int, ...]:
    """The widths, widest first and GROUP last, of which every column equals that of a GROUP call for all weight shapes."""
    random = np.random.default_rng(0)
    widths = set(WIDTHS)
    for rows, inner in sorted(shapes):
        weights = random.standard_normal((rows, inner), np.float32)
        x = random.standard_normal((inner, max(WIDTHS)), np.float32)
        groups = [weights @ np.ascontiguousarray(x[:, start : start + GROUP]) for start in range(0, max(WIDTHS), GROUP)]
        widths = set(filter(partial(_is_alike, weights, x, np.concatenate(groups, axis=1)), widths))
    return (*sorted(widths, reverse=True), GROUP)


def _is_alike(weights: Array, x: Array, expected: Array, width: int) -> bool:
    """Each column, moved to every GROUP of the call, gives the same bits."""
    for turn in range(0, width, 5):
        order = np.roll(np.arange(width), turn)
        if not np.array_equal(weights @ np.ascontiguousarray(x[:, order]), expected[:, order]):
            return False
    return True

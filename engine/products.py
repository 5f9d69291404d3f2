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

from .workers import Workers

GROUP = 16
WIDTHS = (64, 48, 32)
"""Candidates for wider calls."""
PANEL = 384
"""Rows of W in one call, about: its packed copy stays in the cache (10 to 25 % faster than one call on the Haswell kernel)."""
TILE = 48
"""Rows of W that OpenBLAS kernels take at a time divide this: parts of other heights end in slower, narrower tiles."""

Shape = tuple[int, int]
Array = NDArray[np.float32]


class Products:
    """Products with weights of known shapes, by the widest calls that are alike, shared out over threads by rows of W."""

    def __init__(self, widths: tuple[int, ...] = (GROUP,), group: int = GROUP, workers: Workers | None = None) -> None:
        self._widths = widths
        self._group = group
        self._workers = workers or Workers(1)

    @classmethod
    def for_shapes(cls, shapes: Iterable[Shape], workers: Workers | None = None) -> Products:
        """Panels and whole matrices of the shapes are tried: pages of the cache are multiplied whole."""
        count = workers.count if workers else 1
        pieces = {
            (part.stop - part.start, inner)
            for rows, inner in shapes
            for part in (*panels(rows, count), slice(0, min(rows, PANEL)))
        }
        return cls(find_widths(pieces), GROUP, workers)

    @classmethod
    def unpadded(cls, workers: Workers | None = None) -> Products:
        """One call for all columns and none padded: what a step costs without identity, for benchmarks."""
        return cls((), 1, workers)

    def padded(self, count: int) -> int:
        """Columns that hold `count` rows."""
        return -(-count // self._group) * self._group

    def multiply(self, weights: Array, x: Array, out: Array) -> None:
        """out [n, columns] = weights [n, m] @ x [m, columns]."""

        def multiply_panel(panel: slice) -> None:
            self._multiply_panel(weights[panel], x, out[panel])

        self._workers.run(multiply_panel, panels(len(weights), self._workers.count))

    def multiply_rows(self, weights: Array, x: Array, out: Array) -> None:
        """out [count, n] = the first `count` columns of weights [n, m] @ x [m, columns], as rows."""

        def multiply_panel(panel: slice) -> None:
            part = np.empty((panel.stop - panel.start, x.shape[1]), np.float32)
            self._multiply_panel(weights[panel], x, part)
            out[:, panel] = part[:, : len(out)].T

        self._workers.run(multiply_panel, panels(len(weights), self._workers.count))

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


def panels(rows: int, num_threads: int) -> list[slice]:
    """Parts of a matrix for single calls: at most about PANEL rows each, as many to every thread, whole tiles of the BLAS."""
    parts = num_threads * -(-rows // (num_threads * PANEL))
    height = -(-rows // parts // TILE) * TILE
    return [slice(top, min(top + height, rows)) for top in range(0, rows, height)]


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

"""Keys and values in pages, and attention over them, in sums whose order depends on positions only.

Scores and weighted values are computed page by page (PAGE_TOKENS positions each) and page sums are added in page order, so a
row's result does not change with the rows beside it or the pages after it: those add exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .backend import PAGE_TOKENS
from .products import Products
from .program import AttentionShape

QUERY_COLUMNS = 64
"""Query columns to attend at a time: bounds the scores to [pages, kv_heads, PAGE_TOKENS, QUERY_COLUMNS]."""


@dataclass(frozen=True, slots=True)
class RowsView:
    """Rows of one sequence that are attended together, and what each sees of the cache: the same in every layer of a step."""

    columns: slice
    """The rows' columns in the step."""
    runs: tuple[tuple[slice, slice], ...]
    """Runs of consecutive pages, as (their places in the sequence, their ids): each is read from the cache without a copy."""
    num_pages: int
    first: int
    """Every row sees all of the pages before this one."""
    hidden: NDArray[np.bool_]
    """[pages from `first`, 1, PAGE_TOKENS, query columns]: positions after the query's own."""


def rows_views(
    shape: AttentionShape, start: int, columns: slice, page_ids: NDArray[np.int32], products: Products
) -> Iterator[RowsView]:
    """Views of a sequence's rows from position `start`, each with as many rows as fill QUERY_COLUMNS."""
    group = shape.heads // shape.kv_heads
    step = max(1, QUERY_COLUMNS // group)
    for left in range(columns.start, columns.stop, step):
        count = min(step, columns.stop - left)
        begin = start + left - columns.start
        num_pages = (begin + count - 1) // PAGE_TOKENS + 1
        positions = np.full(products.padded(group * count), begin)
        positions[: group * count] = np.tile(np.arange(begin, begin + count), group)
        first = begin // PAGE_TOKENS
        keys_at = np.arange(first * PAGE_TOKENS, num_pages * PAGE_TOKENS).reshape(-1, 1, PAGE_TOKENS, 1)
        yield RowsView(slice(left, left + count), tuple(_runs(page_ids[:num_pages])), num_pages, first, keys_at > positions)


class KvLayer:
    """Cache of one layer. keys [num_pages, kv_heads, PAGE_TOKENS, head_dim], values with the last two swapped; float32."""

    def __init__(self, shape: AttentionShape, num_pages: int) -> None:
        self._shape = shape
        # np.zeros maps pages of memory as they are first written: an idle cache costs nothing.
        self._keys = np.zeros((num_pages, shape.kv_heads, PAGE_TOKENS, shape.head_dim), np.float32)
        self._values = np.zeros((num_pages, shape.kv_heads, shape.head_dim, PAGE_TOKENS), np.float32)

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32], start: int, page_ids: NDArray[np.int32]) -> None:
        """Store k and v [kv_heads, head_dim, n] of positions start .. start + n - 1."""
        done, count = 0, k.shape[-1]
        while done < count:
            page, slot = divmod(start + done, PAGE_TOKENS)
            stop = min(count, done + PAGE_TOKENS - slot)
            page_id, slots = page_ids[page], slice(slot, slot + stop - done)
            if slot == 0:
                # What another sequence left behind the end would be multiplied by 0; if it is not finite, that is not 0.
                self._values[page_id] = 0
            self._keys[page_id, :, slots] = k[:, :, done:stop].transpose(0, 2, 1)
            self._values[page_id, :, :, slots] = v[:, :, done:stop]
            done = stop

    def attend(self, q: NDArray[np.float32], view: RowsView, products: Products) -> NDArray[np.float32]:
        """[heads, head_dim, n] for q of the same shape, the rows of `view`."""
        shape, count = self._shape, q.shape[-1]
        group = shape.heads // shape.kv_heads
        scale = np.float32(1 / np.sqrt(shape.head_dim))
        by_kv_head = q.reshape(shape.kv_heads, group, shape.head_dim, count).transpose(0, 2, 1, 3) * scale
        queries = np.zeros((shape.kv_heads, shape.head_dim, products.padded(group * count)), np.float32)
        queries[:, :, : group * count] = by_kv_head.reshape(shape.kv_heads, shape.head_dim, -1)
        attended = self._attend_columns(queries, view, products)
        result = attended[:, :, : group * count].reshape(shape.kv_heads, shape.head_dim, group, count)
        return result.transpose(0, 2, 1, 3).reshape(shape.heads, shape.head_dim, count)

    def _attend_columns(self, queries: NDArray[np.float32], view: RowsView, products: Products) -> NDArray[np.float32]:
        """[kv_heads, head_dim, query columns] for queries of that shape."""
        kv_heads, head_dim, columns = queries.shape
        calls = list(products.calls(columns))
        scores = np.empty((view.num_pages, kv_heads, PAGE_TOKENS, columns), np.float32)
        for pages, ids in view.runs:
            for call in calls:
                np.matmul(self._keys[ids], queries[:, :, call], out=scores[pages, :, :, call])
        np.copyto(scores[view.first :], -np.inf, where=view.hidden)
        highest = np.maximum.reduce(np.maximum.reduce(scores, axis=2), axis=0)
        scores -= highest[:, np.newaxis]
        np.exp(scores, out=scores)
        sums = np.empty((view.num_pages, kv_heads, head_dim, columns), np.float32)
        for pages, ids in view.runs:
            for call in calls:
                np.matmul(self._values[ids], scores[pages, :, :, call], out=sums[pages, :, :, call])
        totals = np.add.reduce(np.add.reduce(scores, axis=2), axis=0)
        # The initial zero makes a sum of zeros +0, so that a page of zeros more changes nothing.
        attended: NDArray[np.float32] = np.add.reduce(sums, axis=0, initial=np.float32(0)) / totals[:, np.newaxis]
        return attended


def _runs(page_ids: NDArray[np.int32]) -> Iterator[tuple[slice, slice]]:
    breaks = [0, *(np.flatnonzero(np.diff(page_ids) != 1) + 1).tolist(), len(page_ids)]
    for begin, end in pairwise(breaks):
        yield slice(begin, end), slice(int(page_ids[begin]), int(page_ids[begin]) + end - begin)

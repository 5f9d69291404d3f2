"""Saved recurrent states: which exist and at the end of which page. A prefix of a hybrid can be resumed only where there is one.

They are taken where a later prompt is likely to part from this one: at the end of the prompt and of the whole sequence, where the
sequence itself parted from what was cached, and every few thousand tokens. The least recently used makes room.
"""

from __future__ import annotations

from collections import OrderedDict

from .backend import PAGE_TOKENS
from .sequence import Sequence

EVERY_TOKENS = 4096


class Checkpoints:
    """Numbers 0 .. count - 1, each free or at the end of a page: after the last token that the page holds for reuse."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._by_page: OrderedDict[int, int] = OrderedDict()  # least recently used first

    @property
    def num_kept(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def use(self, page: int) -> int:
        """The checkpoint at the end of a page that has one."""
        self._by_page.move_to_end(page)
        return self._by_page[page]

    def keep(self, page: int) -> int | None:
        """A checkpoint for the end of `page`, None if there can be none. The caller saves the state in it."""
        self.forget(page)
        if not self._free:
            if not self._by_page:
                return None
            self._free.append(self._by_page.popitem(last=False)[1])
        self._by_page[page] = self._free.pop()
        return self._by_page[page]

    def forget(self, page: int) -> None:
        if page in self._by_page:
            self._free.append(self._by_page.pop(page))


def positions_due(sequence: Sequence, start: int) -> list[int]:
    """Where to save, among the positions after `start` up to what is computed: always at the end of a page."""
    last = sequence.num_computed
    wanted = {
        sequence.num_prompt // PAGE_TOKENS * PAGE_TOKENS,
        sequence.num_parted,
        last // EVERY_TOKENS * EVERY_TOKENS,
    }
    return sorted(position for position in wanted if start < position <= last)

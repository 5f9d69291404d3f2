"""Who holds which KV page, and which computed pages a new sequence can share.

A full page never changes, so sequences share it by reference. Pages that nobody holds stay findable until their room is needed:
least recently used first. A page is found by the page before it and its own tokens. That stays true because a sequence holds all
pages of its prefix and lets go of the deepest first: no page outlives the one before it.
A running sequence is never evicted: its pages up to max_tokens are set aside when it is admitted, and taken as it grows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .backend import PAGE_TOKENS
from .checkpoints import Checkpoints, positions_due
from .sequence import Sequence, pages_for

_ROOT = -1
"""Stands for the page before the first one."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """A partly filled page left by the last sequence of a key."""

    parent: int
    tokens: tuple[int, ...]
    page: int


class PageCache:
    """Allocates pages 0 .. num_pages - 1."""

    def __init__(self, num_pages: int, checkpoints: Checkpoints | None = None) -> None:
        """With `checkpoints` a prefix is shared only up to the end of a page that has one."""
        self.num_pages = num_pages
        self._checkpoints = checkpoints
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._reserved = 0  # pages that running sequences may still take
        self._page_by_content: dict[tuple[int, tuple[int, ...]], int] = {}
        self._content_by_page: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._tails: dict[str, _Tail] = {}
        self._tail_keys: dict[int, str] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # computed pages that no sequence holds, oldest use first

    @property
    def num_idle(self) -> int:
        """Pages kept only for reuse."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages held by running sequences."""
        return self.num_pages - len(self._free) - len(self._idle)

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence the longest cached prefix and set the rest of its pages aside. False, and no change, if they lack."""
        shared = self._longest_prefix(sequence)
        num_parted = len(shared) * PAGE_TOKENS
        tail, num_tail = self._matching_tail(sequence, shared)
        if self._checkpoints is not None and (tail is None or num_tail < len(tail.tokens) or tail.page not in self._checkpoints):
            tail, num_tail = None, 0
            while shared and shared[-1] not in self._checkpoints:
                shared.pop()
        pages = shared if tail is None else [*shared, tail.page]
        num_new = sequence.max_pages - len(pages)
        num_available = len(self._free) + len(self._idle) - sum(page in self._idle for page in pages) - self._reserved
        if num_new > num_available:
            return False
        if self._checkpoints is not None and pages:
            sequence.checkpoint = self._checkpoints.use(pages[-1])
        sequence.num_parted = num_parted
        if tail is not None:
            self._forget_tail(sequence.key)
        for page in pages:
            self._hold(page)
        self._reserved += num_new
        sequence.page_ids = pages
        sequence.num_computed = sequence.num_cached = len(shared) * PAGE_TOKENS + num_tail
        return True

    def share_more(self, sequence: Sequence) -> None:
        """Take pages of the prompt that others have computed since the sequence was admitted."""
        while self._checkpoints is None and sequence.num_computed == len(sequence.page_ids) * PAGE_TOKENS:
            page = self._next_shared(sequence, sequence.page_ids)
            if page is None:
                return
            self._hold(page)
            self._reserved -= 1
            sequence.page_ids.append(page)
            sequence.num_computed += PAGE_TOKENS
            sequence.num_cached += PAGE_TOKENS

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate pages for positions 0 .. num_tokens - 1. They were set aside by admit."""
        while len(sequence.page_ids) < pages_for(num_tokens):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            self._reserved -= 1
            sequence.page_ids.append(page)

    def commit(self, sequence: Sequence, num_rows: int) -> None:
        """The next `num_rows` positions are computed: full pages become findable.

        Where another sequence already filled a page with the same content, the sequence moves over to that one: the two hold the
        same bits, since a row's value depends on its prefix only.
        """
        first = sequence.num_computed // PAGE_TOKENS
        sequence.num_computed += num_rows
        for index in range(first, sequence.num_computed // PAGE_TOKENS):
            page = sequence.page_ids[index]
            content = (sequence.page_ids[index - 1] if index else _ROOT, sequence.page_tokens(index))
            known = self._page_by_content.setdefault(content, page)
            if known == page:
                self._content_by_page[page] = content
            else:
                self._hold(known)
                sequence.page_ids[index] = known
                self._references[page] = 0
                self._free.append(page)

    def new_checkpoints(self, sequence: Sequence, start: int) -> Iterator[tuple[int, int]]:
        """(position, checkpoint) to save, after rows from `start` were committed."""
        if self._checkpoints is None or sequence.wants_prompt_logits:
            return
        for position in positions_due(sequence, start):
            page = sequence.page_ids[position // PAGE_TOKENS - 1]
            if page in self._checkpoints:
                self._checkpoints.use(page)
            elif (checkpoint := self._checkpoints.keep(page)) is not None:
                yield position, checkpoint

    def end_checkpoint(self, sequence: Sequence) -> int | None:
        """The checkpoint to save at the end of what a sequence computed, before its release; None if none could resume there."""
        is_findable = sequence.key or sequence.num_computed % PAGE_TOKENS == 0
        if self._checkpoints is None or not sequence.num_computed or not is_findable or sequence.wants_prompt_logits:
            return None
        return self._checkpoints.keep(sequence.page_ids[pages_for(sequence.num_computed) - 1])

    def release(self, sequence: Sequence) -> None:
        """Let go of all pages of an admitted sequence; computed ones stay for reuse."""
        self._reserved -= sequence.max_pages - len(sequence.page_ids)
        num_full = sequence.num_computed // PAGE_TOKENS
        for page in sequence.page_ids[:num_full:-1]:  # allocated, not computed
            self._let_go(page)
        if num_full < len(sequence.page_ids):
            self._keep_tail(sequence, num_full)
            self._let_go(sequence.page_ids[num_full])
        for page in reversed(sequence.page_ids[:num_full]):
            self._let_go(page)
        sequence.page_ids = []

    def _longest_prefix(self, sequence: Sequence) -> list[int]:
        pages: list[int] = []
        while (page := self._next_shared(sequence, pages)) is not None:
            pages.append(page)
        return pages

    def _next_shared(self, sequence: Sequence, pages: list[int]) -> int | None:
        if (len(pages) + 1) * PAGE_TOKENS > sequence.num_reusable:
            return None
        return self._page_by_content.get((pages[-1] if pages else _ROOT, sequence.page_tokens(len(pages))))

    def _matching_tail(self, sequence: Sequence, shared: list[int]) -> tuple[_Tail | None, int]:
        """The tail left under the sequence's key, if it follows `shared`, and how many of its tokens fit."""
        tail = self._tails.get(sequence.key)
        if tail is None or tail.parent != (shared[-1] if shared else _ROOT):
            return None, 0
        start = len(shared) * PAGE_TOKENS
        wanted = sequence.tokens[start : min(start + PAGE_TOKENS, sequence.num_reusable)]
        num_equal = next((i for i, (a, b) in enumerate(zip(tail.tokens, wanted, strict=False)) if a != b), None)
        count = min(len(tail.tokens), len(wanted)) if num_equal is None else num_equal
        return (tail, count) if count else (None, 0)

    def _keep_tail(self, sequence: Sequence, num_full: int) -> None:
        tokens = tuple(sequence.tokens[num_full * PAGE_TOKENS : sequence.num_computed])
        if not sequence.key or not tokens:
            return
        if (old := self._tails.get(sequence.key)) is not None:
            self._forget_tail(sequence.key)
            del self._idle[old.page]
            self._free.append(old.page)
        page = sequence.page_ids[num_full]
        self._tails[sequence.key] = _Tail(sequence.page_ids[num_full - 1] if num_full else _ROOT, tokens, page)
        self._tail_keys[page] = sequence.key

    def _forget_tail(self, key: str) -> None:
        page = self._tails.pop(key).page
        del self._tail_keys[page]
        self._forget_checkpoint(page)

    def _forget_checkpoint(self, page: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.forget(page)

    def _hold(self, page: int) -> None:
        self._references[page] += 1
        self._idle.pop(page, None)

    def _let_go(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._content_by_page or page in self._tail_keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        if page in self._tail_keys:
            self._forget_tail(self._tail_keys[page])
        else:
            del self._page_by_content[self._content_by_page.pop(page)]
            self._forget_checkpoint(page)
        return page

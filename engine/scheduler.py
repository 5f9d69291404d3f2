"""Which rows the next step computes.

Every decoding sequence gets its row in every step, and the rows of tokens that its grammar forced. What is left of max_rows goes
to waiting prompts, so a prompt holds the others up for one step of max_rows rows at a time. The prompt with the fewest rows left
comes first; every fourth step the one admitted first does, so that short prompts cannot starve a long one. Sequences are admitted
in the order they came; none overtakes. Drafts take the columns that the decoding rows leave of their group: those are computed
anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .cache import PageCache
from .errors import EngineError
from .sequence import Sequence

_OLDEST_EVERY = 4
_GROUP_ROWS = 16
"""Rows are computed in groups of so many columns; a group costs the same whether it is full or not."""

Propose = Callable[[list[Sequence], int], list[list[int]]]
"""From decoding sequences and the number of rows to spare, to drafts of what follows each."""


class ScheduledRows(NamedTuple):
    """Rows num_computed .. num_computed + num_rows - 1 of a sequence; logits are needed of the last num_sampled.

    A row for each draft may follow.
    """

    sequence: Sequence
    num_rows: int
    num_sampled: int
    drafts: tuple[int, ...] = ()


class Scheduler:
    def __init__(self, cache: PageCache, *, max_sequences: int, max_rows: int, max_waiting: int) -> None:
        if not 1 <= max_sequences <= max_rows:
            raise EngineError(
                f"a step of {max_rows} rows cannot hold a row of each of {max_sequences} sequences", "lower engine.max_sequences"
            )
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._free_slots = list(range(max_sequences))
        self._cache = cache
        self._max_sequences = max_sequences
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._num_prefill_steps = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises EngineError if it could never run or the queue is full."""
        if sequence.max_pages > self._cache.num_pages:
            raise EngineError(
                f"the sequence needs {sequence.max_pages} pages of cache, but there are {self._cache.num_pages}",
                "lower max_tokens or raise engine.context",
            )
        if len(self.waiting) >= self._max_waiting:
            raise EngineError(f"{self._max_waiting} sequences wait already", "try again when one has finished")
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, running or waiting, and let go of its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            self._cache.release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, propose: Propose | None = None) -> list[ScheduledRows]:
        """The rows of the next step, at most max_rows; empty when there is nothing to do."""
        self._admit()
        share = self._max_rows // self._max_sequences
        rows = [_rows(s, share) for s in self.running if s.is_decoding]
        room = self._max_rows - sum(scheduled.num_rows for scheduled in rows)
        prompts = self._prompts()
        if propose is not None:
            rows = _with_drafts(rows, propose, room // 2 if prompts else room)
            room = self._max_rows - sum(scheduled.num_rows + len(scheduled.drafts) for scheduled in rows)
        for sequence in prompts:
            if room == 0:
                break
            self._cache.share_more(sequence)
            rows.append(_rows(sequence, room))
            room -= rows[-1].num_rows
        for scheduled in rows:
            end = scheduled.sequence.num_computed + scheduled.num_rows + len(scheduled.drafts)
            self._cache.grow(scheduled.sequence, end)
        return rows

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sequences and self._cache.admit(self.waiting[0]):
            self.waiting[0].slot = self._free_slots.pop()
            self.running.append(self.waiting.popleft())

    def _prompts(self) -> list[Sequence]:
        """Sequences with prompt rows left, in the order in which they may take room. `running` is in order of admission."""
        prompts = [s for s in self.running if not s.is_decoding]
        if not prompts:
            return []
        self._num_prefill_steps += 1
        by_length = sorted(prompts, key=lambda s: s.num_remaining)
        if self._num_prefill_steps % _OLDEST_EVERY == 0:
            by_length.remove(prompts[0])
            by_length.insert(0, prompts[0])
        return by_length


def _rows(sequence: Sequence, most: int) -> ScheduledRows:
    """The sequence's next rows, `most` at most; the last row before a token to choose is sampled."""
    count = min(most, sequence.num_remaining)
    is_last = count == sequence.num_remaining
    return ScheduledRows(sequence, count, count if sequence.wants_prompt_logits else int(is_last))


def _with_drafts(rows: list[ScheduledRows], propose: Propose, room: int) -> list[ScheduledRows]:
    """The rows with drafts behind those that sample. `room`: most drafts."""
    room = min(room, -sum(scheduled.num_rows for scheduled in rows) % _GROUP_ROWS)
    sampled = [scheduled.sequence for scheduled in rows if scheduled.num_sampled]
    if not sampled or room <= 0:
        return rows
    drafts = dict(zip(sampled, propose(sampled, room), strict=True))
    return [scheduled._replace(drafts=tuple(drafts.get(scheduled.sequence, ()))) for scheduled in rows]

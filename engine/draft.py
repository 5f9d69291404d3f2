"""Guesses at the tokens that come next. A step computes them along with the row before them and keeps those that were right."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from .sequence import Sequence


class DraftSource(Protocol):
    """Where drafts come from. Whatever it says, the generated tokens are the same: bad drafts cost rows only."""

    def propose(self, sequences: Items[Sequence], room: int) -> list[list[int]]:
        """For each sequence what may follow its tokens, possibly nothing; `room` tokens at most, all together."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """How many of the sequence's last drafts were computed, and how many leading ones were right."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

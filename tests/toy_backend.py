"""A Backend whose model is a hash of the whole prefix, read back from the pages it was given.

Any page that is shared wrongly, overwritten or not filled changes the logits. It also checks every plan against the contract.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from quadjet.engine.backend import PAGE_TOKENS, SequenceRows, StepPlan, StepResult
from quadjet.engine.errors import EngineError
from quadjet.engine.sampling import choose

POISON = 48
"""A row of this token makes the executor fail."""


def toy_logits(tokens: list[int], vocab: int) -> NDArray[np.float32]:
    """What the toy model says after `tokens`."""
    digest = hashlib.sha256(np.array(tokens, np.int64).tobytes()).digest()
    return np.random.default_rng(list(digest)).normal(0, 3, vocab).astype(np.float32)


class ToyBackend:
    has_recurrent_state = False
    num_checkpoints = 0

    def __init__(self, *, num_pages: int = 64, max_rows: int = 64, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.plans: list[StepPlan] = []
        self._pages = np.full((num_pages, PAGE_TOKENS), -1, np.int64)

    def step(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        self.plans.append(plan)
        if any((s.tokens == POISON).any() for s in plan.sequences):
            raise EngineError("a poisoned row")
        tokens, logits = [], []
        for sequence in plan.sequences:
            rows = self._forward(sequence)
            tokens.append(choose(rows, sequence))
            logits.append(rows[: len(tokens[-1])] if sequence.return_logits else None)
        return StepResult(tuple(tokens), tuple(logits))

    def _forward(self, rows: SequenceRows) -> NDArray[np.float32]:
        positions = rows.start + np.arange(len(rows.tokens))
        self._pages[rows.page_ids[positions // PAGE_TOKENS], positions % PAGE_TOKENS] = rows.tokens
        stream = self._pages[rows.page_ids].reshape(-1)
        out = [toy_logits(stream[: p + 1].tolist(), self.vocab_size) for p in positions[len(positions) - rows.num_sampled :]]
        return np.array(out, np.float32).reshape(-1, self.vocab_size)

    def _check(self, plan: StepPlan) -> None:
        assert plan.sequences
        assert sum(len(s.tokens) for s in plan.sequences) <= self.max_rows
        written: list[int] = []
        for s in plan.sequences:
            assert 0 <= s.num_sampled <= len(s.tokens)
            assert s.num_drafts == 0 or s.num_sampled == s.num_drafts + 1
            assert len(s.page_ids) == -(-(s.start + len(s.tokens)) // PAGE_TOKENS)
            assert len(set(s.page_ids.tolist())) == len(s.page_ids)
            assert ((s.page_ids >= 0) & (s.page_ids < self.num_pages)).all()
            written += s.page_ids[s.start // PAGE_TOKENS :].tolist()
        held = [page for s in plan.sequences for page in s.page_ids.tolist()]
        assert all(held.count(page) == 1 for page in written), "a page that is written is held by another sequence"

    def save_checkpoint(self, slot: int, position: int, checkpoint: int) -> None:
        raise AssertionError("there is no recurrent state")

    def load_checkpoint(self, slot: int, checkpoint: int) -> None:
        raise AssertionError("there is no recurrent state")


class ToyHybrid(ToyBackend):
    """Reads half of the prefix back from its slot, where a state can go back to the start of the last step and no further."""

    has_recurrent_state = True

    def __init__(self, *, num_checkpoints: int = 16, num_slots: int = 4, **more: int) -> None:
        super().__init__(**more)
        self.num_checkpoints = num_checkpoints
        self.saved_at: list[int] = []
        self._states: list[list[int]] = [[] for _ in range(num_slots)]
        self._oldest = [0] * num_slots
        self._saved: list[list[int]] = [[] for _ in range(num_checkpoints)]

    def save_checkpoint(self, slot: int, position: int, checkpoint: int) -> None:
        assert self._oldest[slot] <= position <= len(self._states[slot])
        self._saved[checkpoint] = self._states[slot][:position]
        self.saved_at.append(position)

    def load_checkpoint(self, slot: int, checkpoint: int) -> None:
        self._states[slot] = list(self._saved[checkpoint])
        self._oldest[slot] = len(self._states[slot])

    def _forward(self, rows: SequenceRows) -> NDArray[np.float32]:
        state = self._states[rows.slot]
        assert rows.start == 0 or self._oldest[rows.slot] <= rows.start <= len(state)
        self._oldest[rows.slot] = rows.start
        state[rows.start :] = rows.tokens.tolist()
        logits = super()._forward(rows)
        stream = self._pages[rows.page_ids].reshape(-1)[: len(state)]
        assert stream.tolist() == state, "the state is of another prefix than the pages"
        return logits

"""What the scheduler asks of an executor: one step over the rows of up to four sequences. Plain data both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CHECKPOINTS_PER_SLOT = 4
"""Saved recurrent states for each sequence that can run at once."""
PAGE_TOKENS = 64
"""Tokens of one KV page: also the unit in which attention sums, so results depend on positions only."""


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """Sampling of one sequence's rows, token level. temperature 0 is greedy (lowest id wins a tie)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows that one sequence computes in this step: consecutive positions from `start`."""

    start: int
    """Position of the first row; positions before it are already in the cache."""
    tokens: NDArray[np.int32]
    """[n] token ids, 1 <= n."""
    page_ids: NDArray[np.int32]
    """[ceil((start + n) / PAGE_TOKENS)] pages of the sequence, in order of position."""
    num_sampled: int
    """Trailing rows whose logits are computed and sampled: 0 for a prefill chunk that is not the last, 1 for decode."""
    sampling: TokenSampling
    mask: NDArray[np.int32] | None = None
    """[num_sampled, ceil(vocab / 32)] bit set = token allowed (llguidance's layout), or None for all."""
    return_logits: bool = False
    """Return the raw float32 logits of the sampled rows."""
    num_drafts: int = 0
    """The last `num_drafts` tokens are guesses at what the rows before them sample; num_sampled is one more then, else any."""
    slot: int = 0
    """Where a recurrent state is kept, 0 .. most sequences - 1: one sequence's alone until its last step. Rows from position 0
    begin with an empty state; others must begin within or right after the rows of the slot's last step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    sequences: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per sequence of the plan, in its order."""

    tokens: tuple[NDArray[np.int32], ...]
    """[num_sampled] sampled token ids each. With drafts: left to right up to the first that differs from its draft, inclusive."""
    logits: tuple[NDArray[np.float32] | None, ...]
    """[len(tokens), vocab] where return_logits was set."""


class Backend(Protocol):
    """An executor of one model's program. Not thread-safe: one step at a time."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_pages(self) -> int:
        """KV pages the executor holds; page ids are 0 .. num_pages - 1."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of one step, all sequences together."""
        ...

    @property
    def has_recurrent_state(self) -> bool:
        """A sequence's state is more than its pages: a prefix can be resumed only where a checkpoint was saved."""
        ...

    @property
    def num_checkpoints(self) -> int:
        """Recurrent states that can be saved; their numbers are 0 .. num_checkpoints - 1."""
        ...

    def save_checkpoint(self, slot: int, position: int, checkpoint: int) -> None:
        """Save the state at `position`, which lies within or right after the rows of the slot's last step."""
        ...

    def load_checkpoint(self, slot: int, checkpoint: int) -> None:
        """Make the slot's state the saved one: the next step starts at the position of which it was saved."""
        ...

    def step(self, plan: StepPlan) -> StepResult: ...

"""Gated DeltaNet on NumPy: a serial recurrence whose every row runs the same instructions on arrays of the same shapes.

So a row's bits do not depend on the step it is computed in. A slot keeps two states, before and after the rows of its last step,
and those rows: the next step may start at any of them. Where drafts were refused, the accepted rows are computed again from the
state before, which gives the same bits as if there had been no drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .model import DeltaShape

Array = NDArray[np.float32]


def state_bytes(shape: DeltaShape) -> int:
    """What one saved state of one layer takes."""
    return 4 * (shape.v_width * shape.head_dim + shape.conv_taps * shape.conv_width)


def slot_bytes(shape: DeltaShape, max_rows: int) -> int:
    """What one slot of one layer takes."""
    return 2 * state_bytes(shape) + 4 * max_rows * _row_width(shape)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """conv [taps, conv_width], decay and time_bias [v_heads] float64."""

    conv: Array
    decay: NDArray[np.float64]
    time_bias: NDArray[np.float64]
    eps: float


@dataclass(slots=True)
class _State:
    """After the rows before `position`: memory [v_heads, head_dim of v, head_dim of k], window [taps, conv_width]."""

    memory: Array
    window: Array
    position: int = 0

    @classmethod
    def empty(cls, shape: DeltaShape) -> _State:
        memory = np.zeros((shape.v_heads, shape.head_dim, shape.head_dim), np.float32)
        return cls(memory, np.zeros((shape.conv_taps, shape.conv_width), np.float32))

    def clear(self) -> None:
        self.memory.fill(0)  # never by a product: what is left may not be finite
        self.window.fill(0)
        self.position = 0

    def copy_from(self, other: _State) -> None:
        np.copyto(self.memory, other.memory)
        np.copyto(self.window, other.window)
        self.position = other.position


@dataclass(slots=True)
class _Slot:
    before: _State
    after: _State
    rows: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[after.position - before.position, row width]"""


class DeltaLayer:
    """The states of one layer: in slots, and saved."""

    def __init__(self, shape: DeltaShape, weights: DeltaWeights, num_slots: int, num_checkpoints: int) -> None:
        self._shape = shape
        self._weights = weights
        self._slots = [_Slot(_State.empty(shape), _State.empty(shape)) for _ in range(num_slots)]
        self._saved = [_State.empty(shape) for _ in range(num_checkpoints)]

    def can_start(self, slot: int, position: int) -> bool:
        """Position 0 begins a new sequence; any other must be within or right after the rows of the slot's last step."""
        kept = self._slots[slot]
        return position == 0 or kept.before.position <= position <= kept.after.position

    def save(self, slot: int, position: int, checkpoint: int) -> None:
        kept, saved = self._slots[slot], self._saved[checkpoint]
        if position == kept.after.position:
            saved.copy_from(kept.after)
        else:
            saved.copy_from(kept.before)
            self._replay(saved, kept, position)

    def load(self, slot: int, checkpoint: int) -> None:
        kept = self._slots[slot]
        kept.before.copy_from(self._saved[checkpoint])
        kept.after.copy_from(kept.before)
        kept.rows = kept.rows[:0]

    def run(self, slot: int, start: int, rows: Array) -> Array:
        """[n, v_width] for rows [n, conv channels, alphas, betas] of the positions from `start`."""
        kept = self._slots[slot]
        self._go_to(kept, start)
        kept.after.copy_from(kept.before)
        kept.rows = rows
        out = np.empty((len(rows), self._shape.v_width), np.float32)
        for row, result in zip(rows, out, strict=True):
            result[:] = self._advance(kept.after, row)
        return out

    def _go_to(self, kept: _Slot, position: int) -> None:
        """Make `before` the state at `position`."""
        if position == 0:
            kept.before.clear()
        elif position == kept.after.position:
            kept.before, kept.after = kept.after, kept.before
        else:
            self._replay(kept.before, kept, position)

    def _replay(self, state: _State, kept: _Slot, position: int) -> None:
        """Move a copy of `kept.before`, or that itself, on to a position within the rows."""
        for row in kept.rows[: position - kept.before.position]:
            self._advance(state, row)
        assert state.position == position

    def _advance(self, state: _State, row: Array) -> Array:
        """Move the state on by one row; what the V heads read from it, [v_width]."""
        shape, weights = self._shape, self._weights
        channels = _convolve(state.window, row[: shape.conv_width], weights.conv)
        alpha, beta = row[shape.conv_width :].astype(np.float64).reshape(2, shape.v_heads)
        kept = np.exp(weights.decay * np.logaddexp(0, alpha + weights.time_bias)).astype(np.float32)
        written = (1 / (1 + np.exp(-beta))).astype(np.float32)
        q, k = self._unit_heads(channels[: 2 * shape.k_width], weights.eps)
        v = channels[2 * shape.k_width :].reshape(shape.v_heads, shape.head_dim)
        memory = state.memory
        memory *= kept[:, np.newaxis, np.newaxis]
        delta = written[:, np.newaxis] * (v - np.matmul(memory, k[:, :, np.newaxis])[:, :, 0])
        memory += delta[:, :, np.newaxis] * k[:, np.newaxis, :]
        state.position += 1
        read: Array = np.matmul(memory, q[:, :, np.newaxis])
        return read.reshape(-1)

    def _unit_heads(self, qk: Array, eps: float) -> tuple[Array, Array]:
        """q / sqrt(head_dim) and k, of unit length, for each V head: [v_heads, head_dim]."""
        shape = self._shape
        heads = qk.reshape(2 * shape.k_heads, shape.head_dim)
        squares = np.add.reduce(np.square(heads, dtype=np.float64), axis=1, keepdims=True)
        heads = (heads / np.sqrt(squares + eps)).astype(np.float32)
        times = (shape.v_heads // shape.k_heads, 1)  # V head j uses K head j % k_heads
        q, k = heads[: shape.k_heads], heads[shape.k_heads :]
        return np.tile(q * np.float32(shape.head_dim**-0.5), times), np.tile(k, times)


def _convolve(window: Array, channels: Array, weights: Array) -> Array:
    """silu of the convolution at the row that comes in, [conv_width]. Moves the window on."""
    window[:-1] = window[1:]
    window[-1] = channels
    total: Array = weights[0] * window[0]
    for tap in range(1, len(weights)):
        total += weights[tap] * window[tap]
    total /= 1 + np.exp(-total)
    return total


def _row_width(shape: DeltaShape) -> int:
    return shape.conv_width + 2 * shape.v_heads

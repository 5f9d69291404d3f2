"""The recurrence against its formula, head by head in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.model import DeltaShape
from quadjet.engine.reference_deltanet import DeltaLayer, DeltaWeights

Exact = NDArray[np.float64]
EPS = 1e-6
SHAPES = [DeltaShape(2, 6, 16, 4), DeltaShape(3, 3, 8, 2), DeltaShape(1, 4, 32, 3)]


def weights_of(shape: DeltaShape) -> DeltaWeights:
    random = np.random.default_rng(1)
    conv = random.normal(0, 0.5, (shape.conv_taps, shape.conv_width)).astype(np.float32)
    return DeltaWeights(conv, -np.exp(random.normal(-1, 1, shape.v_heads)), random.normal(0.5, 0.5, shape.v_heads), EPS)


def rows_of(shape: DeltaShape, count: int, scale: float = 1.0) -> NDArray[np.float32]:
    width = shape.conv_width + 2 * shape.v_heads
    return (scale * np.random.default_rng(2).standard_normal((count, width))).astype(np.float32)


def formula(shape: DeltaShape, weights: DeltaWeights, rows: Exact) -> Exact:
    """[n, v_width], as the description of the op has it."""
    channels, alpha, beta = np.split(rows, [shape.conv_width, shape.conv_width + shape.v_heads], axis=1)
    padded = np.concatenate([np.zeros((shape.conv_taps - 1, shape.conv_width)), channels])
    mixed = sum(weights.conv[tap] * padded[tap : tap + len(rows)] for tap in range(shape.conv_taps))
    mixed = mixed / (1 + np.exp(-mixed))
    out = np.empty((len(rows), shape.v_heads, shape.head_dim))
    for head in range(shape.v_heads):
        state = np.zeros((shape.head_dim, shape.head_dim))
        at = head % shape.k_heads * shape.head_dim
        for t, row in enumerate(mixed):
            q, k = row[at : at + shape.head_dim], row[shape.k_width + at : shape.k_width + at + shape.head_dim]
            v = row[2 * shape.k_width + head * shape.head_dim :][: shape.head_dim]
            q, k = q / np.sqrt(q @ q + EPS), k / np.sqrt(k @ k + EPS)
            state *= np.exp(weights.decay[head] * np.log1p(np.exp(alpha[t, head] + weights.time_bias[head])))
            state += np.outer((v - state @ k) / (1 + np.exp(-beta[t, head])), k)
            out[t, head] = state @ q / np.sqrt(shape.head_dim)
    return out.reshape(len(rows), -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_recurrence_is_that_of_the_formula(shape: DeltaShape) -> None:
    weights, rows = weights_of(shape), rows_of(shape, 90)
    out = DeltaLayer(shape, weights, 1, 0).run(0, 0, rows)
    assert np.allclose(out, formula(shape, weights, rows.astype(np.float64)), atol=1e-5)


def test_gates_at_their_ends_stay_finite() -> None:
    shape = SHAPES[0]
    with np.errstate(over="ignore"):
        assert np.isfinite(DeltaLayer(shape, weights_of(shape), 1, 0).run(0, 0, rows_of(shape, 20, scale=1e4))).all()


def test_a_sequence_begins_empty_whatever_the_slot_held() -> None:
    shape, broken = SHAPES[0], rows_of(SHAPES[0], 5)
    broken[2] = np.inf
    fresh, used = DeltaLayer(shape, weights_of(shape), 1, 0), DeltaLayer(shape, weights_of(shape), 1, 0)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(used.run(0, 0, broken)).all()
    rows = rows_of(shape, 30)
    assert np.array_equal(used.run(0, 0, rows), fresh.run(0, 0, rows))


def test_a_step_that_failed_can_be_computed_again() -> None:
    shape, rows = SHAPES[0], rows_of(SHAPES[0], 30)
    serial, twice = DeltaLayer(shape, weights_of(shape), 1, 0), DeltaLayer(shape, weights_of(shape), 1, 0)
    expected = serial.run(0, 0, rows)
    twice.run(0, 0, rows[:10])
    for _ in range(3):
        assert np.array_equal(twice.run(0, 10, rows[10:25]), expected[10:25])
    assert np.array_equal(twice.run(0, 25, rows[25:]), expected[25:])
    assert not twice.can_start(0, 24)
    assert not twice.can_start(0, 31)

"""Routing and experts against their formulas in float64, and rows that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.products import Products
from quadjet.engine.reference_experts import add_experts, route

Array = NDArray[np.float32]
COUNT, USED, HIDDEN, FFN = 7, 3, 48, 32


def random(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


EXPERTS = (random(COUNT, FFN, HIDDEN, seed=1), random(COUNT, FFN, HIDDEN, seed=2), random(COUNT, HIDDEN, FFN, seed=3))


def routed(logits: Array) -> Array:
    weights = logits.copy()
    route(weights, USED)
    return weights


def mixed(x: Array, logits: Array, num_rows: int) -> Array:
    total = np.zeros_like(x)
    add_experts(total, x, routed(logits)[:, :num_rows], EXPERTS, Products())
    return total


def test_the_most_likely_experts_share_the_weight() -> None:
    logits = 3 * random(COUNT, 16, seed=4)
    odds = np.exp(logits.astype(np.float64))
    for column, weights in enumerate(routed(logits).T):
        chosen = np.argsort(-odds[:, column])[:USED]
        assert set(np.flatnonzero(weights)) == set(chosen)
        assert np.allclose(weights[chosen], odds[chosen, column] / odds[chosen, column].sum(), rtol=1e-5)


def test_of_equals_the_first_are_chosen() -> None:
    assert np.array_equal(np.flatnonzero(routed(np.ones((COUNT, 16), np.float32))[:, 0]), np.arange(USED))


def test_what_is_not_a_number_reaches_the_result() -> None:
    logits = random(COUNT, 16, seed=4)
    logits[2, 0] = np.nan
    with np.errstate(invalid="ignore"):
        assert np.isnan(mixed(random(HIDDEN, 16, seed=5), logits, 16)[:, 0]).all()


@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_experts_are_those_of_the_formula(num_rows: int) -> None:
    x, logits = random(HIDDEN, 48, seed=5), 2 * random(COUNT, 48, seed=6)
    made = mixed(x, logits, num_rows)
    gate, up, down = (matrix.astype(np.float64) for matrix in EXPERTS)
    for row in range(num_rows):
        weights, column = routed(logits)[:, row].astype(np.float64), x[:, row].astype(np.float64)
        inner = gate @ column / (1 + np.exp(-(gate @ column))) * (up @ column)
        assert np.allclose(made[:, row], np.einsum("e,edf,ef->d", weights, down, inner), rtol=1e-4, atol=1e-3)
    assert not made[:, num_rows:].any()


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, logits = random(HIDDEN, 64, seed=5), 2 * random(COUNT, 64, seed=6)
    together = mixed(x, logits, 64)
    for width in (1, 5, 16, 33):
        order = np.random.default_rng(width).permutation(64)[:width]
        columns = np.zeros((HIDDEN, -(-width // 16) * 16), np.float32)
        columns[:, :width] = x[:, order]
        apart = np.zeros((COUNT, columns.shape[1]), np.float32)
        apart[:, :width] = logits[:, order]
        assert np.array_equal(mixed(columns, apart, width)[:, :width], together[:, order])

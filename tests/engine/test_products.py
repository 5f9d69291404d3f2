"""Columns of a product do not see each other, on the BLAS of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.products import GROUP, PANEL, Products, find_widths

SHAPES = [
    (1, 2),
    (16, 8),
    (64, 64),
    (64, 128),
    (128, 64),
    (65, 64),
    (100, 32),
    (512, 256),
    (896, 896),
    (1152, 896),
    (PANEL + 7, 576),
]


def random(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


def product(products: Products, weights: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, columns], with the padding that a step has."""
    count = x.shape[1]
    padded = np.zeros((len(x), products.padded(count)), np.float32)
    padded[:, :count] = x
    out = np.empty((len(weights), padded.shape[1]), np.float32)
    products.multiply(weights, padded, out)
    return out[:, :count]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_column_has_the_same_bits_alone_and_anywhere(shape: tuple[int, int]) -> None:
    products = Products.for_shapes([shape])
    weights, x = random(*shape), random(shape[1], 200, seed=1)
    alone = np.concatenate([product(products, weights, x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)
    assert np.allclose(alone, weights.astype(np.float64) @ x, rtol=0, atol=1e-5 * shape[1])
    for count in (2, 7, GROUP, 33, 64, 80, 200):
        order = np.random.default_rng(count).permutation(200)[:count]
        assert np.array_equal(product(products, weights, x[:, order]), alone[:, order]), count


def test_rows_are_the_transposed_product() -> None:
    weights, x = random(2 * PANEL + 5, 48), random(48, 32, seed=1)
    products = Products.for_shapes([(2 * PANEL + 5, 48)])
    out = np.empty((3, len(weights)), np.float32)
    products.multiply_rows(weights, x, out)
    assert np.array_equal(out, product(products, weights, x)[:, :3].T)


def test_columns_that_are_not_finite_keep_to_themselves() -> None:
    weights, x = random(64, 64), random(64, 5, seed=1)
    products = Products.for_shapes([(64, 64)])
    clean = product(products, weights, x)
    x[:, 2] = np.nan
    dirty = product(products, weights, x)
    assert np.array_equal(np.delete(dirty, 2, 1), np.delete(clean, 2, 1))


def test_the_narrowest_width_is_always_there() -> None:
    widths = find_widths([(100, 32)])
    assert widths[-1] == GROUP
    assert sorted(widths, reverse=True) == list(widths)


def test_calls_cover_each_column_once() -> None:
    for widths in ((GROUP,), (64, GROUP), (64, 48, 32, GROUP)):
        for columns in range(GROUP, 260, GROUP):
            calls = list(Products(widths).calls(columns))
            assert [i for call in calls for i in range(call.start, call.stop)] == list(range(columns))
            assert {call.stop - call.start for call in calls} <= set(widths)

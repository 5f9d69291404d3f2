"""Sampling against brute force and against the distribution it promises."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quadjet.engine.backend import TokenSampling
from quadjet.engine.errors import EngineError
from quadjet.engine.sampling import mask_words, pack_mask, sample, unpack_mask, validate

VOCAB = 40


def rows_of(seed: int, rows: int, vocab: int = VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def draws(logits: list[float], params: TokenSampling, count: int = 4000) -> NDArray[np.int64]:
    """How often each token comes at `count` different positions."""
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    return np.bincount(sample(rows, np.arange(count), params), minlength=len(logits))


def brute_force_support(logits: NDArray[np.float32], params: TokenSampling) -> list[int]:
    """The tokens that the documented order leaves, by plain sorting and adding."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-logits[i], i))
    order = order[: params.top_k] if params.top_k else order
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in order:
        if params.top_p < 1.0 and reached >= params.top_p * total:
            break
        nucleus.append(i)
        reached += weights[i]
    return sorted(i for i in nucleus if weights[i] >= params.min_p)


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    logits = np.array([[0, 3, 1, 3], [-5, -6, -5, -7]], np.float32)
    assert sample(logits, np.array([0, 9]), TokenSampling()).tolist() == [1, 0]


def test_greedy_obeys_the_mask() -> None:
    logits = np.array([[9, 3, 1, 3]], np.float32)
    mask = pack_mask(np.array([False, False, True, True]))[None]
    assert sample(logits, np.array([0]), TokenSampling(), mask).tolist() == [3]


def test_result_is_int32_and_a_function_of_seed_and_position() -> None:
    logits = rows_of(1, 50)
    params = TokenSampling(temperature=1.0, seed=7)
    first = sample(logits, np.arange(50), params)
    assert first.dtype == np.int32
    assert (first == sample(logits, np.arange(50), params)).all()
    assert (first != sample(logits, np.arange(50), TokenSampling(temperature=1.0, seed=8))).any()
    assert (first != sample(logits, np.arange(50) + 50, params)).any()


PARAMS = st.builds(
    TokenSampling, st.floats(0.01, 5), st.integers(0, VOCAB + 10), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 2**64 - 1)
)


@given(PARAMS, st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(params: TokenSampling, rows: int) -> None:
    logits, positions = rows_of(params.seed % 1000, rows), np.arange(rows) * 13
    together = sample(logits, positions, params)
    alone = [int(sample(logits[i : i + 1], positions[i : i + 1], params)[0]) for i in range(rows)]
    assert together.tolist() == alone


@given(PARAMS)
@settings(max_examples=150, deadline=None)
def test_only_tokens_that_the_filters_leave_are_drawn(params: TokenSampling) -> None:
    logits = rows_of(params.seed % 1000, 1)
    allowed = brute_force_support(logits[0], params)
    drawn = {int(sample(logits, np.array([p]), params)[0]) for p in range(20)}
    assert drawn <= set(allowed)


def test_the_distribution_is_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    for temperature in (0.7, 1.0, 2.0):
        counts = draws(logits, TokenSampling(temperature=temperature, seed=3), 8000)
        expected = np.exp(np.array(logits) / temperature)
        expected *= 8000 / expected.sum()
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_seeds_are_independent_streams() -> None:
    counts = np.zeros((2, 2))
    for seed in range(2000):
        a, b = sample(np.zeros((2, 2), np.float32), np.array([0, 1]), TokenSampling(temperature=1.0, seed=seed))
        counts[a, b] += 1
    assert float(((counts - 500) ** 2 / 500).sum()) < 16.3  # 3 degrees of freedom, p = 0.001


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    counts = draws([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], TokenSampling(temperature=1.0, top_k=3, seed=1))
    assert np.flatnonzero(counts).tolist() == [0, 1, 4]
    assert draws([0.0, 5.0, 1.0], TokenSampling(temperature=100.0, top_k=1)).tolist() == [0, 4000, 0]
    assert (draws([0.0, 0.0, 0.0], TokenSampling(temperature=1.0, top_k=99)) > 1000).all()


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, top_p=0.6))).tolist() == [0, 1]
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, top_p=0.8))).tolist() == [0, 1, 2]
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, top_p=1e-12))).tolist() == [0]


def test_top_p_counts_the_share_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.2, 0.2, 0.2]).tolist()
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, top_k=2, top_p=0.65))).tolist() == [0]


def test_min_p_is_relative_to_the_largest_after_the_temperature() -> None:
    logits = np.log([0.6, 0.3, 0.1]).tolist()
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, min_p=0.4))).tolist() == [0, 1]
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=4.0, min_p=0.4))).tolist() == [0, 1, 2]
    assert np.flatnonzero(draws(logits, TokenSampling(temperature=1.0, min_p=1.0))).tolist() == [0]


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (5e-324, 1e-30):
        assert draws([0.0, 1.0, 0.999], TokenSampling(temperature=temperature), 100).tolist() == [0, 100, 0]


def test_huge_logits_and_temperatures_do_not_overflow() -> None:
    assert draws([3e38, -3e38, 3e38], TokenSampling(temperature=1.0), 200)[1] == 0
    assert (draws([3.0, -3.0, 0.0], TokenSampling(temperature=1e308), 300) > 50).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_raise(bad: float) -> None:
    logits = np.array([[0.0, 1.0], [bad, 0.0]], np.float32)
    with pytest.raises(EngineError, match="not finite at position 6"):
        sample(logits, np.array([5, 6]), TokenSampling())


def test_a_mask_that_allows_nothing_raises() -> None:
    with pytest.raises(EngineError, match="no token at position 4"):
        sample(np.zeros((1, 40), np.float32), np.array([4]), TokenSampling(temperature=1.0), np.zeros((1, 2), np.int32))


@pytest.mark.parametrize("mask_shape", [(1, 1), (2, 2), (1, 3)])
def test_shapes_that_do_not_fit_raise(mask_shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="mask of shape"):
        sample(np.zeros((1, 40), np.float32), np.array([0]), TokenSampling(), np.zeros(mask_shape, np.int32))


BAD_PARAMETERS: dict[str, list[object]] = {
    "temperature": [-1, math.nan, math.inf, 10**400, True, "1", None],
    "top_p": [0, -0.1, 1.5, math.nan, False, "x"],
    "min_p": [-0.1, 1.1, math.nan, []],
    "top_k": [-1, 2**31, 1.5, True, "3"],
    "seed": [-1, 2**64, 0.0, True, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_PARAMETERS.items() for value in values])
def test_bad_parameters_are_named(name: str, value: object) -> None:
    params = replace(TokenSampling(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=f"^{name} must be"):
        validate(params)


def test_good_parameters_pass() -> None:
    validate(TokenSampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=2**64 - 1))


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_pack_and_unpack(bits: list[bool]) -> None:
    allowed = np.array(bits)
    packed = pack_mask(allowed)
    assert packed.shape == (mask_words(len(bits)),)
    assert (unpack_mask(packed, len(bits)) == allowed).all()
    assert all(bool(int(packed[t // 32]) >> t % 32 & 1) == bit for t, bit in enumerate(bits))

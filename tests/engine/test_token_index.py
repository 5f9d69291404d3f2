"""The index finds what a plain search finds, after any edits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.token_index import MAX_MATCH, NGRAMS, TokenIndex, ngram_keys

TOKENS = st.lists(st.integers(0, 5), max_size=60)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), TOKENS), max_size=12)


def places(tokens: list[int], suffix: list[int], n: int) -> list[int]:
    """Where a token follows the last n of `suffix`."""
    return [p for p in range(n, len(tokens)) if tokens[p - n : p] == suffix[-n:]]


def edited(edits: list[tuple[int, int, list[int]]]) -> tuple[TokenIndex, list[int]]:
    index, tokens = TokenIndex(), list[int]()
    for where, size, new in edits:
        start = where % (len(tokens) + 1)
        removed = size % (len(tokens) - start + 1)
        index.splice(start, removed, new)
        tokens[start : start + removed] = new
    return index, tokens


@given(EDITS, st.lists(st.integers(0, 5), max_size=40))
@settings(deadline=None)
def test_it_holds_what_was_edited_and_finds_only_true_places(edits: list[tuple[int, int, list[int]]], suffix: list[int]) -> None:
    index, tokens = edited(edits)
    assert (index.after(0, 10**6), len(index)) == (tokens, len(tokens))
    for n, key in ngram_keys(suffix).items():
        place = index.find(n, key, suffix)
        assert place == 0 or place in places(tokens, suffix, n)


def test_it_finds_nearly_all_places_and_the_last_one_without_edits() -> None:
    tokens = np.random.default_rng(1).integers(0, 3000, 20_000).tolist()
    index = TokenIndex()
    index.splice(0, 0, tokens)
    found = dict.fromkeys(NGRAMS, 0)
    for place in range(100, 20_000, 20):
        suffix = tokens[place - 40 : place]
        for n, key in ngram_keys(suffix).items():
            if (hit := index.find(n, key, suffix)) == place:
                assert index.match_length(hit, suffix) == MAX_MATCH
                found[n] += 1
    assert min(found.values()) > 700  # of 995: some share a slot with another n-gram


def test_edits_move_what_is_behind_them() -> None:
    tokens = np.random.default_rng(2).integers(0, 3000, 2000).tolist()
    index = TokenIndex()
    index.splice(0, 0, tokens)
    index.splice(100, 3, [1, 2, 3, 4, 5, 6, 7])
    index.splice(50, 10, [])
    hits = [index.find(8, ngram_keys(tokens[:p])[8], tokens[:p]) for p in range(200, 2000)]
    assert sum(hit == p - 6 for hit, p in zip(hits, range(200, 2000), strict=True)) > 1300


def test_appending_finds_what_has_just_been_said() -> None:
    index = TokenIndex()
    for token in [1, 2, 3, 4, 1, 2]:
        index.splice(len(index), 0, [token])
    place = index.find(2, ngram_keys([1, 2])[2], [1, 2])
    assert (place, index.after(place, 8)) == (2, [3, 4, 1, 2])  # the end itself has nothing after it


def test_a_range_that_is_not_there_is_refused() -> None:
    index = TokenIndex()
    index.splice(0, 0, [1, 2, 3])
    for start, removed in ((-1, 0), (0, -1), (2, 2), (4, 0)):
        with pytest.raises(ValueError, match="of 3"):
            index.splice(start, removed, [])

"""Tokens that can be edited anywhere, and found again by the tokens before a place.

For each n of NGRAMS a table holds, by the hash of n tokens, the last place that follows them. A table is a guide, not the truth:
places in it may be stale or of another n-gram with the same hash, so every hit is compared with the tokens. That makes an edit
cheap: entries behind it are shifted, those around it written anew, nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAMS = (8, 4, 2)
"""Lengths of match that are looked up, longest first."""
MAX_MATCH = 32
"""Longer matches count as this long."""
_STEP, _SPREAD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_WORD = 2**64 - 1


def ngram_keys(tokens: Sequence[int]) -> dict[int, int]:
    """By n, the 64-bit hash of the last n of `tokens`, for `TokenIndex.find`; only lengths that `tokens` has."""
    keys: dict[int, int] = {}
    for n in NGRAMS:
        if n <= len(tokens):
            key = 0
            for token in tokens[-n:]:
                key = (key * _STEP + token + 1) & _WORD
            keys[n] = key * _SPREAD & _WORD
    return keys


class TokenIndex:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._length = 0
        self._tokens = np.zeros(64, np.int32)
        self._bits = 7
        self._tables = np.zeros((len(NGRAMS), 1 << self._bits), np.int32)
        """Places by hash, a row for each of NGRAMS; 0 is none, since no place there has n tokens before it."""

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._tables.nbytes

    def splice(self, start: int, num_removed: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Put `tokens` in the place of tokens[start : start + num_removed]. ValueError if there is no such range."""
        behind = start + num_removed
        if start < 0 or num_removed < 0 or behind > self._length:
            raise ValueError(f"tokens {start} to {behind} of {self._length}")
        added = np.asarray(tokens, np.int32)
        before, self._length = self._length, self._length + len(added) - num_removed
        delta = self._length - before
        self._reserve()
        self._tokens[start + len(added) : self._length] = self._tokens[behind:before]
        self._tokens[start : start + len(added)] = added
        if self._length > 1 << (self._bits - 1):  # at most half full
            self._bits = self._length.bit_length() + 1
            self._tables = np.zeros((len(NGRAMS), 1 << self._bits), np.int32)
            self._write(0, self._length)
            return
        if delta and behind < before:
            self._shift(behind, delta)
        self._write(start, start + len(added) + NGRAMS[0])

    def find(self, n: int, key: int, suffix: Sequence[int]) -> int:
        """The last known place that follows the last n of `suffix`; 0 if there is none. `key` is their ngram_keys()[n]."""
        place = int(self._tables[NGRAMS.index(n), key >> (64 - self._bits)])
        if not n <= place < self._length or self._tokens[place - n : place].tolist() != list(suffix[-n:]):
            return 0
        return place

    def match_length(self, place: int, suffix: Sequence[int]) -> int:
        """How many tokens before `place` are the last ones of `suffix`, MAX_MATCH at most."""
        before = self._tokens[max(place - MAX_MATCH, 0) : place].tolist()
        pairs = zip(reversed(before), reversed(suffix), strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(suffix)))

    def after(self, place: int, count: int) -> list[int]:
        """At most `count` tokens from `place` on."""
        tokens: list[int] = self._tokens[place : min(place + count, self._length)].tolist()
        return tokens

    def _reserve(self) -> None:
        if self._length > len(self._tokens):
            grown = np.zeros(self._length + self._length // 4, np.int32)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown

    def _shift(self, behind: int, delta: int) -> None:
        """Add `delta` to all places after `behind`. By bits, since a masked addition takes ten times as long."""
        mask = np.int32(behind) - self._tables
        mask >>= 31  # all ones where the place comes after
        mask &= np.int32(delta)
        self._tables += mask

    def _write(self, first: int, end: int) -> None:
        """Enter places first .. end - 1 that have a token, the later ones over the earlier."""
        end = min(end, self._length)
        for n, table in zip(NGRAMS, self._tables, strict=True):
            low = max(first, n)
            if low >= end:
                continue
            tokens = self._tokens[low - n : end - 1].astype(np.uint64) + np.uint64(1)
            keys = np.zeros(end - low, np.uint64)
            for offset in range(n):
                keys *= np.uint64(_STEP)
                keys += tokens[offset : offset + len(keys)]
            keys *= np.uint64(_SPREAD)
            table[(keys >> np.uint64(64 - self._bits)).astype(np.intp)] = np.arange(low, end, dtype=np.int32)

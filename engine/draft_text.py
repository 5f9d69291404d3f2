"""Texts that drafts are copied from, kept as tokens on the side of the client: an edit costs the lines that it touches.

A text is cut into pieces at the starts of lines that are not blank, and each piece becomes tokens by itself. That is how most
vocabularies cut code anyway: a line's end joins the blank lines after it, its indentation does not.
Every text is two sources: as it is, and as it looks inside a string of JSON, which is how a model quotes it in a tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from .channel import RemoveSource, UpdateSource

Encode = Callable[[str], list[int]]

MAX_TEXT_CHARS = 2_000_000
"""Longer texts are no sources: data, not what a model writes."""
_PIECE_START = re.compile(r"\n(?=[^\S\n]*\S)")
_COMPARED_CHARS = (4096, 64, 1)
"""At once, in turn: two texts are mostly equal."""


class DraftText:
    """One text. The arrays have an entry for each piece and a last one for the end."""

    def __init__(self) -> None:
        self._text = ""
        self._chars: NDArray[np.int64] = np.zeros(1, np.int64)
        """Where each piece starts in the text."""
        self._tokens: dict[str, NDArray[np.int64]] = {form: np.zeros(1, np.int64) for form in _FORMS}
        """And in the tokens of each form."""

    def change(self, name: str, kind: str, text: str, encode: Encode) -> list[UpdateSource]:
        """Take `text` as the new text. What changes of the tokens of each form; nothing if the text is the same."""
        same = _num_equal(self._text, text)
        if same == len(self._text) == len(text):
            return []
        end = len(self._text) - _num_equal_at_end(self._text, text, same)
        # Whether a piece starts at a line depends on the line up to its first letter, so the piece before may change as well.
        first = max(int(np.searchsorted(self._chars[:-1], same, "right")) - 2, 0)
        stop = int(np.searchsorted(self._chars[:-1], end, "right"))
        begin, delta = int(self._chars[first]), len(text) - len(self._text)
        pieces = _split(text[begin : int(self._chars[stop]) + delta])
        encoded = {form: [encode(write(piece)) for piece in pieces] for form, write in _FORMS.items()}
        changes = []
        for form, tokens in encoded.items():
            old = self._tokens[form]
            change = UpdateSource(
                name=f"{form}:{name}",
                kind=kind if form == "text" else f"{kind}_{form}",
                num_before=int(old[-1]),
                start=int(old[first]),
                num_removed=int(old[stop] - old[first]),
                tokens=np.array([token for piece in tokens for token in piece], np.int32),
            )
            changes.append(change)
            self._tokens[form] = _spliced(old, first, stop, [len(piece) for piece in tokens])
        self._text = text
        self._chars = _spliced(self._chars, first, stop, [len(piece) for piece in pieces])
        return [change for change in changes if change.num_before or len(change.tokens)]


class DraftTexts:
    """The texts that an engine holds. `change` may run in a thread of its own, one at a time."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._texts: dict[str, DraftText] = {}
        self._lock = Lock()

    def change(self, name: str, kind: str, text: str) -> list[UpdateSource]:
        """What the engine must be told for the sources of `name` to hold `text`."""
        with self._lock:
            known = self._texts.setdefault(name, DraftText())
            return known.change(name, kind, text if len(text) <= MAX_TEXT_CHARS else "", self._encode)

    def remove(self, name: str) -> list[RemoveSource]:
        """What the engine must be told to forget a text."""
        self._texts.pop(name, None)
        return [RemoveSource(f"{form}:{name}") for form in _FORMS]

    def source_gone(self, source: str) -> None:
        """The engine has no such source any more: the next change of its text sends it whole."""
        self._texts.pop(source.partition(":")[2], None)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_FORMS: dict[str, Callable[[str], str]] = {"text": str, "json": _in_json}


def _num_equal(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    limit, start = min(len(a), len(b)), 0
    for size in _COMPARED_CHARS:
        while start + size <= limit and a[start : start + size] == b[start : start + size]:
            start += size
    return start


def _num_equal_at_end(a: str, b: str, same: int) -> int:
    """Length of the longest common end that does not reach into the first `same` characters."""
    limit, count = min(len(a), len(b)) - same, 0
    for size in _COMPARED_CHARS:
        while count + size <= limit and a.endswith(b[len(b) - count - size : len(b) - count], 0, len(a) - count):
            count += size
    return count


def _split(text: str) -> list[str]:
    bounds = [0, *(match.end() for match in _PIECE_START.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds) if a < b]


def _spliced(bounds: NDArray[np.int64], first: int, stop: int, lengths: list[int]) -> NDArray[np.int64]:
    """The starts of pieces when pieces first .. stop - 1 give way to pieces of `lengths`."""
    starts = bounds[first] + np.cumsum([0, *lengths], dtype=np.int64)
    moved = bounds[stop:] + (starts[-1] - bounds[stop])
    return np.concatenate([bounds[:first], starts[:-1], moved])

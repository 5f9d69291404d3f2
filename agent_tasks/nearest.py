"""Explains why a search text was not found: the region most like it and the characters in which they differ."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rapidfuzz import fuzz, process

_MAX_SHOWN_LINES = 5
_CLIP = 60


def explain_mismatch(text: str, search: str) -> str:
    """Several lines for the model or a person. Both texts use "\\n"."""
    lines, wanted = text.split("\n"), search.strip("\n").split("\n")
    start, score = _nearest_window(lines, wanted)
    if score < 50:
        return "Nothing in the file resembles it."
    found = lines[start : start + len(wanted)]
    differing = [index for index, (has, want) in enumerate(zip(found, wanted, strict=False)) if has != want]
    parts = [f"Nearest: lines {start + 1}-{start + len(found)} ({score:.0f} % alike)."]
    parts += [_explain_line(start + 1 + index, found[index], wanted[index]) for index in differing[:_MAX_SHOWN_LINES]]
    if len(differing) > _MAX_SHOWN_LINES:
        parts.append(f"and {len(differing) - _MAX_SHOWN_LINES} more differing lines")
    if len(found) < len(wanted):
        parts.append(f"the file ends after line {start + len(found)}, the search text has {len(wanted) - len(found)} more lines")
    if not differing and len(found) == len(wanted):
        parts.append("They differ only in empty lines at the start or the end of the search text.")
    return "\n".join(parts)


def _nearest_window(lines: Sequence[str], wanted: Sequence[str]) -> tuple[int, float]:
    """First line (from 0) and likeness in percent. Only windows around lines like the longest wanted one are compared."""
    anchor = max(range(len(wanted)), key=lambda index: len(wanted[index].strip()))
    stripped = [line.strip() for line in lines]
    candidates = process.extract(wanted[anchor].strip(), stripped, scorer=fuzz.ratio, limit=20)
    starts = {min(max(index - anchor, 0), max(len(lines) - 1, 0)) for _, _, index in candidates} or {0}
    target = "\n".join(wanted)
    scores = {start: fuzz.ratio("\n".join(lines[start : start + len(wanted)]), target) for start in sorted(starts)}
    best = max(scores, key=lambda start: scores[start])
    return best, scores[best]


def _explain_line(number: int, has: str, want: str) -> str:
    column = next((i for i, (a, b) in enumerate(zip(has, want, strict=False)) if a != b), min(len(has), len(want)))
    clip = slice(max(column - _CLIP, 0), column + _CLIP)
    return (
        f"line {number}, column {column + 1}: the file has {_char(has, column)}, the search text {_char(want, column)}\n"
        f"  file:   {has[clip]!r}\n  search: {want[clip]!r}"
    )


def _char(text: str, column: int) -> str:
    if column >= len(text):
        return "the end of the line"
    char = text[column]
    return f"{char!r} (U+{ord(char):04X} {unicodedata.name(char, 'control')})"

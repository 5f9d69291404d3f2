"""From the whole new text of a document to the smallest edits a client can apply in one undo step."""

from __future__ import annotations

import difflib
import re

from lsprotocol import types

from .documents import Document, TextBuffer, to_position

_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_MAX_DIFF_CELLS = 4_000_000
"""Lines old times lines new up to which a line diff is sought; beyond, its worst case would take seconds."""


def minimal_edits(old: str, new: str, encoding: str) -> list[types.TextEdit]:
    """Edits of whole changed lines, in order and apart from each other, that turn `old` into `new`."""
    before, after = _LINES.findall(old), _LINES.findall(new)
    buffer = TextBuffer(old)
    offsets = _offsets(before)
    edits = []
    for first, last, lines in _changed(before, after):
        start = to_position(buffer, offsets[first], encoding)
        end = to_position(buffer, offsets[last], encoding)
        edits.append(types.TextEdit(types.Range(start, end), "".join(lines)))
    return edits


def workspace_edit(document: Document, new_text: str, encoding: str, *, versioned: bool) -> types.WorkspaceEdit:
    """`versioned`: as documentChanges, which the client refuses when the document moved on; else as plain changes."""
    edits = minimal_edits(document.text, new_text, encoding)
    if not versioned:
        return types.WorkspaceEdit(changes={document.uri: edits})
    identifier = types.OptionalVersionedTextDocumentIdentifier(document.uri, document.version)
    return types.WorkspaceEdit(document_changes=[types.TextDocumentEdit(identifier, list(edits))])


def _changed(before: list[str], after: list[str]) -> list[tuple[int, int, list[str]]]:
    """(first, last, lines): before[first:last] becomes lines."""
    head = 0
    while head < min(len(before), len(after)) and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    if not old and not new:
        return []
    if len(old) * len(new) > _MAX_DIFF_CELLS:
        return [(head, head + len(old), new)]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(head + i1, head + i2, new[j1:j2]) for tag, i1, i2, j1, j2 in codes if tag != "equal"]


def _offsets(lines: list[str]) -> list[int]:
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    return offsets

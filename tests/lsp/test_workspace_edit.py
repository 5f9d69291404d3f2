"""Edits must give back exactly the new text when a client applies them as the specification says."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types
from quadjet.lsp.documents import Document, TextBuffer, to_offset
from quadjet.lsp.workspace_edit import minimal_edits, workspace_edit

LINES = st.lists(st.sampled_from(["a\n", "b\r\n", "c\r", "é\U0001f600\n", "\n", "d", "e\u2028e\n"]), max_size=8).map("".join)


def apply(text: str, edits: list[types.TextEdit], encoding: str) -> str:
    """As a client does: all ranges refer to the text before, so from the last to the first."""
    buffer = TextBuffer(text)
    spans = [(to_offset(buffer, e.range.start, encoding), to_offset(buffer, e.range.end, encoding), e.new_text) for e in edits]
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for start, end, new in reversed(spans):
        text = text[:start] + new + text[end:]
    return text


@given(LINES, LINES, st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_edits_give_the_new_text(old: str, new: str, encoding: str) -> None:
    assert apply(old, minimal_edits(old, new, encoding), encoding) == new


def test_only_changed_lines_are_touched() -> None:
    old = "".join(f"line {n}\n" for n in range(100))
    new = old.replace("line 7\n", "seven\n").replace("line 50\n", "").replace("line 99\n", "line 99\nmore\n")
    edits = minimal_edits(old, new, "utf-16")
    assert [(e.range.start.line, e.range.end.line, e.new_text) for e in edits] == [
        (7, 8, "seven\n"),
        (50, 51, ""),
        (100, 100, "more\n"),
    ]


def test_equal_text_needs_no_edit() -> None:
    assert minimal_edits("a\nb", "a\nb", "utf-16") == []


def test_a_rewritten_large_file_is_one_edit_and_quick() -> None:
    old = "".join(f"a{n % 7}\n" for n in range(20_000))
    new = "".join(f"b{n % 5}\n" for n in range(20_000))
    started = time.perf_counter()
    edits = minimal_edits(old, new, "utf-16")
    assert time.perf_counter() - started < 2
    assert len(edits) == 1
    assert apply(old, edits, "utf-16") == new


def test_versioned_edits_name_the_version_and_plain_ones_the_uri_only() -> None:
    document = Document("file:///tmp/%61.py", Path("/tmp/a.py"), TextBuffer("a\n"), 5)
    versioned = workspace_edit(document, "b\n", "utf-16", versioned=True)
    assert versioned.changes is None
    assert versioned.document_changes is not None
    (change,) = versioned.document_changes
    assert isinstance(change, types.TextDocumentEdit)
    assert (change.text_document.uri, change.text_document.version) == ("file:///tmp/%61.py", 5)
    plain = workspace_edit(document, "b\n", "utf-16", versioned=False)
    assert plain.document_changes is None
    assert plain.changes == {"file:///tmp/%61.py": list(change.edits)}

"""Positions and changes against an independent reading of the specification: text as arrays of code units."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.task import LineRange
from quadjet.lsp.documents import (
    Documents,
    NotAFileError,
    TextBuffer,
    apply_changes,
    choose_root,
    to_lines,
    to_offset,
    to_position,
    uri_to_path,
)

# Line ends of LSP, characters of one to four bytes, and what str.splitlines takes for line ends but LSP does not.
TEXTS = st.text(st.sampled_from("ab \té€\U0001f600\u0301\n\r\u2028\x0b\x0c\x85"), max_size=30)
ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-32"])
UNIT = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


def at(line: int, character: int) -> types.Position:
    return types.Position(line, character)


def splice(text: str, start: types.Position, end: types.Position, new: str, encoding: str) -> str:
    """The specification by hand: split into lines, encode each, cut at code units."""
    codec, width = UNIT[encoding]
    parts = re.split(r"(\r\n|\n|\r)", text)
    lines = [(parts[i], parts[i + 1] if i + 1 < len(parts) else "") for i in range(0, len(parts), 2)]

    def before(position: types.Position) -> str:
        head = "".join(body + ending for body, ending in lines[: position.line])
        units = lines[position.line][0].encode(codec)[: position.character * width]
        return head + units.decode(codec)

    return before(start) + new + text[len(before(end)) :]


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str, str, int, int]:
    text, new, encoding = draw(TEXTS), draw(TEXTS), draw(ENCODINGS)
    # An offset between \r and \n is inside a line ending, which no position names.
    offsets = [i for i in range(len(text) + 1) if text[i - 1 : i + 1] != "\r\n"]
    start, end = sorted((draw(st.sampled_from(offsets)), draw(st.sampled_from(offsets))))
    return text, new, encoding, start, end


@given(edits())
def test_incremental_changes_agree_with_the_specification(case: tuple[str, str, str, int, int]) -> None:
    text, new, encoding, start, end = case
    buffer = TextBuffer(text)
    first, last = to_position(buffer, start, encoding), to_position(buffer, end, encoding)
    change = types.TextDocumentContentChangePartial(types.Range(first, last), new)
    changed = apply_changes(buffer, [change], encoding)
    assert changed.text == splice(text, first, last, new, encoding) == text[:start] + new + text[end:]
    assert changed.starts == TextBuffer(changed.text).starts


@given(st.text(st.sampled_from("a\r\n"), max_size=12), st.text(st.sampled_from("a\r\n"), max_size=4), st.data())
def test_lines_are_as_if_split_anew_wherever_the_edit_is(text: str, new: str, data: st.DataObject) -> None:
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    changed = TextBuffer(text).replaced(start, end, new)
    assert (changed.text, changed.starts) == (text[:start] + new + text[end:], TextBuffer(changed.text).starts)


@given(edits())
def test_positions_survive_the_round_trip(case: tuple[str, str, str, int, int]) -> None:
    text, _, encoding, start, _ = case
    buffer = TextBuffer(text)
    assert to_offset(buffer, to_position(buffer, start, encoding), encoding) == start


@given(TEXTS, ENCODINGS, st.integers(0, 40), st.integers(0, 80))
def test_any_position_is_within_its_line(text: str, encoding: str, line: int, character: int) -> None:
    buffer = TextBuffer(text)
    offset = to_offset(buffer, at(line, character), encoding)
    if line < len(buffer.starts):
        assert buffer.starts[line] <= offset <= buffer.line_end(line)
    else:
        assert offset == len(text)


@pytest.mark.parametrize(
    ("position", "encoding", "offset"),
    [
        (at(0, 6), "utf-8", 3),
        (at(0, 4), "utf-16", 3),
        (at(0, 3), "utf-32", 3),
        (at(0, 3), "utf-16", 2),  # between the surrogates: the character's start
        (at(0, 99), "utf-16", 4),  # beyond the line
        (at(1, 0), "utf-16", 6),
        (at(9, 9), "utf-16", 8),  # beyond the text
    ],
)
def test_offset_of_a_position(position: types.Position, encoding: str, offset: int) -> None:
    text = "xy\U0001f600z\r\nlm"
    assert to_offset(TextBuffer(text), position, encoding) == offset


def test_changes_apply_one_after_another_and_whole_text_replaces() -> None:
    changes: list[types.TextDocumentContentChangeEvent] = [
        types.TextDocumentContentChangeWholeDocument("one\ntwo"),
        types.TextDocumentContentChangePartial(types.Range(at(1, 0), at(1, 0)), "x\n"),
        types.TextDocumentContentChangePartial(types.Range(at(2, 0), at(2, 3)), "three"),
    ]
    assert apply_changes(TextBuffer("old"), changes, "utf-16").text == "one\nx\nthree"


def test_a_lone_surrogate_counts_as_one_unit() -> None:
    buffer = TextBuffer("\ud800a")
    assert to_position(buffer, 1, "utf-16") == at(0, 1)
    assert to_position(buffer, 1, "utf-8") == at(0, 3)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///etc/hostname", "/etc/hostname"),
        ("file://localhost/etc/a%20b%23c", "/etc/a b#c"),
        ("file:///tmp/%C3%A9%2B+x", "/tmp/é++x"),
        ("file:///a/../b/./c", "/b/c"),
    ],
)
def test_file_uris(uri: str, path: str) -> None:
    assert uri_to_path(uri) == Path(path).resolve()


@pytest.mark.parametrize(
    "uri",
    [
        "untitled:Untitled-1",
        "vscode-notebook-cell:/a.py#x",
        "file://server/share",
        "http://x/y",
        "file:relative",
        "",
        "file:///a%00b",
        "file:///\ud800",
        "file://[x",
    ],
)
def test_what_is_no_file_is_refused(uri: str) -> None:
    with pytest.raises(NotAFileError):
        uri_to_path(uri)


def test_an_untitled_document_names_the_remedy() -> None:
    with pytest.raises(TaskError, match="save it"):
        uri_to_path("untitled:Untitled-1")


def test_a_path_that_is_no_utf8_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.py"
    assert uri_to_path(path.as_uri()) == path


def test_links_lead_to_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("")
    (tmp_path / "link.py").symlink_to("real.py")
    assert uri_to_path((tmp_path / "link.py").as_uri()) == tmp_path / "real.py"


@pytest.mark.parametrize(
    ("start", "end", "lines"),
    [
        (at(2, 0), at(2, 0), None),
        (at(2, 1), at(2, 4), LineRange(3, 3)),
        (at(2, 1), at(4, 0), LineRange(3, 4)),
        (at(2, 1), at(4, 1), LineRange(3, 5)),
    ],
)
def test_selected_lines(start: types.Position, end: types.Position, lines: LineRange | None) -> None:
    assert to_lines(types.Range(start, end)) == lines


def test_root_is_the_innermost_workspace_folder_of_the_file(tmp_path: Path) -> None:
    inner = tmp_path / "one" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / ".git").mkdir()
    folders = [tmp_path / "one", tmp_path / "two", inner]
    assert choose_root(inner / "a.py", folders) == inner
    assert choose_root(tmp_path / "one" / "a.py", folders) == tmp_path / "one"
    assert choose_root(tmp_path / "two", folders) == tmp_path / "two"


def test_root_outside_the_workspace_is_the_work_tree_or_the_folder(tmp_path: Path) -> None:
    repository, plain = tmp_path / "repo" / "src", tmp_path / "plain"
    repository.mkdir(parents=True)
    plain.mkdir()
    (tmp_path / "repo" / ".git").write_text("gitdir: elsewhere")
    assert choose_root(repository / "a.py", []) == tmp_path / "repo"
    assert choose_root(plain / "a.py", [repository]) == plain


def test_documents_by_uri_and_path() -> None:
    documents = Documents()
    item = types.TextDocumentItem("file:///tmp/%61.py", "python", 1, "x")
    assert documents.open(item)
    found = documents.at(Path("/tmp/a.py"))
    assert found is not None
    assert (found.uri, found.version) == ("file:///tmp/%61.py", 1)
    params = types.DidChangeTextDocumentParams(
        types.VersionedTextDocumentIdentifier(7, "file:///tmp/%61.py"), [types.TextDocumentContentChangeWholeDocument("y")]
    )
    changed = documents.change(params, "utf-16")
    assert changed is not None
    assert (changed.text, changed.version) == ("y", 7)
    assert documents.close("file:///tmp/%61.py") == changed
    assert documents.at(Path("/tmp/a.py")) is None


def test_documents_that_are_no_files_are_kept_out() -> None:
    documents = Documents()
    assert documents.open(types.TextDocumentItem("untitled:1", "python", 1, "x")) is None
    params = types.DidChangeTextDocumentParams(
        types.VersionedTextDocumentIdentifier(2, "untitled:1"), [types.TextDocumentContentChangeWholeDocument("y")]
    )
    assert documents.change(params, "utf-16") is None
    assert documents.close("untitled:1") is None

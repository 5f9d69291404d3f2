"""Edits and hunks are byte-exact, or do not happen."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.agent_tasks.edits import Edit, EditError, apply_edit, apply_edits, apply_hunks, diff_text, make_hunks, rewrite
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.task import ChangeKind
from quadjet.agent_tasks.text import decode, normalise_newlines

ROOT = Path("/project")
PATH = ROOT / "pkg" / "a.py"

STYLES = {
    "lf": ("utf-8", b"", "\n"),
    "crlf": ("utf-8", b"", "\r\n"),
    "cr": ("utf-8", b"", "\r"),
    "utf-8 mark": ("utf-8", b"\xef\xbb\xbf", "\r\n"),
    "utf-16-le": ("utf-16-le", b"\xff\xfe", "\r\n"),
    "utf-16-be": ("utf-16-be", b"\xfe\xff", "\n"),
    "utf-32-be": ("utf-32-be", b"\x00\x00\xfe\xff", "\n"),
    "cp1252": ("cp1252", b"", "\r\n"),
    "latin-1": ("latin-1", b"", "\n"),
}
MARKER = {"cp1252": "# caf\u00e9 \u20ac \u201cquoted\u201d\n", "latin-1": "# caf\u00e9 \x81\n"}
BODIES = {
    "plain": "a = 1\nb = 2\nold\nc = 3\n",
    "no newline at the end": "a\nold",
    "only line": "old",
    "first line": "old\nb\n",
    "tabs and trailing spaces": "\tif x: \n\t\told\n  \t\n\n",
    "long line": "x" * 100_000 + "\nold\n" + "y" * 100_000,
    "blank lines": "\n\n\nold\n\n\n",
}
EDITS = {
    "replace": ("old", "new"),
    "grow": ("old", "new 1\nnew 2\nnew 3"),
    "delete": ("old", ""),
    "append inside": ("old", "old\n\tmore"),
}
CORPUS = [
    pytest.param(style, body, edit, id=f"{style}-{name}-{kind}")
    for style, (name, body), (kind, edit) in itertools.product(STYLES, BODIES.items(), EDITS.items())
]


@pytest.mark.parametrize(("style", "body", "edit"), CORPUS)
def test_nothing_outside_the_edit_changes(style: str, body: str, edit: tuple[str, str]) -> None:
    encoding, bom, newline = STYLES[style]
    body = MARKER.get(encoding, "# na\u00efve \u201cquotes\u201d \U0001f600\n") + body
    before, after = body.split("old")

    def encode(text: str) -> bytes:
        return text.replace("\n", newline).encode(encoding)

    edited = apply_edit(bom + encode(body), *edit)
    assert edited == bom + encode(before) + encode(edit[1]) + encode(after)


LINE = st.tuples(st.sampled_from(["a", "b", "c", "", " ", "\u00e9\u201c", "\x0c\u2028"]), st.sampled_from(["\n", "\r\n", "\r"]))


@st.composite
def mixed_text(draw: st.DrawFn) -> str:
    lines = draw(st.lists(LINE, max_size=10))
    return "".join(body + ending for body, ending in lines) + draw(st.sampled_from(["", "end"]))


@settings(deadline=None)
@given(mixed_text(), st.text("xy\n\r", max_size=6), mixed_text())
def test_an_edit_keeps_every_byte_around_it(before: str, replace: str, after: str) -> None:
    if before.endswith("\r") and after.startswith("\n"):
        return
    data = f"{before}<MARK>{after}".encode()
    if replace == "<MARK>":
        return
    edited = apply_edit(data, "<MARK>", replace)
    assert edited.startswith(before.encode())
    assert edited.endswith(after.encode())
    inside = edited[len(before.encode()) : len(edited) - len(after.encode())].decode()
    assert normalise_newlines(inside) == normalise_newlines(replace)
    whole = normalise_newlines(before) + normalise_newlines(replace) + normalise_newlines(after)
    assert decode(edited).normalised == whole


def test_lines_of_a_mixed_file_keep_their_own_endings() -> None:
    assert apply_edit(b"a\r\nb\nc\r\nd\n", "b\nc\n", "b\nX\nc\n") == b"a\r\nb\nX\nc\r\nd\n"


def test_a_search_text_with_carriage_returns_matches() -> None:
    assert apply_edit(b"a\nb\n", "a\r\nb", "c\r\nd") == b"c\nd\n"


def test_an_empty_file_takes_text() -> None:
    assert apply_edit(b"", "", "x = 1\n") == b"x = 1\n"


@pytest.mark.parametrize(
    ("data", "search", "replace", "message"),
    [
        (b"a\n", "", "x", "search text is empty"),
        (b"a\nb\na\n", "a\n", "x", "found at lines 1, 3"),
        (b"aaa\n", "aa", "x", "found at lines 1, 1"),
        (b"a\n" * 50, "a", "x", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and more"),
        (b"a\n", "a", "a", "nothing would change"),
        (b"def f():\n    return 1\n", "import zzz, qqq", "x", "Nothing in the file resembles it"),
    ],
)
def test_a_refused_edit_says_why(data: bytes, search: str, replace: str, message: str) -> None:
    with pytest.raises(EditError, match=message):
        apply_edit(data, search, replace)


def test_the_nearest_region_is_named_with_the_differing_characters() -> None:
    data = "import os\n\n\ndef greet(name):\n    print(\u201chello\u201d, name)\n    return name\n".encode()
    with pytest.raises(EditError) as caught:
        apply_edit(data, 'def greet(name):\n    print("hello", name)\n', "x")
    assert "Nearest: lines 4-5" in caught.value.message
    assert "line 5, column 11" in caught.value.message
    assert "U+201C LEFT DOUBLE QUOTATION MARK" in caught.value.message
    assert "U+0022 QUOTATION MARK" in caught.value.message


def test_indentation_by_tabs_is_told_apart() -> None:
    with pytest.raises(EditError, match=r"U\+0009") as caught:
        apply_edit(b"class A:\n\tdef run(self):\n\t\tpass\n", "    def run(self):\n        pass", "x")
    assert "U+0020 SPACE" in caught.value.message


@pytest.mark.timeout(20)
def test_the_nearest_region_of_a_large_file_is_found_quickly() -> None:
    data = "".join(f"value_{n} = compute({n})\n" for n in range(60_000)).encode()
    with pytest.raises(EditError, match="Nearest: lines 41235-41236"):
        apply_edit(data, "value_41234 = compute(41234) \nvalue_41235 = compute(41235)\n", "x")


def test_several_edits_apply_together_or_not_at_all() -> None:
    assert apply_edits(b"a\r\nb\r\n", [Edit("a", "x\ny"), Edit("y\nb", "z")]) == b"x\r\nz\r\n"
    with pytest.raises(EditError, match=r"edit 2 of 2: .*\nNone of them was applied"):
        apply_edits(b"a\nb\n", [Edit("a", "x"), Edit("a", "y")])


def test_a_character_outside_the_encoding_is_refused() -> None:
    with pytest.raises(TaskError, match="LATIN SMALL LETTER S WITH CARON"):
        apply_edit(b"caf\xe9 \x81\n", "caf", "\u0161")


def test_a_whole_file_keeps_its_style() -> None:
    assert rewrite(b"\xef\xbb\xbfa\r\nb\r\n", "a\nc\nd\n") == b"\xef\xbb\xbfa\r\nc\r\nd\r\n"
    assert rewrite(None, "caf\u00e9\n") == "caf\u00e9\n".encode()


def test_a_whole_file_that_drops_most_lines_is_refused() -> None:
    data = b"".join(b"line %d\n" % n for n in range(100))
    with pytest.raises(EditError, match="the new text has 16 lines, the file has 100"):
        rewrite(data, "x\n" * 16)
    assert rewrite(data, "x\n" * 60) == b"x\n" * 60


@pytest.mark.parametrize("data", [b"\0\1\2", b"x" * 50_000_000])
def test_binary_and_huge_files_are_refused(data: bytes) -> None:
    with pytest.raises(TaskError, match=r"binary|50,000,000 bytes"):
        apply_edit(data, "x", "y")


FILES = st.one_of(
    mixed_text().map(str.encode), st.tuples(st.sampled_from([b"\xef\xbb\xbf"]), mixed_text().map(str.encode)).map(b"".join)
)


@settings(deadline=None)
@given(FILES, FILES, st.data())
def test_any_subset_of_hunks_applies_exactly(base: bytes, proposed: bytes, data: st.DataObject) -> None:
    change = make_hunks(PATH, base, proposed, 7)
    ids = [hunk.id for hunk in change.hunks]
    assert len(set(ids)) == len(ids)
    assert apply_hunks(change, ids) == proposed
    assert apply_hunks(change, []) == base
    chosen = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    partial = apply_hunks(change, chosen)
    assert partial is not None
    rest = make_hunks(PATH, partial, proposed)
    assert apply_hunks(rest, [hunk.id for hunk in rest.hunks]) == proposed
    if chosen and len(chosen) < len(ids):
        expected, position = [], 0
        old_lines = _lines(base)
        for hunk in change.hunks:
            expected += old_lines[position : hunk.old_start - 1]
            expected += [hunk.text] if hunk.id in chosen else old_lines[hunk.old_start - 1 : hunk.old_start - 1 + hunk.old_lines]
            position = hunk.old_start - 1 + hunk.old_lines
        assert decode(partial).text == "".join(expected + old_lines[position:])


def _lines(data: bytes) -> list[str]:
    lines, text = [], decode(data).text
    while text:
        ends = [text.find(ending) + len(ending) for ending in ("\r\n", "\n", "\r") if ending in text]
        end = len(text) if not ends else min(ends)
        if text[end - 1] == "\r" and text[end : end + 1] == "\n":
            end += 1
        lines.append(text[:end])
        text = text[end:]
    return lines


def test_hunks_say_which_lines_become_which() -> None:
    change = make_hunks(PATH, b"a\r\nb\r\nc\r\nd\r\n", b"a\r\nB\r\nc\r\nd\r\ne\r\n", 3)
    assert [(h.old_start, h.old_lines, h.new_start, h.new_lines, h.text, h.base_version) for h in change.hunks] == [
        (2, 1, 2, 1, "B\r\n", 3),
        (5, 0, 5, 1, "e\r\n", 3),
    ]
    assert change.kind is ChangeKind.MODIFY


def test_hunk_ids_are_stable_and_differ_between_files() -> None:
    first, again, other = (make_hunks(path, b"a\n", b"b\n").hunks[0].id for path in (PATH, PATH, ROOT / "b.py"))
    assert first == again != other


def test_a_created_file_is_one_hunk_that_can_be_refused() -> None:
    change = make_hunks(PATH, None, b"")
    [hunk] = change.hunks
    assert (change.kind, apply_hunks(change, [hunk.id]), apply_hunks(change, [])) == (ChangeKind.CREATE, b"", None)


def test_a_deleted_file_is_one_hunk_that_can_be_refused() -> None:
    change = make_hunks(PATH, b"a\n", None)
    [hunk] = change.hunks
    assert (change.kind, apply_hunks(change, [hunk.id]), apply_hunks(change, [])) == (ChangeKind.DELETE, None, b"a\n")


def test_a_changed_encoding_is_one_hunk() -> None:
    base, proposed = "\ufeffa\r\nb\r\n".encode("utf-16-le"), b"a\nb\n"
    change = make_hunks(PATH, base, proposed)
    [hunk] = change.hunks
    assert (apply_hunks(change, [hunk.id]), apply_hunks(change, [])) == (proposed, base)


def test_a_utf_16_hunk_applies_in_its_encoding() -> None:
    base, proposed = ("\ufeff" + text for text in ("a\r\nb\r\nc\r\n", "A\r\nb\r\nC\r\n"))
    change = make_hunks(PATH, base.encode("utf-16-le"), proposed.encode("utf-16-le"))
    assert apply_hunks(change, [change.hunks[1].id]) == "\ufeffa\r\nb\r\nC\r\n".encode("utf-16-le")


def test_an_unknown_hunk_is_refused() -> None:
    with pytest.raises(EditError, match="has no hunk nope"):
        apply_hunks(make_hunks(PATH, b"a\n", b"b\n"), ["nope"])


def test_a_file_that_runs_code_is_flagged() -> None:
    assert make_hunks(ROOT / "conftest.py", b"a\n", b"b\n").flagged
    assert not make_hunks(PATH, b"a\n", b"b\n").flagged


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("abcdef"), max_size=25).map(lambda lines: "".join(line + "\n" for line in lines)),
    st.lists(st.sampled_from("abcdef"), max_size=25).map(lambda lines: "".join(line + "\n" for line in lines)),
    st.sampled_from(["", "end"]),
)
def test_the_diff_has_the_headers_of_what_it_shows(base: str, proposed: str, end: str) -> None:
    text = diff_text(make_hunks(PATH, (base + end).encode(), proposed.encode()), ROOT)
    assert text.startswith("--- a/pkg/a.py\n+++ b/pkg/a.py\n")
    assert _patched(base + end, text) == proposed


def _patched(base: str, diff: str) -> str:
    """An independent reading of a unified diff."""
    old, out, position, marked = base.splitlines(keepends=True), list[str](), 0, False
    for line in diff.splitlines(keepends=True)[2:]:
        if line.startswith("@@"):
            start, count = (int(n) for n in line.split()[1][1:].split(","))
            start -= 1 if count else 0
            out += old[position:start]
            position = start
        elif line.startswith("\\"):
            if out and out[-1].endswith("\n") and marked:
                out[-1] = out[-1][:-1]
        else:
            marked = line[0] in " +"
            if marked:
                out.append(line[1:])
            if line[0] in " -":
                assert old[position].rstrip("\n") == line[1:].rstrip("\n")
                position += 1
    return "".join(out + old[position:])


def test_the_diff_of_a_new_and_a_deleted_file() -> None:
    assert diff_text(make_hunks(PATH, None, b"x\n"), ROOT) == "--- /dev/null\n+++ b/pkg/a.py\n@@ -0,0 +1,1 @@\n+x\n"
    assert diff_text(make_hunks(PATH, b"x", None), ROOT) == (
        "--- a/pkg/a.py\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n\\ No newline at end of file\n"
    )

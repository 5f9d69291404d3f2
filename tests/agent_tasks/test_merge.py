"""What was typed meanwhile survives: merged, or marked as a conflict."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quadjet.agent_tasks.merge import three_way
from quadjet.agent_tasks.text import TextError

BASE = "one\ntwo\nthree\nfour\nfive\nsix\n"
OURS = BASE.replace("one", "ONE \u00e9")
THEIRS = BASE.replace("six", "SIX")
BOTH = OURS.replace("six", "SIX")


def _encode(text: str, newline: str, encoding: str, bom: bytes) -> bytes:
    return bom + text.replace("\n", newline).encode(encoding)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("encoding", "bom"), [("utf-8", b""), ("utf-8", b"\xef\xbb\xbf"), ("utf-16-le", b"\xff\xfe"), ("cp1252", b"")]
)
def test_changes_far_apart_merge_in_the_file_s_own_style(newline: str, encoding: str, bom: bytes) -> None:
    base, ours, theirs, both = (_encode(text + "\u20ac\n", newline, encoding, bom) for text in (BASE, OURS, THEIRS, BOTH))
    assert three_way(base, ours, theirs) == (both, 0)


def test_a_conflict_is_marked_and_counted() -> None:
    result = three_way(b"a\r\nb\r\n", b"mine\r\nb\r\n", b"agent\r\nb\r\n")
    assert result.conflicts == 1
    assert result.data == b"<<<<<<< yours\r\nmine\r\n=======\r\nagent\r\n>>>>>>> agent\r\nb\r\n"


def test_one_side_unchanged_needs_no_merge_whatever_the_content() -> None:
    assert three_way(b"\0a", b"\0a", b"\0b") == (b"\0b", 0)
    assert three_way(b"\0a", b"\0b", b"\0a") == (b"\0b", 0)
    assert three_way(b"\0a", b"\0b", b"\0b") == (b"\0b", 0)


def test_binary_files_are_refused() -> None:
    with pytest.raises(TextError, match="the snapshot is binary"):
        three_way(b"\0a", b"\0b", b"\0c")


def test_the_encoding_follows_the_side_that_changed_it() -> None:
    base, ours, theirs = BASE.encode(), OURS.encode(), THEIRS.encode()
    mark = b"\xef\xbb\xbf"
    assert three_way(base, ours, mark + theirs) == (mark + BOTH.encode(), 0)
    assert three_way(base, mark + ours, theirs) == (mark + BOTH.encode(), 0)
    assert three_way(base, "\ufeff".encode("utf-16-le") + OURS.encode("utf-16-le"), theirs) == (
        ("\ufeff" + BOTH).encode("utf-16-le"),
        0,
    )


def test_no_newline_at_the_end_is_kept() -> None:
    assert three_way(b"a\nb\nc\nd\nlast", b"A\nb\nc\nd\nlast", b"a\nb\nc\nd\nLAST") == (b"A\nb\nc\nd\nLAST", 0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=12), st.data())
def test_no_typed_line_is_lost(lines: list[str], data: st.DataObject) -> None:
    base = "".join(line + "\n" for line in lines)
    at = data.draw(st.integers(0, len(lines)))
    ours = "".join(line + "\n" for line in [*lines[:at], "typed", *lines[at:]])
    theirs = "".join(line + "\n" for line in data.draw(st.lists(st.sampled_from("abcdX"), max_size=12)))
    result = three_way(base.encode(), ours.encode(), theirs.encode())
    assert b"typed\n" in result.data
    assert result.conflicts == result.data.count(b"<<<<<<< yours\n")

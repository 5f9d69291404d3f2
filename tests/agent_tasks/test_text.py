"""Decoding is lossless or refused; what is shown is harmless."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.agent_tasks.text import (
    MAX_TEXT_BYTES,
    TextError,
    decode,
    line_opcodes,
    neutralise,
    normalise_newlines,
    raw_offsets,
    restyle,
    split_lines,
)

SAMPLES = {
    "empty": (b"", "utf-8"),
    "ascii": (b"a\nb\n", "utf-8"),
    "utf-8": ("caf\u00e9 \u2018x\u2019 \U0001f600\n".encode(), "utf-8"),
    "utf-8 with mark": (b"\xef\xbb\xbfa\r\n", "utf-8"),
    "utf-16-le": (b"\xff\xfe" + "a\r\n\U0001f600".encode("utf-16-le"), "utf-16-le"),
    "utf-16-be": (b"\xfe\xff" + "a\nb".encode("utf-16-be"), "utf-16-be"),
    "utf-32-le": (b"\xff\xfe\0\0" + "a\n".encode("utf-32-le"), "utf-32-le"),
    "windows-1252": (b"\x93caf\xe9\x94 \x80\r\n", "cp1252"),
    "latin-1": (b"caf\xe9 \x81\x8d\n", "latin-1"),
    "mixed endings": (b"a\r\nb\nc\rd", "utf-8"),
    "odd separators": ("a\x0cb\u2028c\x85d\x0b".encode(), "utf-8"),
}


@pytest.mark.parametrize(("data", "encoding"), SAMPLES.values(), ids=SAMPLES.keys())
def test_text_encodes_back_to_the_same_bytes(data: bytes, encoding: str) -> None:
    file = decode(data)
    assert (file.encoding, file.encode()) == (encoding, data)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_round_trip_or_are_refused(data: bytes) -> None:
    try:
        file = decode(data)
    except TextError:
        return
    assert file.encode() == data


@pytest.mark.parametrize(
    "data",
    [
        b"\x7fELF\0\0",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"\xff\xfea",
        b"\xff\xfe\x00\xd8",
        b"\xe9\x01\x02",
        b"\xef\xbb\xbf\xff",
        b"\xff\xfe\0",
    ],
)
def test_binary_is_refused(data: bytes) -> None:
    with pytest.raises(TextError):
        decode(data, "photo.png")


def test_a_large_file_is_refused_with_its_size() -> None:
    with pytest.raises(TextError, match=r"big\.log has 52,428,800 bytes"):
        decode(b"a" * 52_428_800, "big.log")
    assert len(decode(b"a" * MAX_TEXT_BYTES).text) == MAX_TEXT_BYTES


def test_the_usual_line_ending_is_the_most_frequent() -> None:
    assert [decode(data).newline for data in (b"a\r\nb\r\nc\n", b"a", b"a\rb\rc\n")] == ["\r\n", "\n", "\r"]


def test_a_character_that_the_encoding_lacks_is_named() -> None:
    with pytest.raises(TextError, match=r"cp1252, which has no U\+2192 RIGHTWARDS ARROW"):
        decode(b"\x80\n").encode("\u2192")


LINES = st.lists(st.tuples(st.text("ab\u00e9\u2028\x0c", max_size=3), st.sampled_from(["\n", "\r\n", "\r"])), max_size=8)


@settings(deadline=None)
@given(LINES, st.text("ab", max_size=2))
def test_lines_joined_are_the_text(lines: list[tuple[str, str]], last: str) -> None:
    text = "".join(body + ending for body, ending in lines) + last
    assert "".join(split_lines(text)) == text
    assert len(split_lines(text)) == len(normalise_newlines(text).split("\n")) - (
        normalise_newlines(text).endswith("\n") or not text
    )


@settings(deadline=None)
@given(LINES)
def test_offsets_map_back_to_the_raw_text(lines: list[tuple[str, str]]) -> None:
    raw = "".join(body + ending for body, ending in lines)
    text = normalise_newlines(raw)
    for offset in range(len(text)):
        [at] = raw_offsets(raw, offset)
        assert raw[at] == text[offset] or (raw[at] == "\r" and text[offset] == "\n")


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_opcodes_turn_old_into_new(old: list[str], new: list[str]) -> None:
    out, position = [], 0
    for i1, i2, j1, j2 in line_opcodes(old, new):
        assert i1 > position or i1 == 0 or position == 0
        out += old[position:i1] + new[j1:j2]
        position = i2
    assert out + old[position:] == new


@pytest.mark.parametrize("values", [20, 500, 100_000])
@pytest.mark.timeout(20)
def test_opcodes_of_large_and_hostile_texts_are_quick(values: int) -> None:
    old = [str(n % values) for n in range(40_000)]
    new = [line if n % 3 else f"new {line}" for n, line in enumerate(old)]
    for length in (15_000, 40_000):
        assert line_opcodes(old[:length], new[:length])


def test_opcodes_are_small_where_little_changed() -> None:
    old = [f"def f{n}():\n" if n % 3 == 0 else "    return 1\n" if n % 3 == 1 else "\n" for n in range(600)]
    new = [*old[:90], "def added():\n", "    return 1\n", "\n", *old[90:500], *old[503:]]
    assert line_opcodes(old, new) == [(90, 90, 90, 93), (501, 504, 504, 504)]


@settings(deadline=None)
@given(LINES, st.text("ab\n", max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_restyled_text_reads_as_what_was_asked(lines: list[tuple[str, str]], new: str, newline: str) -> None:
    old = "".join(body + ending for body, ending in lines)
    assert normalise_newlines(restyle(old, new, newline)) == new


def test_unchanged_lines_keep_their_own_endings() -> None:
    assert restyle("a\r\nb\nc\r\n", "a\nB\nc\nd\n", "\n") == "a\r\nB\nc\r\nd\r\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;cm0gLXJm", ""),
        ("\x9b2Jx", "x"),
        ("a\rb\r\nc\tq", "a\nb\nc\tq"),
        ("x\u202eevil\u2066", "x<U+202E>evil<U+2066>"),
        ("zero\u200bwidth\ufeff", "zero<U+200B>width<U+FEFF>"),
        ("tag\U000e0041", "tag<U+E0041>"),
        ("\x07\x00\x7f", "<U+0007><U+0000><U+007F>"),
        ("\u2028", "<U+2028>"),
        ("\ud800", "<U+D800>"),
        ("caf\u00e9 \u2192 \U0001f600", "caf\u00e9 \u2192 \U0001f600"),
    ],
)
def test_foreign_text_is_made_harmless(text: str, shown: str) -> None:
    assert neutralise(text) == shown


@settings(deadline=None)
@given(st.text())
def test_nothing_invisible_remains(text: str) -> None:
    assert "\x1b" not in neutralise(text)
    assert neutralise(neutralise(text)) == neutralise(text)

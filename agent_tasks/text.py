"""Files as text without loss: what was decoded encodes back to the same bytes, or the file is refused.

A line ends with "\\n", "\\r\\n" or "\\r", as editors and the language server protocol count lines; other separators are text.
Also the one place that makes foreign text safe to show.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Indel

from .errors import TaskError

MAX_TEXT_BYTES = 2 * 1024 * 1024
_MAX_TABLE_BITS = 400_000_000
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
ENDING = re.compile(r"\r\n|\n|\r")
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\b\x1b")
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # strings: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)


class TextError(TaskError):
    """The bytes are not text that can be edited and written back exactly."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """`text` has the file's own line endings and no byte order mark; `encoding` is a Python codec name."""

    text: str
    encoding: str
    bom: bytes = b""

    @property
    def newline(self) -> str:
        """The most frequent line ending; "\\n" for a file of one line."""
        counts = Counter(ENDING.findall(self.text))
        return max(counts, key=lambda ending: counts[ending]) if counts else "\n"

    @property
    def normalised(self) -> str:
        """The text as a model reads it: every line ends with "\\n"."""
        return normalise_newlines(self.text)

    def encode(self, text: str | None = None) -> bytes:
        """`text` (default: this file's) in this file's encoding. TextError when a character does not exist in it."""
        try:
            return self.bom + (self.text if text is None else text).encode(self.encoding)
        except UnicodeEncodeError as error:
            bad = error.object[error.start]
            raise TextError(
                f"the file is {self.encoding}, which has no {_name(bad)}", f"write it without {bad!r}, or as an escape"
            ) from error


def decode(data: bytes, name: str = "the file", max_bytes: int = MAX_TEXT_BYTES) -> TextFile:
    """The text of `data`. TextError for binary or oversized content; `name` is used in its message.

    Without a byte order mark UTF-8 is tried, then Windows-1252 or Latin-1: every byte has a character there, so an edit
    leaves the rest of the file as it was, whatever the true encoding is.
    """
    if len(data) > max_bytes:
        raise TextError(
            f"{name} has {len(data):,} bytes; files over {max_bytes:,} bytes are not edited", "edit it by hand, or split it"
        )
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return _decode_exactly(data[len(bom) :], encoding, bom, name)
    if b"\0" in data:
        raise TextError(f"{name} is binary: it holds NUL bytes", "choose a text file")
    try:
        return TextFile(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        return _decode_legacy(data, name)


def split_lines(text: str) -> list[str]:
    """Lines with their endings; joined they are `text` again."""
    return _LINE.findall(text)


def normalise_newlines(text: str) -> str:
    return ENDING.sub("\n", text)


def raw_offsets(raw: str, *offsets: int) -> list[int]:
    """Offsets into the normalised text as offsets into `raw`."""
    pairs = [match.start() - number for number, match in enumerate(re.finditer("\r\n", raw))]
    return [offset + bisect_left(pairs, offset) for offset in offsets]


def line_opcodes(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Changed regions as (old start, old end, new start, new end), ascending and never touching.

    Between the first and the last difference a longest common subsequence is kept; where that would take over 50 MB, which
    means some 20,000 lines on either side, all of it is one region.
    """
    head = _common_prefix(old, new)
    tail = _common_prefix(old[head:][::-1], new[head:][::-1])
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if not a and not b:
        return []
    if len(a) * len(b) > _MAX_TABLE_BITS:
        return [(head, head + len(a), head, head + len(b))]
    # Numbers instead of lines: the table compares hashes, and equal hashes must mean equal lines.
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(line, len(numbers)) for line in side] for side in (a, b)]
    regions: list[tuple[int, int, int, int]] = []
    for code in Indel.opcodes(*ids):
        if code.tag == "equal":
            continue
        region = (code.src_start + head, code.src_end + head, code.dest_start + head, code.dest_end + head)
        if regions and (regions[-1][1], regions[-1][3]) == (region[0], region[2]):
            region = (regions[-1][0], region[1], regions.pop()[2], region[3])
        regions.append(region)
    ends = [region[0] for region in regions[1:]] + [len(old) + 1]
    return [_slid_down(region, end, old, new) for region, end in zip(regions, ends, strict=True)]


def restyle(old: str, new: str, newline: str) -> str:
    """`new`, written with "\\n", in the line endings of `old`: unchanged lines keep theirs, changed ones follow their neighbours.

    `newline` is for text that has no neighbour, and for all of it where a mix would read as other lines ("\\r" before "\\n").
    """
    old_lines = split_lines(old)
    bare_old = [ENDING.sub("\n", line) for line in old_lines]
    bare_new = split_lines(normalise_newlines(new))
    out: list[str] = []
    position = 0
    for i1, i2, j1, j2 in line_opcodes(bare_old, bare_new):
        out += old_lines[position:i1]
        endings = [_ending(line) for line in old_lines[max(i1 - 1, 0) : i2 + 1]]
        around = next((ending for ending in endings if ending), newline)
        replaced = [_ending(line) or around for line in old_lines[i1:i2]] or [around]
        for offset, line in enumerate(bare_new[j1:j2]):
            ending = replaced[min(offset, len(replaced) - 1)]
            out.append(line[:-1] + ending if line.endswith("\n") else line)
        position = i2
    styled = "".join(out + old_lines[position:])
    if normalise_newlines(styled) != "".join(bare_new):
        return "".join(bare_new).replace("\n", newline)
    return styled


def neutralise(text: str) -> str:
    """`text` safe for terminal, editor and prompt: no escapes; invisible and reordering characters shown as <U+XXXX>."""
    text = normalise_newlines(_ESCAPE.sub("", text))
    return "".join(char if char.isascii() and char.isprintable() else _shown(char) for char in text)


def _decode_exactly(body: bytes, encoding: str, bom: bytes, name: str) -> TextFile:
    try:
        file = TextFile(body.decode(encoding), encoding, bom)
    except UnicodeDecodeError as error:
        raise TextError(f"{name} starts with the mark of {encoding} but is not: {error.reason}", "repair its encoding") from error
    if "\0" in file.text or file.encode() != bom + body:
        raise TextError(f"{name} is binary, or {encoding} that cannot be written back exactly", "choose a text file")
    return file


def _decode_legacy(data: bytes, name: str) -> TextFile:
    if any(byte < 0x20 and byte not in _TEXT_CONTROLS for byte in set(data)):
        raise TextError(f"{name} is binary: it is not UTF-8 and holds control bytes", "choose a text file")
    for encoding in ("cp1252", "latin-1"):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if text.encode(encoding) == data:
            return TextFile(text, encoding)
    raise AssertionError("latin-1 decodes every byte")


def _slid_down(region: tuple[int, int, int, int], end: int, old: Sequence[str], new: Sequence[str]) -> tuple[int, int, int, int]:
    """The same insertion or deletion as far down as it can be told, short of the old line `end`: whole blocks, not seams."""
    i1, i2, j1, j2 = region
    if i1 < i2 and j1 < j2:
        return region
    side, start, stop = (old, i1, i2) if j1 == j2 else (new, j1, j2)
    shift = 0
    while i2 + shift + 1 < end and stop + shift < len(side) and side[start + shift] == side[stop + shift]:
        shift += 1
    return i1 + shift, i2 + shift, j1 + shift, j2 + shift


def _common_prefix(a: Sequence[str], b: Sequence[str]) -> int:
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length


def _ending(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def _shown(char: str) -> str:
    if char in "\n\t":
        return char
    category = unicodedata.category(char)
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"<U+{ord(char):04X}>"
    return char


def _name(char: str) -> str:
    return f"U+{ord(char):04X} {unicodedata.name(char, 'unnamed')}"

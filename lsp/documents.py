"""Open documents of one editor, and the edge where its URIs and positions become paths and offsets.

Lines end at "\\n", "\\r\\n" or "\\r" and nowhere else, as LSP defines; columns count code units of the negotiated encoding.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from lsprotocol import types

from ..agent_tasks.errors import TaskError
from ..agent_tasks.task import LineRange

_LINE_END = re.compile(r"\r\n|\r|\n")
_BEYOND_BMP = re.compile("[\U00010000-\U0010ffff]")


class NotAFileError(TaskError):
    """The URI names no file on this machine."""


def uri_to_path(uri: str) -> Path:
    """The absolute real path of a file URI (links resolved, so that a file has one name)."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise NotAFileError(f"{uri!r} is not a URI") from None
    if parts.scheme == "untitled":
        raise NotAFileError("this document was never saved, so an agent has no file to work on", "save it to a file first")
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise NotAFileError(f"{uri} is not a file on this machine", "open the file itself, from a local or remote folder")
    try:
        raw = unquote_to_bytes(parts.path)
    except UnicodeEncodeError:
        raise NotAFileError(f"{uri!r} is not valid text") from None
    if not raw.startswith(b"/") or b"\0" in raw:
        raise NotAFileError(f"{uri} does not name an absolute path")
    return Path(os.path.realpath(os.fsdecode(raw)))


class TextBuffer:
    """Text with the offsets at which its lines start. Never changed in place."""

    __slots__ = ("starts", "text")

    def __init__(self, text: str, starts: list[int] | None = None) -> None:
        self.text = text
        self.starts = [0, *_line_starts(text)] if starts is None else starts

    def replaced(self, start: int, end: int, new: str) -> TextBuffer:
        """With `new` for text[start:end]. Only the lines around are split again: a keystroke must not cost a whole file."""
        text = self.text[:start] + new + self.text[end:]
        delta = len(text) - len(self.text)
        # One line more on each side: the edit may part, or make, a pair of \r and \n at its borders.
        first = max(bisect_right(self.starts, start) - 2, 0)
        last = bisect_right(self.starts, end) + 1
        begin = self.starts[first]
        stop = self.starts[last] if last < len(self.starts) else len(self.text)
        inside = [begin + offset for offset in _line_starts(text[begin : stop + delta])]
        after = self.starts[last + 1 :]
        return TextBuffer(text, self.starts[: first + 1] + inside + ([offset + delta for offset in after] if delta else after))

    def line_end(self, line: int) -> int:
        """Offset of the end of a line, before its line ending."""
        if line + 1 == len(self.starts):
            return len(self.text)
        end = self.starts[line + 1]
        return end - (2 if self.text.endswith("\r\n", self.starts[line], end) else 1)


def _line_starts(text: str) -> list[int]:
    """Of all lines but the first."""
    return [match.end() for match in _LINE_END.finditer(text)]


def to_offset(buffer: TextBuffer, position: types.Position, encoding: str) -> int:
    """Index into the text. Past a line's end means its end, past the last line the text's end, inside a character its start."""
    if position.line >= len(buffer.starts):
        return len(buffer.text)
    start, end = buffer.starts[position.line], buffer.line_end(position.line)
    if encoding == "utf-32" or buffer.text.isascii():
        return min(start + position.character, end)
    units = 0
    for offset in range(start, end):
        units += _units(buffer.text[offset], encoding)
        if units > position.character:
            return offset
    return end


def to_position(buffer: TextBuffer, offset: int, encoding: str) -> types.Position:
    line = bisect_right(buffer.starts, offset) - 1
    return types.Position(line, count_units(buffer.text[buffer.starts[line] : offset], encoding))


def count_units(text: str, encoding: str) -> int:
    if encoding == "utf-32" or text.isascii():
        return len(text)
    if encoding == "utf-8":
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text) + len(_BEYOND_BMP.findall(text))


def _units(char: str, encoding: str) -> int:
    code = ord(char)
    if encoding == "utf-16":
        return 2 if code > 0xFFFF else 1
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


def apply_changes(buffer: TextBuffer, changes: Iterable[types.TextDocumentContentChangeEvent], encoding: str) -> TextBuffer:
    """The text after a didChange: each change refers to the text that the one before it left."""
    for change in changes:
        if isinstance(change, types.TextDocumentContentChangeWholeDocument):
            buffer = TextBuffer(change.text)
            continue
        start = to_offset(buffer, change.range.start, encoding)
        end = max(start, to_offset(buffer, change.range.end, encoding))
        buffer = buffer.replaced(start, end, change.text)
    return buffer


def to_lines(selection: types.Range | None) -> LineRange | None:
    """Lines that a selection touches, without the line it merely ends before. None for no selection or a bare cursor."""
    if selection is None or selection.start == selection.end:
        return None
    last = selection.end.line - (1 if selection.end.character == 0 and selection.end.line > selection.start.line else 0)
    return LineRange(selection.start.line + 1, last + 1)


def choose_root(path: Path, folders: Sequence[Path]) -> Path:
    """The workspace folder that holds `path` (the innermost), else the git work tree around it, else its own folder."""
    holding = [folder for folder in folders if path.is_relative_to(folder)]
    if holding:
        return max(holding, key=lambda folder: len(folder.parts))
    own = path if path.is_dir() else path.parent
    return next((folder for folder in (own, *own.parents) if (folder / ".git").exists()), own)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """An open document as the editor has it. `uri` is spelt as the editor spells it."""

    uri: str
    path: Path
    buffer: TextBuffer
    version: int

    @property
    def text(self) -> str:
        return self.buffer.text


class Documents:
    """The documents one editor holds, by path and by URI. Those that are no files are kept out and their changes ignored."""

    def __init__(self) -> None:
        self._by_uri: dict[str, Document] = {}

    def open(self, item: types.TextDocumentItem) -> Document | None:
        try:
            path = uri_to_path(item.uri)
        except NotAFileError:
            return None
        document = Document(item.uri, path, TextBuffer(item.text), item.version)
        self._by_uri[item.uri] = document
        return document

    def change(self, params: types.DidChangeTextDocumentParams, encoding: str) -> Document | None:
        before = self._by_uri.get(params.text_document.uri)
        if before is None:
            return None
        buffer = apply_changes(before.buffer, params.content_changes, encoding)
        document = Document(before.uri, before.path, buffer, params.text_document.version)
        self._by_uri[before.uri] = document
        return document

    def close(self, uri: str) -> Document | None:
        return self._by_uri.pop(uri, None)

    def at(self, path: Path) -> Document | None:
        return next((document for document in self._by_uri.values() if document.path == path), None)

"""Edits as pure functions on bytes. What lies outside the change comes out byte for byte as it went in, or nothing comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from .errors import TaskError
from .nearest import explain_mismatch
from .policy import flag_reason
from .task import ChangeKind, FileChange, Hunk
from .text import ENDING, TextFile, decode, line_opcodes, normalise_newlines, raw_offsets, restyle, split_lines

_GUARDED_LINES = 40
_CONTEXT = 3


class EditError(TaskError):
    """The edit does not apply. The file is as it was."""


class Edit(NamedTuple):
    search: str
    replace: str


def apply_edit(data: bytes, search: str, replace: str) -> bytes:
    """`data` with the one occurrence of `search` replaced. Both texts may use "\\n" whatever the file uses.

    EditError when `search` is empty (unless the file is), not found, found more than once, or changes nothing.
    """
    file = decode(data)
    text, search, replace = file.normalised, normalise_newlines(search), normalise_newlines(replace)
    if file.bom:
        search, replace = search.removeprefix("\ufeff"), replace.removeprefix("\ufeff")
    at = _only_occurrence(text, search)
    if search == replace:
        raise EditError("the search and the replace text are the same, so nothing would change", "give the new text")
    start, end = raw_offsets(file.text, at, at + len(search))
    region = restyle(file.text[start:end], replace, _newline_at(file, start))
    edited = file.text[:start] + region + file.text[end:]
    if normalise_newlines(edited) != text[:at] + replace + text[at + len(search) :]:
        # A lone "\r" beside a lone "\n" would read as one ending; "\r\n" merges with neither.
        edited = file.text[:start] + replace.replace("\n", "\r\n") + file.text[end:]
    return file.encode(edited)


def apply_edits(data: bytes, edits: Sequence[Edit]) -> bytes:
    """All of `edits` one after the other, or EditError naming the first that fails."""
    for number, edit in enumerate(edits, 1):
        try:
            data = apply_edit(data, edit.search, edit.replace)
        except EditError as error:
            if len(edits) == 1:
                raise
            raise EditError(f"edit {number} of {len(edits)}: {error.message}\nNone of them was applied.", error.fix) from error
    return data


def rewrite(data: bytes | None, text: str) -> bytes:
    """A whole new text for a file: UTF-8 for a new one, else in the file's own encoding and line endings.

    EditError when it would drop more than half of a file of 40 lines or more: that is how models lose what they did not repeat.
    """
    if data is None:
        return text.encode("utf-8")
    file = decode(data)
    before, after = len(split_lines(file.text)), len(split_lines(text))
    if before >= _GUARDED_LINES and after * 2 < before:
        raise EditError(
            f"the new text has {after} lines, the file has {before}: most of it would be lost",
            "change the lines you mean with search and replace",
        )
    return file.encode(restyle(file.text, text.removeprefix("\ufeff"), file.newline))


def make_hunks(path: Path, base: bytes | None, proposed: bytes | None, base_version: int | None = None) -> FileChange:
    """The change from `base` (None: the file is new) to `proposed` (None: it is deleted) at the absolute `path`, cut into hunks.

    Equal inputs give equal hunk ids. TextError when either side is not text.
    """
    old = decode(base, path.name) if base is not None else None
    new = decode(proposed, path.name) if proposed is not None else None
    shown = new or old
    if shown is None:
        raise EditError(f"{path.name} is neither in the snapshot nor in the proposal")
    old_lines, new_lines = _lines(old), _lines(new)
    if old is None or new is None or (old.encoding, old.bom) != (new.encoding, new.bom):
        # Lines of two encodings cannot be mixed: such a change is taken whole.
        regions = [(0, len(old_lines), 0, len(new_lines))]
    else:
        regions = line_opcodes(old_lines, new_lines)
    kind = ChangeKind.CREATE if old is None else ChangeKind.DELETE if new is None else ChangeKind.MODIFY
    hunks = tuple(_hunk(path, base_version, region, new_lines) for region in regions)
    return FileChange(path, kind, base, proposed, shown.encoding, hunks, flag_reason(path))


def apply_hunks(change: FileChange, hunk_ids: Iterable[str]) -> bytes | None:
    """The base with only the named hunks. None: the file is not there (a refused creation, an accepted deletion)."""
    chosen, known = set(hunk_ids), {hunk.id for hunk in change.hunks}
    if unknown := chosen - known:
        raise EditError(f"{change.path.name} has no hunk {', '.join(sorted(unknown))}", "list them with `quadjet show`")
    if not chosen:
        return change.base
    if chosen == known or change.base is None:
        return change.proposed
    base = decode(change.base)
    lines = split_lines(base.text)
    for hunk in reversed(change.hunks):
        if hunk.id in chosen:
            start = hunk.old_start - 1
            lines[start : start + hunk.old_lines] = [hunk.text]
    return base.encode("".join(lines))


def diff_text(change: FileChange, root: Path) -> str:
    """A unified diff with three lines of context and the file's own line endings. Pass it through `neutralise` to show it."""
    name = change.path.relative_to(root).as_posix()
    old_name = "/dev/null" if change.kind is ChangeKind.CREATE else f"a/{name}"
    new_name = "/dev/null" if change.kind is ChangeKind.DELETE else f"b/{name}"
    old_lines = _lines(decode(change.base) if change.base is not None else None)
    body = [_diff_group(group, old_lines) for group in _grouped(change.hunks)]
    return f"--- {old_name}\n+++ {new_name}\n" + "".join(body)


def _newline_at(file: TextFile, start: int) -> str:
    """The ending of the line that holds position `start`; of the last line, which may have none, the file's usual one."""
    ending = ENDING.search(file.text, start)
    return ending.group() if ending else file.newline


def _only_occurrence(text: str, search: str) -> int:
    if not search and text:
        raise EditError("the search text is empty", "quote the lines to replace exactly as the file has them")
    found = _occurrences(text, search)
    if len(found) == 1:
        return found[0]
    if not found:
        why = explain_mismatch(text, search)
        raise EditError(f"the search text is not in the file. {why}", "quote the lines exactly as the file has them")
    numbers = ", ".join(str(text.count("\n", 0, at) + 1) for at in found[:10])
    more = " and more" if len(found) > 10 else ""
    raise EditError(f"the search text is found at lines {numbers}{more}", "add lines around it until it is unique")


def _occurrences(text: str, search: str) -> list[int]:
    """Where `search` starts, overlapping ones included; the first eleven are enough to tell."""
    found: list[int] = []
    at = text.find(search)
    while at >= 0 and len(found) < 11:
        found.append(at)
        if not search:
            break
        at = text.find(search, at + 1)
    return found


def _lines(file: TextFile | None) -> list[str]:
    return split_lines(file.text) if file else []


def _hunk(path: Path, base_version: int | None, region: tuple[int, int, int, int], new_lines: list[str]) -> Hunk:
    old_start, old_end, new_start, new_end = region
    text = "".join(new_lines[new_start:new_end])
    key = f"{path}\0{old_start}\0{old_end}\0{text}".encode("utf-8", "surrogateescape")
    return Hunk(
        id=sha256(key).hexdigest()[:12],
        path=path,
        base_version=base_version,
        old_start=old_start + 1,
        old_lines=old_end - old_start,
        new_start=new_start + 1,
        new_lines=new_end - new_start,
        text=text,
    )


def _grouped(hunks: Sequence[Hunk]) -> list[list[Hunk]]:
    """Hunks whose contexts would touch belong to one group."""
    groups: list[list[Hunk]] = []
    for hunk in hunks:
        if groups and hunk.old_start - (groups[-1][-1].old_start + groups[-1][-1].old_lines) <= 2 * _CONTEXT:
            groups[-1].append(hunk)
        else:
            groups.append([hunk])
    return groups


def _diff_group(group: list[Hunk], old_lines: list[str]) -> str:
    first, last = group[0], group[-1]
    start = max(first.old_start - 1 - _CONTEXT, 0)
    end = min(last.old_start - 1 + last.old_lines + _CONTEXT, len(old_lines))
    out: list[str] = []
    position = start
    for hunk in group:
        at = hunk.old_start - 1
        out += [" " + line for line in old_lines[position:at]]
        out += ["-" + line for line in old_lines[at : at + hunk.old_lines]]
        out += ["+" + line for line in split_lines(hunk.text)]
        position = at + hunk.old_lines
    out += [" " + line for line in old_lines[position:end]]
    new_count = end - start + sum(hunk.new_lines - hunk.old_lines for hunk in group)
    new_start = first.new_start - (first.old_start - 1 - start)
    header = f"@@ -{_span(start + 1, end - start)} +{_span(new_start, new_count)} @@\n"
    return header + "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in out)


def _span(start: int, count: int) -> str:
    """An empty range names the line before it."""
    return f"{start if count else start - 1},{count}"

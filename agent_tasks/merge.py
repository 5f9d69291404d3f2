"""Three-way merge of one file: what the agent changed goes into what the person typed meanwhile, or the conflict is marked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from .git import run_merge_file
from .text import TextFile, decode

_LABELS = ("yours", "snapshot", "agent")


class MergeResult(NamedTuple):
    """`data` holds conflict markers when `conflicts` (how many) is not 0."""

    data: bytes
    conflicts: int


def three_way(base: bytes, ours: bytes, theirs: bytes) -> MergeResult:
    """`ours` with the changes from `base` to `theirs`. TextError when a file that needs merging is binary or too large.

    Encoding and byte order mark follow whichever side changed them, ours first. Runs git: call it in a thread.
    """
    if ours in (base, theirs):
        return MergeResult(theirs, 0)
    if theirs == base:
        return MergeResult(ours, 0)
    files = [
        decode(data, name) for data, name in zip((base, ours, theirs), ("the snapshot", "your file", "the proposal"), strict=True)
    ]
    style = _style(*files)
    # git takes UTF-16 for binary, and has no need to know encodings: all three go in as UTF-8.
    text, conflicts = _merge_text(*(file.text.encode("utf-8") for file in files))
    return MergeResult(style.encode(text.decode("utf-8")), conflicts)


def _style(base: TextFile, ours: TextFile, theirs: TextFile) -> TextFile:
    return theirs if (ours.encoding, ours.bom) == (base.encoding, base.bom) else ours


def _merge_text(base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, int]:
    with tempfile.TemporaryDirectory(prefix="quadjet-merge-") as name:
        folder = Path(name)
        for file, data in (("base", base), ("ours", ours), ("theirs", theirs)):
            (folder / file).write_bytes(data)
        conflicts, merged = run_merge_file(folder, "ours", "base", "theirs", _LABELS)
    return merged, conflicts

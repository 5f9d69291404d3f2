"""What a person decides about a proposal: hunks go into the live text by three-way merge, or nothing of that file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .edits import apply_hunks
from .errors import TaskError, UnknownHunkError
from .files import content_hash, read_file, write_file
from .merge import three_way
from .task import FileChange, HunkState, Proposal, Task
from .text import TextFile, decode, line_opcodes, split_lines
from .workspace import OpenDocument, Workspace

_OPEN = (HunkState.PENDING, HunkState.CONFLICT)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a file was left as it is."""

    path: Path
    message: str


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """How an accept ended. Hunks of a file with a conflict are not applied; the other files are."""

    task: Task
    applied: tuple[str, ...] = ()
    """Ids of the hunks that are in the user's files because of this call."""
    conflicts: tuple[Conflict, ...] = ()


def select(proposal: Proposal, hunk_ids: Collection[str] | None) -> dict[Path, frozenset[str]]:
    """The undecided hunks among `hunk_ids` (None: all undecided ones) by file. Raises UnknownHunkError."""
    known = {hunk.id for hunk in proposal.hunks}
    unknown = set(hunk_ids or ()) - known
    if unknown:
        raise UnknownHunkError(
            f"the task has no hunk {', '.join(sorted(unknown))}", "list them again: it may have a new proposal"
        )
    wanted = known if hunk_ids is None else set(hunk_ids)
    chosen: dict[Path, set[str]] = {}
    for hunk in proposal.hunks:
        if hunk.id in wanted and hunk.state in _OPEN:
            chosen.setdefault(hunk.path, set()).add(hunk.id)
    return {path: frozenset(ids) for path, ids in chosen.items()}


def with_states(proposal: Proposal, states: Mapping[str, HunkState]) -> Proposal:
    changes = []
    for change in proposal.changes:
        hunks = tuple(replace(hunk, state=states.get(hunk.id, hunk.state)) for hunk in change.hunks)
        changes.append(replace(change, hunks=hunks))
    return Proposal(tuple(changes))


def is_decided(proposal: Proposal) -> bool:
    return not any(hunk.state in _OPEN for hunk in proposal.hunks)


async def apply_change(change: FileChange, hunk_ids: Collection[str], workspace: Workspace, root: Path, label: str) -> str:
    """Merge the chosen hunks into the file as it is now. Returns why that was not possible, or an empty text.

    base: the snapshot with the hunks accepted before; ours: the editor's text, else the disk; theirs: base with the chosen
    hunks. An editor that changed the file meanwhile is asked once more with a fresh merge.
    """
    before = {hunk.id for hunk in change.hunks if hunk.state is HunkState.ACCEPTED}
    try:
        base, theirs = apply_hunks(change, before), apply_hunks(change, before | set(hunk_ids))
        for _ in range(2):
            document = workspace.live(change.path)
            if document is None:
                await asyncio.to_thread(_apply_on_disk, change, base, theirs, root)
                return ""
            new_text = await asyncio.to_thread(_merge_document, document, change, base, theirs)
            if new_text == document.text or await document.editor.apply_edit(change.path, document.version, new_text, label):
                return ""
    except _ConflictError as error:
        return str(error)
    except (TaskError, OSError) as error:
        return error.message if isinstance(error, TaskError) else f"the file could not be used: {error.strerror or error}"
    return "the editor changed the file while the edit was on its way, twice; accept it again"


class _ConflictError(Exception):
    """The file cannot take the hunks as it is."""


def _merge_document(document: OpenDocument, change: FileChange, base: bytes | None, theirs: bytes | None) -> str:
    if base is None or theirs is None:
        raise _ConflictError("the file is open in an editor; close it first")
    file = decode(base)
    ours = file.encode(document.text)
    return _strip(file, _merged(base, ours, theirs))


def _strip(file: TextFile, data: bytes) -> str:
    return data.removeprefix(file.bom).decode(file.encoding)


def _merged(base: bytes, ours: bytes, theirs: bytes) -> bytes:
    if ours == base:
        return theirs
    result = three_way(base, ours, theirs)
    if result.conflicts:
        lines = ", ".join(str(line) for line in _conflict_lines(base, ours, theirs))
        raise _ConflictError(f"you and the task changed the same place, at line {lines} of your text")
    return result.data


def _conflict_lines(base: bytes, ours: bytes, theirs: bytes) -> list[int]:
    """Where both sides changed the same or touching lines of `base`, as line numbers of `ours`."""
    old, mine, other = (split_lines(decode(data).text) for data in (base, ours, theirs))
    regions = line_opcodes(old, other)
    touched = [
        (mine_start + 1)
        for start, end, mine_start, _ in line_opcodes(old, mine)
        if any(start <= other_end and other_start <= end for other_start, other_end, _, _ in regions)
    ]
    return touched or [1]


def _apply_on_disk(change: FileChange, base: bytes | None, theirs: bytes | None, root: Path) -> None:
    ours = read_file(root, change.path)
    if ours == theirs:
        return
    if ours is None and base is not None:
        raise _ConflictError("the file was deleted meanwhile")
    if ours is not None and base is None:
        raise _ConflictError("a file of this name exists by now")
    if theirs is None and ours != base:
        raise _ConflictError("the file was changed meanwhile, so it is not deleted")
    merged = theirs if base is None or ours is None or theirs is None else _merged(base, ours, theirs)
    write_file(root, change.path, merged, content_hash(ours))

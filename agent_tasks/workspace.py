"""Open text: what editors show of files, which is newer than the disk. Fed by connected editors, read by snapshots and accepts.

Two editors may hold one file; the one that changed it last is the live one. Everything runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from .text import TextError, decode


class Editor(Protocol):
    """A connected editor."""

    @property
    def name(self) -> str: ...

    async def apply_edit(self, path: Path, base_version: int, new_text: str, label: str) -> bool:
        """Replace the whole text of an open document in one undo step. False: the document is no longer at `base_version`."""
        ...


@dataclass(frozen=True, slots=True)
class OpenDocument:
    text: str
    version: int
    editor: Editor


class Workspace:
    """Open documents by absolute path."""

    def __init__(self) -> None:
        self._documents: dict[Path, list[OpenDocument]] = {}
        self._subscribers: list[Callable[[Path], None]] = []

    def subscribe(self, callback: Callable[[Path], None]) -> None:
        """Call back with the path of every document whose live copy may have become another."""
        self._subscribers.append(callback)

    def open(self, path: Path, text: str, version: int, editor: Editor) -> None:
        """An editor opened `path`. It becomes the live copy unless another editor already holds the file."""
        documents = self._documents.setdefault(path, [])
        documents[:] = [document for document in documents if document.editor is not editor]
        documents.insert(0, OpenDocument(text, version, editor))
        self._tell(path)

    def change(self, path: Path, text: str, version: int, editor: Editor) -> None:
        """An editor changed its copy, which becomes the live one."""
        documents = self._documents.setdefault(path, [])
        documents[:] = [document for document in documents if document.editor is not editor]
        documents.append(OpenDocument(text, version, editor))
        self._tell(path)

    def close(self, path: Path, editor: Editor) -> None:
        """The file on disk, or another editor's copy, is what counts from here on."""
        documents = [document for document in self._documents.get(path, []) if document.editor is not editor]
        if documents:
            self._documents[path] = documents
        else:
            self._documents.pop(path, None)
        self._tell(path)

    def close_all(self, editor: Editor) -> None:
        """An editor left."""
        for path in list(self._documents):
            self.close(path, editor)

    def live(self, path: Path) -> OpenDocument | None:
        documents = self._documents.get(path)
        return documents[-1] if documents else None

    def paths(self) -> Iterable[Path]:
        """Of all open files."""
        return tuple(self._documents)

    def open_under(self, root: Path) -> dict[Path, OpenDocument]:
        """The live copy of every open file inside `root`."""
        return {path: documents[-1] for path, documents in self._documents.items() if path.is_relative_to(root)}

    def _tell(self, path: Path) -> None:
        for callback in self._subscribers:
            callback(path)


class Overlays(NamedTuple):
    """Unsaved text as it would be on disk, and why that of other files is left out."""

    data: dict[Path, bytes]
    left_out: dict[Path, str]


def unsaved(documents: Mapping[Path, OpenDocument]) -> Overlays:
    """The documents that differ from the disk, each with the encoding and the byte order mark of its file. Reads the disk."""
    overlays = Overlays({}, {})
    for path, document in documents.items():
        try:
            on_disk = path.read_bytes()
            overlay = decode(on_disk, path.name).encode(document.text)
        except FileNotFoundError:
            overlays.left_out[path] = "it was never saved"
        except (OSError, TextError) as error:
            overlays.left_out[path] = error.message if isinstance(error, TextError) else str(error.strerror)
        else:
            if overlay != on_disk:
                overlays.data[path] = overlay
    return overlays

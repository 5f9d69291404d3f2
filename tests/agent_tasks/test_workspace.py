"""Open text of several editors."""

from __future__ import annotations

from pathlib import Path

from fakes import FakeEditor
from quadjet.agent_tasks.workspace import Workspace, unsaved

PATH = Path("/w/a.py")


def texts(workspace: Workspace) -> dict[Path, str]:
    return {path: document.text for path, document in workspace.open_under(Path("/w")).items()}


def test_the_editor_that_changed_last_is_live() -> None:
    workspace, one, two = Workspace(), FakeEditor("one"), FakeEditor("two")
    workspace.open(PATH, "a", 1, one)
    workspace.change(PATH, "b", 2, one)
    workspace.open(PATH, "a", 1, two)
    live = workspace.live(PATH)
    assert live is not None
    assert (live.text, live.version, live.editor) == ("b", 2, one)
    workspace.change(PATH, "c", 2, two)
    assert texts(workspace) == {PATH: "c"}


def test_closing_gives_way_to_the_other_editor_and_then_to_the_disk() -> None:
    workspace, one, two = Workspace(), FakeEditor("one"), FakeEditor("two")
    workspace.open(PATH, "a", 1, one)
    workspace.open(PATH, "b", 1, two)
    workspace.close_all(one)
    assert texts(workspace) == {PATH: "b"}
    workspace.close(PATH, two)
    workspace.close(PATH, two)
    assert workspace.live(PATH) is None


def test_only_files_below_the_folder_count() -> None:
    workspace = Workspace()
    workspace.open(Path("/w2/a.py"), "a", 1, FakeEditor())
    assert texts(workspace) == {}


def test_unsaved_text_gets_the_encoding_of_its_file(tmp_path: Path) -> None:
    workspace, editor = Workspace(), FakeEditor()
    files = {"bom.txt": b"\xef\xbb\xbfa\r\n", "latin.txt": b"\xe9\n", "same.txt": b"same\n"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name, text in {"bom.txt": "b\r\n", "latin.txt": "é!\n", "same.txt": "same\n", "unsaved.txt": "new\n"}.items():
        workspace.open(tmp_path / name, text, 1, editor)
    overlays = unsaved(workspace.open_under(tmp_path))
    assert overlays.data == {tmp_path / "bom.txt": b"\xef\xbb\xbfb\r\n", tmp_path / "latin.txt": b"\xe9!\n"}
    assert overlays.left_out == {tmp_path / "unsaved.txt": "it was never saved"}


def test_unsaved_text_that_its_file_cannot_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9\n")
    workspace = Workspace()
    workspace.open(tmp_path / "latin.txt", "\u4e2d", 1, FakeEditor())
    overlays = unsaved(workspace.open_under(tmp_path))
    assert overlays.data == {}
    assert "U+4E2D" in overlays.left_out[tmp_path / "latin.txt"]

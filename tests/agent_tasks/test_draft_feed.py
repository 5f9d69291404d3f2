"""What a model is told to copy from follows what editors show and what agents touch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import FakeEditor, ScriptedModel, call
from quadjet.agent_tasks.draft_feed import DraftFeed
from quadjet.agent_tasks.workspace import Workspace
from quadjet.engine.chat import ModelError, SourceKind
from task_harness import open_harness

PATH = Path("/w/a.py")
EDITOR = FakeEditor()


class SlowModel(ScriptedModel):
    """Takes a text only when `gate` is set, and refuses some."""

    def __init__(self) -> None:
        super().__init__([])
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken: list[tuple[str, str, str]] = []

    async def update_source(self, name: str, text: str, kind: SourceKind = "document") -> None:
        await self.gate.wait()
        if "\ud800" in text:
            raise ModelError("no such text")
        self.taken.append((name, text, kind))
        await super().update_source(name, text, kind)


@pytest.fixture
def workspace() -> Workspace:
    return Workspace()


@pytest.fixture
async def feed(workspace: Workspace) -> AsyncIterator[DraftFeed]:
    feed = DraftFeed(workspace)
    yield feed
    await feed.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_documents_are_told_as_they_change_and_close(workspace: Workspace, feed: DraftFeed) -> None:
    model = SlowModel()
    workspace.open(PATH, "before the model was loaded", 1, EDITOR)
    feed.attach(model)
    await settle()
    assert model.sources == {str(PATH): "before the model was loaded"}
    workspace.change(PATH, "typed", 2, EDITOR)
    await settle()
    assert model.sources == {str(PATH): "typed"}
    workspace.close(PATH, EDITOR)
    await settle()
    assert model.sources == {}


async def test_fast_typing_tells_the_last_text(workspace: Workspace, feed: DraftFeed) -> None:
    model = SlowModel()
    feed.attach(model)
    model.gate.clear()
    for version in range(50):
        workspace.change(PATH, f"text {version}", version, EDITOR)
        await asyncio.sleep(0)
    model.gate.set()
    await settle()
    assert [text for _, text, _ in model.taken] == ["text 0", "text 49"]


async def test_files_of_agents_go_with_their_task(workspace: Workspace, feed: DraftFeed) -> None:
    model = SlowModel()
    feed.attach(model)
    feed.add_file("t1", "a.py", b"\xef\xbb\xbfread\r\n")
    feed.add_file("t2", "a.py", b"other")
    feed.add_file("t2", "image.png", b"\x89PNG\x00\xff")
    await settle()
    assert model.sources == {"t1:a.py": "read\n", "t2:a.py": "other"}
    assert {kind for _, _, kind in model.taken} == {"agent"}
    feed.drop_task("t1")
    feed.drop_task("t1")
    await settle()
    assert model.sources == {"t2:a.py": "other"}


async def test_a_new_model_is_told_all_documents(workspace: Workspace, feed: DraftFeed) -> None:
    first, second = SlowModel(), SlowModel()
    feed.attach(first)
    workspace.open(PATH, "text", 1, EDITOR)
    await settle()
    feed.attach(first)
    feed.attach(second)
    await settle()
    assert len(first.taken) == 1
    assert second.sources == {str(PATH): "text"}


async def test_a_text_that_no_model_could_write_is_left_out(workspace: Workspace, feed: DraftFeed) -> None:
    model = SlowModel()
    feed.attach(model)
    workspace.open(PATH, "text", 1, EDITOR)
    await settle()
    workspace.change(PATH, "\ud800", 2, EDITOR)
    workspace.open(Path("/w/b.py"), "b", 1, EDITOR)
    await settle()
    assert model.sources == {"/w/b.py": "b"}


async def test_a_task_feeds_the_file_that_it_edits_until_it_is_over(sample: Path, state: Path) -> None:
    before, after = asyncio.Event(), asyncio.Event()
    edit = call("edit_file", path="shop/report.py", search="if name == None:", replace="if name is None:")
    model = ScriptedModel([before, edit, after])
    async with open_harness(state, sample, model) as harness:
        harness.workspace.open(sample / "README.md", "typed\n", 1, EDITOR)
        task = await harness.send("cleanup", "shop/report.py")
        await model.waiting.wait()
        await settle()
        assert "if name == None:" in model.sources[f"{task.id}:shop/report.py"]
        before.set()
        while "if name is None:" not in model.sources[f"{task.id}:shop/report.py"]:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert model.sources[str(sample / "README.md")] == "typed\n"
        await harness.manager.stop(task.id)
        await settle()
        assert list(model.sources) == [str(sample / "README.md")]

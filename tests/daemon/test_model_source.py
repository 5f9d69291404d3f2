"""The daemon's model over a real engine process (a tiny, random model), and tasks on it whose engine is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quadjet.daemon.config import Config
from quadjet.daemon.model_source import EngineSource
from quadjet.daemon.models import ModelStore
from quadjet.engine.chat import Message, ModelError, SamplingParams
from quadjet.engine.errors import EngineError
from quadjet.engine.local_model import LocalChatModel
from task_harness import Harness, make_repository, open_harness
from tiny_models import tiny_model

CODE = "import os\nimport sys\n\n\ndef f(x):\n    l = x\n    if x == None:\n        return 1\n    return l\n"
USER = [Message("user", "Tell me about pages.")]
SHORT = SamplingParams(max_tokens=3)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return tiny_model(tmp_path, arch="qwen2", seed=5)


@pytest.fixture
async def source(tmp_path: Path, model_file: Path) -> AsyncIterator[EngineSource]:
    default = Config()
    config = replace(default, engine=replace(default.engine, model=str(model_file), backend="reference", context=8192))
    made = EngineSource(config, ModelStore(tmp_path / "models"))
    yield made
    await made.close()


async def load(source: EngineSource) -> LocalChatModel:
    model = await source(lambda *_: None)
    assert isinstance(model, LocalChatModel)
    return model


async def kill_while_it_writes(model: LocalChatModel, times: int) -> None:
    """Each process once it has written 30 tokens."""
    for _ in range(times):
        written = 0.0
        while written < 30:
            with contextlib.suppress(EngineError):  # the last one, which was killed
                written = (await model.client.stats())["generated_tokens"]
        os.kill(model.client.pid, signal.SIGKILL)


async def said(harness: Harness, task_id: str) -> list[tuple[str, Any]]:
    events = await harness.manager.events(task_id)  # the journal: it is ahead of what was told
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return [(event.type, event.data) for event in events if event.type in ("text", "tool_call", "state", "hunks")]


async def test_a_task_whose_engine_is_killed_says_and_does_the_same(source: EngineSource, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repository", {"code.py": CODE})
    model = await load(source)
    async with open_harness(tmp_path / "state", root, model, max_turns=2) as harness:
        calm = await harness.run("cleanup", "code.py")
        os.kill(model.client.pid, signal.SIGKILL)
        disturbed = await harness.send("cleanup", "code.py")
        await kill_while_it_writes(model, 2)
        disturbed = await harness.finished(disturbed.id)
        assert await said(harness, disturbed.id) == await said(harness, calm.id)
        assert disturbed.card is not None
        assert calm.card is not None
        assert disturbed.card.completion_tokens == calm.card.completion_tokens
        progress = [event.data["message"] for event in harness.events if event.type == "progress"]
        assert "the engine died and is started again" in progress  # a kill between two replies is nobody's to hear of
        assert "the engine runs again" in progress
    assert source.status()["engine restarts"] >= 3


async def test_after_an_engine_gave_up_the_next_task_gets_another(source: EngineSource, model_file: Path) -> None:
    kept = model_file.with_suffix(".away")
    model = await load(source)
    assert await load(source) is model
    os.rename(model_file, kept)  # noqa: PTH104 - the other way is taken for blocking
    os.kill(model.client.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match=model_file.name):
        await model.complete(USER, params=SHORT)
    assert source.status()["loaded"] is False
    with pytest.raises(ModelError):
        await load(source)
    os.rename(kept, model_file)  # noqa: PTH104
    again = await load(source)
    assert again is not model
    assert (await again.complete(USER, params=SHORT)).usage.completion_tokens == 3
    assert source.status() == {
        "name": str(model_file),
        "loaded": True,
        "backend": "reference",
        "context": 8192,
        "engine restarts": 1,
    }

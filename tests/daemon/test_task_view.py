"""What a person in a pipe is told of a task."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from quadjet.daemon.task_view import TaskView


def state(name: str, message: str = "") -> dict[str, object]:
    return {"taskId": "a1", "type": "state", "data": {"state": name, "message": message}}


async def shown(view: TaskView, capsys: pytest.CaptureFixture[str]) -> str:
    """What comes when nothing happens for ten times the silence that is allowed."""
    capsys.readouterr()
    with suppress(TimeoutError):
        await asyncio.wait_for(view.remind(), 0.2)
    return capsys.readouterr().err


async def test_a_task_in_progress_breaks_a_long_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with TaskView({"a1": "cleanup a.py"}, silence_s=0.02) as view:
        view.show(state("running", "the model is working"))
        assert "cleanup a.py: still running" in await shown(view, capsys)
        view.show(state("proposed", "done"))
        assert await shown(view, capsys) == ""


def test_what_to_do_next_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    message = f"{'word ' * 30}resume it for another try"
    with TaskView({"a1": "cleanup a.py"}) as view:
        view.show(state("needs-you", message))
    assert capsys.readouterr().err.endswith(f"needs-you: {message}\n")

"""Both kinds at once on the sample project with a real small model: whatever it writes, the cards tell the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quadjet.agent_tasks.task import Card, Task, TaskState
from quadjet.engine.client import EngineSettings
from quadjet.engine.local_model import LocalChatModel
from task_harness import fingerprint, open_harness

pytestmark = pytest.mark.slow


def card_of(task: Task) -> Card:
    assert task.card is not None, task.message
    return task.card


async def test_two_tasks_at_once_end_in_honest_cards(sample: Path, state: Path, model_path: Callable[[str], Path]) -> None:
    before = fingerprint(sample)
    model = await LocalChatModel.load(EngineSettings(model_path("qwen2.5-coder-0.5b"), backend="reference"))
    try:
        async with open_harness(state, sample, model) as harness:
            sent = [await harness.send("cleanup", "shop/report.py"), await harness.send("triage", "tests/test_prices.py")]
            cleanup, triage = [await harness.until(task.id, *ENDS, timeout_s=500.0) for task in sent]
    finally:
        await model.close()
    assert fingerprint(sample) == before
    evidence = {item.name: item.passed for item in card_of(cleanup).evidence}
    assert (evidence["syntax"], evidence["tests unchanged"]) == (True, True)
    assert card_of(cleanup).findings["before"] == 9
    assert card_of(cleanup).findings["after"] <= 2
    assert evidence["linter clean"] is (card_of(cleanup).findings["after"] == 0)
    facts = {key: card_of(triage).findings[key] for key in ("test", "exception", "file", "line")}
    assert facts == {
        "test": "tests/test_prices.py::test_average_of_no_prices_is_zero",
        "exception": "ZeroDivisionError",
        "file": "shop/prices.py",
        "line": 20,
    }
    assert triage.proposal is not None
    assert card_of(triage).verified is bool(triage.proposal.hunks)
    assert card_of(triage).title == ("fixed: the failing test passes" if card_of(triage).verified else "cause found, no fix")


ENDS = [TaskState.PROPOSED.value, TaskState.NEEDS_YOU.value, TaskState.FAILED.value]

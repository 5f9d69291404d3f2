"""Both kinds at once on the sample project with a real small model: whatever it writes, the cards tell the truth."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quadjet.agent_tasks.edits import apply_hunks
from quadjet.agent_tasks.task import Card, Task, TaskState
from quadjet.engine.client import EngineSettings
from quadjet.engine.local_model import LocalChatModel
from task_harness import fingerprint, open_harness

pytestmark = pytest.mark.slow


def card_of(task: Task) -> Card:
    assert task.card is not None, task.message
    return task.card


def with_proposal(task: Task, target: Path) -> Path:
    """A copy of the task's folder in which every hunk was accepted."""
    assert task.proposal is not None
    shutil.copytree(task.spec.root, target)
    for change in task.proposal.changes:
        data = apply_hunks(change, [hunk.id for hunk in change.hunks])
        assert data is not None
        (target / change.path.relative_to(task.spec.root)).write_bytes(data)
    return target


def findings(folder: Path) -> list[dict[str, object]]:
    """What ruff says of the file that is to be cleaned up, with the rules that are used where a project names none."""
    rules = ["--isolated", "--no-cache", "--select", "E4,E7,E9,F,B"]
    command = [sys.executable, "-m", "ruff", "check", *rules, "--output-format", "json", "shop/report.py"]
    found: list[dict[str, object]] = json.loads(run(folder, command))
    return found


def failing_tests(folder: Path) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    return {line.split()[1] for line in run(folder, command).splitlines() if line.startswith(("FAILED ", "ERROR "))}


def run(folder: Path, command: list[str]) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


async def test_two_tasks_at_once_end_in_honest_cards(
    sample: Path, state: Path, tmp_path: Path, model_path: Callable[[str], Path]
) -> None:
    """What the cards claim is what ruff and pytest say of a copy that holds the proposal, run here and not by the tasks."""
    before = fingerprint(sample)
    model = await LocalChatModel.load(EngineSettings(model_path("qwen2.5-coder-0.5b"), backend="reference"))
    try:
        async with open_harness(state, sample, model) as harness:
            sent = [await harness.send("cleanup", "shop/report.py"), await harness.send("triage", "tests/test_prices.py")]
            cleanup, triage = [await harness.until(task.id, *ENDS, timeout_s=500.0) for task in sent]
    finally:
        await model.close()
    assert fingerprint(sample) == before
    broken = "tests/test_prices.py::test_average_of_no_prices_is_zero"
    assert failing_tests(sample) == {broken}
    evidence = {item.name: item.passed for item in card_of(cleanup).evidence}
    assert (evidence["syntax"], evidence["tests unchanged"]) == (True, True)
    code_that_never_runs = 1  # in the sample, found by the task beside what ruff finds
    assert card_of(cleanup).findings["before"] == len(findings(sample)) + code_that_never_runs == 9
    cleaned = with_proposal(cleanup, tmp_path / "cleaned")
    assert card_of(cleanup).findings["after"] == len(findings(cleaned)) <= 2
    assert evidence["linter clean"] is (not findings(cleaned))
    assert failing_tests(cleaned) == {broken}
    facts = {key: card_of(triage).findings[key] for key in ("test", "exception", "file", "line")}
    assert facts == {
        "test": broken,
        "exception": "ZeroDivisionError",
        "file": "shop/prices.py",
        "line": 20,
    }
    assert triage.proposal is not None
    assert card_of(triage).verified is bool(triage.proposal.hunks)
    assert failing_tests(with_proposal(triage, tmp_path / "fixed")) == (set() if triage.proposal.hunks else {broken})
    assert card_of(triage).title == ("fixed: the failing test passes" if card_of(triage).verified else "cause found, no fix")


ENDS = [TaskState.PROPOSED.value, TaskState.NEEDS_YOU.value, TaskState.FAILED.value]

"""Runs a Python project's tests in the sandbox and says which passed, which failed, and where."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import TaskError
from .text import decode
from .workbench import Workbench

_USAGE_ERROR = 4


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that has pytest. `readable`: folders it needs beside what a worktree shows."""

    python: Path
    readable: tuple[Path, ...]
    is_own: bool


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Failure:
    """`frames` are those inside the workspace, outermost first; none for an error that pytest reports without a traceback."""

    test: str
    exception: str
    message: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class TestRun:
    """`outcomes` by node id. `problem`: why there is no result, or empty."""

    __test__ = False  # the name is ours, not pytest's

    outcomes: Mapping[str, str]
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    command: str = ""

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "passed")

    @property
    def failed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "failed")


def find_interpreter(root: Path) -> Interpreter | None:
    """The workspace's own virtual environment if it has pytest, else the one this runs in if that has it."""
    for name in (".venv", "venv"):
        environment = root / name
        if (environment / "bin" / "python").exists() and any(environment.glob("lib/python*/site-packages/pytest")):
            return Interpreter(environment / "bin" / "python", (), is_own=False)
    if importlib.util.find_spec("pytest") is None:
        return None
    return Interpreter(Path(sys.executable), (Path(sys.prefix), Path(sys.base_prefix)), is_own=True)


async def run_tests(bench: Workbench, interpreter: Interpreter, selection: Sequence[str] = ()) -> TestRun:
    """Run the tests named by `selection` (paths or node ids; none: the project's own default)."""
    run = await _run(bench, interpreter, [*selection])
    if run.problem.startswith("pytest refused") and interpreter.is_own:
        # Options for plugins that only the project's own environment would have.
        run = await _run(bench, interpreter, ["-o", "addopts=", *selection])
    return run


async def _run(bench: Workbench, interpreter: Interpreter, arguments: Sequence[str]) -> TestRun:
    autoload = ["PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"] if interpreter.is_own else []
    probe = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    python = ["/usr/bin/env", *autoload, str(interpreter.python), "-c", probe]
    result, report = await bench.run_for_report(lambda name: [*python, name, *options, *arguments], readable=interpreter.readable)
    command = " ".join(["pytest", *arguments])
    if result.timed_out:
        return TestRun({}, problem=f"the tests did not end within {bench.command_timeout_s:.0f} s", command=command)
    if result.exit_code == _USAGE_ERROR:
        return TestRun({}, problem=f"pytest refused to start: {_last_line(result.output)}", command=command)
    if report is None:
        return TestRun({}, problem=f"pytest did not run: {_last_line(result.output)}", command=command)
    run = _read_report(report)
    if not run.outcomes:
        return TestRun({}, problem="there are no tests", command=command)
    failures = await asyncio.to_thread(_with_readable_frames, bench, run.failures)
    return replace(run, failures=failures, command=command)


def _read_report(text: bytes) -> TestRun:
    """What the probe wrote. The tests ran code of the workspace, so it is checked like any input."""
    try:
        data = json.loads(text)
        outcomes = {str(test): str(outcome) for test, outcome in data["outcomes"].items()}
        return TestRun(outcomes, tuple(_failure(item) for item in data["failures"]), float(data["seconds"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TaskError(f"the report of the tests is damaged: {error}") from error


def _failure(item: Mapping[str, Any]) -> Failure:
    frames = tuple(Frame(str(frame["file"]), int(frame["line"]), str(frame["function"])) for frame in item["frames"])
    return Failure(_node_id(item["test"]), str(item["exception"]), str(item["message"]), frames)


def _node_id(value: object) -> str:
    """ValueError for what could not be handed to pytest again."""
    if b"\0" in os.fsencode(str(value)):
        raise ValueError("a test has a NUL in its name")
    return str(value)


def _with_readable_frames(bench: Workbench, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Without frames in files that cannot be shown: generated code has none, and a report can name anything."""
    named = {frame.file for failure in failures for frame in failure.frames}
    readable = {path for path in named if _is_text(bench, path)}
    return tuple(
        replace(failure, frames=tuple(frame for frame in failure.frames if frame.file in readable)) for failure in failures
    )


def _is_text(bench: Workbench, path: str) -> bool:
    try:
        decode(bench.read(path))
    except TaskError:
        return False
    return True


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"

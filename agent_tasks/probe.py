"""Runs pytest and writes what happened to a JSON file. Executed as text by the workspace's interpreter, inside the sandbox.

It imports nothing of this project and keeps to old syntax: the interpreter and its pytest are the user's. Arguments: the file to
write, then pytest's own. The file holds {"outcomes": {node id: outcome}, "failures": [...], "seconds": float}.
"""

import json
import os
import sys
import time
import traceback
from typing import Any, Dict, List

import pytest

MAX_FAILURES = 20
MAX_MESSAGE = 600


class Recorder:
    def __init__(self) -> None:
        self.outcomes: Dict[str, str] = {}
        self.failures: Dict[str, Dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            # A test that passed and then failed in teardown has failed.
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            self.note(report.nodeid, {"exception": "", "message": report.longreprtext[-MAX_MESSAGE:], "frames": []})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.note(report.nodeid, {"exception": "", "message": report.longreprtext[-MAX_MESSAGE:], "frames": []})

    def pytest_exception_interact(self, node: pytest.Item, call: "pytest.CallInfo[Any]", report: pytest.TestReport) -> None:
        if call.excinfo is None:
            return
        error = call.excinfo.value
        if type(error).__name__ == "CollectError" and error.__cause__ is not None:
            error = error.__cause__
        self.failures[report.nodeid] = describe(error)

    def note(self, nodeid: str, failure: Dict[str, Any]) -> None:
        if nodeid not in self.failures and len(self.failures) < MAX_FAILURES:
            self.failures[nodeid] = failure


def describe(error: BaseException) -> Dict[str, Any]:
    """Frames are those of the workspace, outermost first."""
    frames = [(entry.filename, entry.lineno, entry.name) for entry in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 1, "<module>"))
    own = [(inside(path), line, name) for path, line, name in frames]
    return {
        "exception": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "frames": [{"file": path, "line": line, "function": name} for path, line, name in own if path],
    }


def inside(path: str) -> str:
    """The path relative to the workspace, or an empty text for what is not part of it."""
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(os.getcwd()))
    parts = relative.split(os.sep)
    foreign = parts[0] == os.pardir or "site-packages" in parts or parts[0] in (".venv", "venv") or path.startswith("<")
    return "" if foreign else relative


def main(report_path: str, arguments: List[str]) -> int:
    sys.dont_write_bytecode = True
    sys.path[:0] = [path for path in (os.getcwd(), os.path.join(os.getcwd(), "src")) if os.path.isdir(path)]
    recorder = Recorder()
    start = time.time()
    code = int(pytest.main(arguments, plugins=[recorder]))
    failures = [dict(failure, test=nodeid) for nodeid, failure in recorder.failures.items()]
    with open(report_path, "w") as file:
        json.dump({"outcomes": recorder.outcomes, "failures": failures, "seconds": time.time() - start}, file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

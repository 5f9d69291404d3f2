"""triage: the harness runs the tests, picks a failing one and finds where it breaks; a model corrects the code; the test decides.

Whatever the model does, the card carries what the harness saw. A fix is proposed only if the failing test passes with it and no
other test changes for the worse; else the worktree goes back to what it was.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ..engine.chat import Message, ToolCall
from . import prompts
from .agent import Ending
from .codec import from_json, to_json
from .errors import TaskError
from .kind import Plan, Verdict
from .python_code import (
    called_names,
    enclosing_function,
    find_function,
    function_names,
    functions_in_text,
    imported_files,
    is_function,
    is_test_file,
    prose_of,
)
from .python_lint import syntax_problem
from .python_tests import Failure, Frame, Interpreter, TestRun, find_interpreter, run_tests
from .task import Card, Evidence, LineRange
from .text import decode, neutralise
from .tools import (
    Toolbox,
    ToolResult,
    edit_file,
    finish,
    list_files,
    read_file,
    rewrite_function,
    run_command,
    search,
    text_argument,
)
from .workbench import Workbench

MAX_SHOWN_FUNCTIONS = 3
MAX_SHOWN_LINES = 60
MAX_CAUSE = 200


class Triage:
    async def prepare(self, bench: Workbench) -> Plan:
        if not await asyncio.to_thread(_has_python, bench):
            return Plan(
                {"outcome": f"{bench.target}: only failing Python tests can be looked into so far", "title": "not supported"}
            )
        interpreter = await asyncio.to_thread(find_interpreter, bench.spec.root)
        if bench.no_commands or interpreter is None:
            why = "no sandbox" if bench.no_commands else "pytest is not installed in the project's environment"
            return Plan(
                {
                    "outcome": f"The tests could not be run: {bench.no_commands or why}.",
                    "title": "not looked into",
                    "notes": [f"not verified: {why}"],
                }
            )
        bench.progress("running the tests", 0, 0)
        run = await run_tests(bench, interpreter, _selection(bench))
        failure = _choose(bench, run)
        if failure is None:
            return Plan(_nothing_to_mend(run))
        baseline = await _baseline(bench, interpreter, run)
        return await asyncio.to_thread(_plan, bench, run, baseline, failure)

    def toolbox(self, bench: Workbench, facts: dict[str, Any]) -> Toolbox:
        session = _Session(bench, from_json(Failure, facts["failure"]), facts["test_selection"])
        cause = text_argument("why the test fails, one sentence", MAX_CAUSE)
        paths = list(facts["base"])
        tools = [
            rewrite_function(bench, paths, session.after_edit, {"cause": cause}),
            edit_file(bench, paths, session.after_edit, {"cause": cause}),
            read_file(bench),
            search(bench),
            list_files(bench),
            run_command(bench),
            finish({"cause": cause}, "Give up without a fix."),
        ]
        return Toolbox(tools, partial(_read_text, bench, paths, session.failure))

    async def verify(self, bench: Workbench, facts: dict[str, Any], ending: Ending) -> Verdict:
        if "outcome" in facts:
            findings = {
                "test": "",
                "exception": "",
                "message": "",
                "file": "",
                "line": None,
                "cause": "",
                **_from_diagnostics(bench),
            }
            ran = Evidence("tests pass", facts.get("passed"), facts.get("command", ""), facts["outcome"])
            notes = tuple(facts.get("notes", ()))
            return Verdict(Card(facts["title"], facts.get("passed") is True, facts["outcome"], (ran,), findings, notes))
        base = {path: base64.b64decode(data) for path, data in facts["base"].items()}
        changed = tuple(path for path, data in base.items() if bench.read(path) != data)
        evidence, problem = await self._gate(bench, facts, changed)
        remarks = [ending.note] if ending.note else []
        feedback = ""
        if changed and problem:
            feedback = f"Your edits were taken back: {problem}."
            remarks.append(f"the model's edits were taken back: {problem}")
            await asyncio.to_thread(_restore, bench, base)
            changed = ()
        return Verdict(_card(facts, ending, evidence, changed, remarks), changed, feedback)

    async def _gate(self, bench: Workbench, facts: dict[str, Any], changed: tuple[str, ...]) -> tuple[tuple[Evidence, ...], str]:
        """Evidence, and why the edits do not pass (an empty text if they do)."""
        failure, baseline = from_json(Failure, facts["failure"]), from_json(TestRun, facts["baseline"])
        reproduced = Evidence("failure reproduced", True, facts["command"], f"{failure.test}: {_what(failure)}")
        if not changed:
            return (reproduced, Evidence("the test passes", False, "", "no fix was found")), "no fix was found"
        interpreter = await asyncio.to_thread(find_interpreter, bench.spec.root)
        if interpreter is None:
            raise TaskError("pytest is no longer there", "install it in the project's environment")
        bench.progress("running the tests with the fix", 0, 0)
        after = await run_tests(bench, interpreter, facts["baseline_selection"])
        passes = failure.test in after.passed
        detail = after.problem or (f"{failure.test} passes" if passes else f"{failure.test} still fails")
        worse = sorted((baseline.passed - after.passed) | (after.failed - baseline.failed))
        others = f"{worse[0]} is worse than before" if worse else f"{len(after.passed)} passed, {len(after.failed)} failed"
        evidence = (
            reproduced,
            Evidence("the test passes", passes, after.command, detail),
            Evidence("no other test is worse", not worse and not after.problem, after.command, after.problem or others),
        )
        return evidence, next((item.detail for item in evidence if not item.passed), "")


@dataclass
class _Session:
    """Runs the failing test after each edit of the model."""

    bench: Workbench
    failure: Failure
    selection: list[str]

    async def after_edit(self, path: str, before: bytes, problem: str) -> ToolResult:
        """The edit stays if it changes how the test fails; if it passes, the work is done."""
        if problem:
            return ToolResult(False, f"Not done: {problem}")
        if problem := await asyncio.to_thread(self._problem, path):
            return await self._undone(path, before, problem)
        interpreter = await asyncio.to_thread(find_interpreter, self.bench.spec.root)
        if interpreter is None:
            raise TaskError("pytest is no longer there")
        run = await run_tests(self.bench, interpreter, self.selection)
        if self.failure.test in run.passed:
            return ToolResult(True, "The test passes.", done=True)
        now = next((failure for failure in run.failures if failure.test == self.failure.test), None)
        if now is None:
            return await self._undone(path, before, run.problem or "the test was not run any more")
        if (now.exception, now.message) == (self.failure.exception, self.failure.message):
            return await self._undone(path, before, f"the test still fails in the same way: {_what(now)}")
        self.failure = now
        return ToolResult(False, f"Done, but the test still fails: {_what(now)} at {_where(now)}. Correct it further.")

    def _problem(self, path: str) -> str:
        if is_test_file(path):
            return "tests are not to be changed; correct the code that they test"
        syntax = syntax_problem(self.bench.read(path))
        return f"the file would not be valid Python, {syntax}" if syntax else ""

    async def _undone(self, path: str, before: bytes, problem: str) -> ToolResult:
        await asyncio.to_thread(self.bench.write, path, before)
        return ToolResult(False, f"Not done, the file is as before: {problem}. Try another change.")


def _read_text(bench: Workbench, paths: list[str], failure: Failure, text: str) -> ToolCall | None:
    """A corrected function in plain text as the call it stands for: of several one that changes, that nearest to the failure."""
    written = functions_in_text(text)
    places = [(path, name) for path in paths for name in function_names(bench.read(path)) if name in written]
    if not places:
        return None
    on_the_way = {(frame.file, frame.function): depth for depth, frame in enumerate(failure.frames, 1)}
    path, name = max(
        places, key=lambda place: (not is_function(bench.read(place[0]), place[1], written[place[1]]), on_the_way.get(place, 0))
    )
    cause = (prose_of(text) or _seen(failure))[:MAX_CAUSE]
    return ToolCall("rewrite_function", {"cause": cause, "path": path, "name": name, "code": written[name]})


def _plan(bench: Workbench, run: TestRun, baseline: TestRun, failure: Failure) -> Plan:
    """What the harness found out, and the question for the model if there is code it may change."""
    test_file = failure.test.partition("::")[0]
    own = [frame.file for frame in failure.frames] + imported_files(bench, test_file)
    candidates = [path for path in dict.fromkeys(own) if not is_test_file(path) and _is_editable(bench, path)]
    facts = {
        "failure": to_json(failure),
        "command": run.command,
        "baseline": to_json(baseline),
        "baseline_selection": [] if baseline is not run else _selection(bench),
        "test_selection": [failure.test],
        "base": to_json({path: bench.read(path) for path in candidates}),
        "failing": len(run.failed),
    }
    if not candidates:
        return Plan(facts)
    user = _question(bench, failure, candidates) + prompts.instruction(bench.spec.instruction)
    return Plan(facts, (Message("system", prompts.TRIAGE), Message("user", user)))


def _question(bench: Workbench, failure: Failure, candidates: list[str]) -> str:
    """The functions on the way to the failure, or those the test calls when it fails in itself; then how the test fails."""
    test_file = failure.test.partition("::")[0]
    places = [(frame.file, _around(bench.read(frame.file), frame.line)) for frame in failure.frames]
    in_test = [(path, lines) for path, lines in places if path == test_file][:1]
    in_code = [(path, lines) for path, lines in places if path in candidates][-MAX_SHOWN_FUNCTIONS:]
    if not in_code:
        at = [(frame.file, LineRange(frame.line, frame.line)) for frame in failure.frames if frame.file == test_file][:1]
        called = [name for path, lines in [*at, *in_test] for name in called_names(bench.read(path), lines)]
        names = list(dict.fromkeys(called))
        found = [(path, find_function(bench.read(path), name)) for name in names for path in candidates]
        in_code = [(path, lines) for path, lines in found if lines is not None][:MAX_SHOWN_FUNCTIONS]
    code = [
        _shown(bench, path, lines) for path, lines in dict.fromkeys(in_code or [(candidates[0], LineRange(1, MAX_SHOWN_LINES))])
    ]
    test = "\n".join(_shown(bench, path, lines, named=False) for path, lines in dict.fromkeys(in_test))
    return "\n".join([*code, prompts.failed_test(failure.test, _what(failure), _where(failure), _line(bench, failure), test)])


def _around(data: bytes, line: int) -> LineRange:
    return enclosing_function(data, line) or LineRange(line - 5, line + 5)


def _shown(bench: Workbench, path: str, lines: LineRange, named: bool = True) -> str:
    code = prompts.excerpt(decode(bench.read(path)).normalised.splitlines(), lines.first, lines.last)
    return f"{path}:\n{code}" if named else code


def _line(bench: Workbench, failure: Failure) -> str:
    """The line that fails, if it is in the workspace."""
    if not failure.frames:
        return ""
    lines = decode(bench.read(failure.frames[-1].file)).normalised.splitlines()
    number = failure.frames[-1].line
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _choose(bench: Workbench, run: TestRun) -> Failure | None:
    """The failure that the person pointed at by lines, diagnostics or file, else the first."""
    scope, target = bench.spec.range, bench.target

    def pointed_at(failure: Failure) -> int:
        here = [frame for frame in failure.frames if frame.file == target]
        in_scope = scope is not None and any(scope.first <= frame.line <= scope.last for frame in here)
        named = {(PurePosixPath(item.path).name, item.line) for item in bench.spec.diagnostics}
        in_diagnostics = any((PurePosixPath(frame.file).name, frame.line) in named for frame in failure.frames)
        return 4 * in_scope + 2 * in_diagnostics + bool(here)

    return max(run.failures, key=pointed_at, default=None)


def _selection(bench: Workbench) -> list[str]:
    """What to hand to pytest: a test file or a folder as it is; for other code, all tests of the project."""
    is_folder = (bench.tree / bench.target).is_dir()
    if bench.target == "." or not (is_folder or is_test_file(bench.target)):
        return []
    return [bench.target]


async def _baseline(bench: Workbench, interpreter: Interpreter, run: TestRun) -> TestRun:
    """All tests of the project, if they run within the time limit; else those that were asked for."""
    if not _selection(bench):
        return run
    bench.progress("running all tests once", 0, 0)
    everything = await run_tests(bench, interpreter)
    return run if everything.problem else everything


def _nothing_to_mend(run: TestRun) -> dict[str, Any]:
    if run.problem:
        return {"title": "not looked into", "outcome": f"The tests could not be run: {run.problem}.", "command": run.command}
    outcome = f"{len(run.passed)} tests pass, none fails."
    return {"title": "nothing fails", "outcome": outcome, "command": run.command, "passed": True}


def _card(
    facts: dict[str, Any], ending: Ending, evidence: tuple[Evidence, ...], changed: tuple[str, ...], notes: list[str]
) -> Card:
    failure = from_json(Failure, facts["failure"])
    where = failure.frames[-1] if failure.frames else Frame(failure.test.partition("::")[0], 0, "")
    said = neutralise(str(ending.arguments.get("cause", ""))).strip()
    if facts["failing"] > 1:
        notes = [*notes, f"{facts['failing'] - 1} more of the tests fail: send them again after this one"]
    findings = {
        "test": failure.test,
        "exception": failure.exception,
        "message": neutralise(failure.message),
        "file": where.file,
        "line": where.line,
        "cause": _seen(failure),
    }
    if said and said != findings["cause"]:
        findings["suspected"] = said  # by the model; nothing checks it
    return Card(
        title="fixed: the failing test passes" if changed else "cause found, no fix",
        verified=bool(changed) and all(item.passed is True for item in evidence),
        summary=f"{failure.test}: {_what(failure)} at {_where(failure)}",
        evidence=evidence,
        findings=findings,
        notes=tuple(neutralise(note) for note in notes),
    )


def _from_diagnostics(bench: Workbench) -> dict[str, Any]:
    """What the editor saw, for the case that no test could be run."""
    if not bench.spec.diagnostics:
        return {}
    first = bench.spec.diagnostics[0]
    return {"message": neutralise(first.message), "file": first.path, "line": first.line}


def _seen(failure: Failure) -> str:
    """The cause as far as the harness knows it."""
    function = failure.frames[-1].function if failure.frames else failure.test
    return f"{_what(failure)} is raised in {function}, {_where(failure)}"


def _what(failure: Failure) -> str:
    text = failure.message.strip().partition("\n")[0][:200]
    return neutralise(f"{failure.exception}: {text}" if failure.exception and text else failure.exception or text)


def _where(failure: Failure) -> str:
    return f"{failure.frames[-1].file}:{failure.frames[-1].line}" if failure.frames else failure.test.partition("::")[0]


def _has_python(bench: Workbench) -> bool:
    if (bench.tree / bench.target).is_dir():
        return any(path.endswith(".py") for path in bench.files(bench.target))
    bench.read(bench.target)
    return bench.target.endswith(".py")


def _is_editable(bench: Workbench, path: str) -> bool:
    try:
        bench.read(bench.canonical(path))
    except TaskError:
        return False
    return True


def _restore(bench: Workbench, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        bench.write(path, data)

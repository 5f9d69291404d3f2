"""cleanup: the linter's safe fixes first, then a model for what is left, one finding at a time.

Each edit of the model is checked when it is made and taken back if it does not help. The gate compares findings and tests with
those before; what does not pass is taken back to the linter's own fixes, and those too if they do not pass.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.chat import Message, ToolCall
from . import prompts, python_lint
from .agent import Ending
from .cleanup_gate import (
    check_worktree,
    current_scope,
    decoded_files,
    find_findings,
    in_range,
    new_findings,
    overlaps,
    project_tests,
    result_card,
    tests_harm,
)
from .codec import from_json, to_json
from .edits import apply_hunks, make_hunks
from .errors import TaskError
from .kind import Plan, Verdict
from .python_code import enclosing_function, function_names, function_ranges, functions_in_text, unhandled_none
from .python_lint import Finding, Linter, find_linter, syntax_problem
from .python_tests import TestRun
from .task import Card, LineRange
from .text import decode, line_opcodes, neutralise
from .tools import Toolbox, ToolResult, edit_file, finish, read_file, rewrite_function, text_argument
from .workbench import Workbench

MAX_FILES = 40
MAX_ATTEMPTS = 2
QUICK_TESTS_S = 10.0
"""Tests that take no longer are run after every edit, so that one bad edit does not cost the good ones."""


class Cleanup:
    async def prepare(self, bench: Workbench) -> Plan:
        paths, notes = await asyncio.to_thread(_python_files, bench)
        if not paths:
            return Plan({"unsupported": f"{bench.target}: only Python files in UTF-8 can be cleaned up so far", "notes": notes})
        linter = find_linter(bench.spec.root, bench.tree) if not bench.no_commands else None
        if linter is None:
            notes.append("not verified: no sandbox" if bench.no_commands else "not linted: ruff is not installed")
        bench.progress("running the tests as they are", 0, 0)
        tests = await project_tests(bench)
        bench.progress("running the linter", 0, 0)
        before = await find_findings(bench, linter, paths)
        scope = bench.spec.range if paths == [bench.target] else None
        wanted = sorted({finding.path for finding in before if in_range(finding, scope)})
        base = {path: bench.read(path) for path in (wanted or paths[:1])}
        formatted = [path for path in base if linter and await python_lint.is_formatted(bench, linter, path)]
        if linter and wanted:
            notes += await _fix(bench, linter, base, before=before, scope=scope, formatted=formatted)
        left = await find_findings(bench, linter, list(base))
        facts = {
            "base": to_json(base),
            "fixed": to_json({path: bench.read(path) for path in base}),
            "formatted": formatted,
            "before": to_json([finding for finding in before if finding.path in base]),
            "after_fix": len([finding for finding in left if in_range(finding, scope)]),
            "tests": to_json(tests),
            "notes": notes,
        }
        return Plan(facts, self._messages(bench, facts, left))

    def _messages(self, bench: Workbench, facts: dict[str, Any], left: list[Finding]) -> tuple[Message, ...]:
        scope = current_scope(bench, facts)
        finding = _easiest(bench, [finding for finding in left if in_range(finding, scope)])
        if finding is not None:
            return Message("system", prompts.CLEANUP), Message("user", _question(bench, finding, left))
        if bench.spec.instruction:
            path = next(iter(facts["base"]))
            lines = decode(bench.read(path)).normalised.splitlines()
            code = prompts.excerpt(lines, scope.first if scope else 1, scope.last if scope else len(lines))
            wish = prompts.instruction(bench.spec.instruction) + _diagnostics(bench, left)
            return Message("system", prompts.CLEANUP), Message("user", f"{path}:\n{code}{wish}")
        return ()

    def toolbox(self, bench: Workbench, facts: dict[str, Any]) -> Toolbox:
        paths = list(facts["base"])
        session = _Session(bench, facts, Counter())
        tools = [
            rewrite_function(bench, paths, session.after_edit),
            edit_file(bench, paths, session.after_edit),
            read_file(bench),
            finish({"summary": text_argument("what was done, one sentence", 200)}),
        ]
        return Toolbox(tools, session.read_text)

    async def verify(self, bench: Workbench, facts: dict[str, Any], ending: Ending) -> Verdict:
        if "unsupported" in facts:
            return Verdict(Card("not supported", verified=False, summary=facts["unsupported"], notes=tuple(facts["notes"])))
        base, fixed = decoded_files(facts["base"]), decoded_files(facts["fixed"])
        linter = find_linter(bench.spec.root, bench.tree) if not bench.no_commands else None
        for path in facts["formatted"]:
            if linter and bench.read(path) != fixed[path]:
                await python_lint.format_file(bench, linter, path)
        notes = [*facts["notes"], *([ending.note] if ending.note else [])]
        by_model = {path: bench.read(path) for path in base} != fixed
        check = await check_worktree(bench, linter, facts)
        feedback = ""
        if by_model and check.harm:
            feedback = f"Your edits were taken back: {check.harm}."
            notes.append(f"the model's edits were taken back: {check.harm}")
            await asyncio.to_thread(_restore, bench, fixed)
            by_model = False
            check = await check_worktree(bench, linter, facts)
        if check.harm:
            notes.append(f"the linter's fixes were taken back: {check.harm}")
            await asyncio.to_thread(_restore, bench, base)
            check = await check_worktree(bench, linter, facts)
        changed = tuple(path for path, data in base.items() if bench.read(path) != data)
        return Verdict(result_card(bench, facts, check, changed=changed, notes=notes, by_model=by_model), changed, feedback)


@dataclass
class _Session:
    """The model's way through the findings. `attempts` counts edits that did not help, by finding and its line."""

    bench: Workbench
    facts: dict[str, Any]
    attempts: Counter[tuple[str, ...]]
    current: tuple[str, ...] | None = None

    def read_text(self, text: str) -> ToolCall | None:
        """A function in plain text as the call it stands for."""
        written = functions_in_text(text)
        current = [self.current[0]] if self.current else []
        for path in dict.fromkeys([*current, *self.facts["base"]]):
            for name in function_names(self.bench.read(path)):
                if name in written:
                    return ToolCall("rewrite_function", {"path": path, "name": name, "code": written[name]})
        return None

    async def after_edit(self, path: str, before: bytes, problem: str) -> ToolResult:
        """Keep an edit only if it removes a finding, adds none and leaves the tests as they were."""
        linter = find_linter(self.bench.spec.root, self.bench.tree) if not self.bench.no_commands else None
        after = await asyncio.to_thread(self.bench.read, path)
        problem = problem or _outside(before, after, current_scope(self.bench, self.facts, before)) or syntax_problem(after)
        problem = problem or unhandled_none(before, after)
        if not problem:
            problem = await self._useless_or_harmful(linter, path, before, after)
        if problem:
            await asyncio.to_thread(self.bench.write, path, before)
        scope = current_scope(self.bench, self.facts)
        findings = await find_findings(self.bench, linter, list(self.facts["base"]))
        return self._next([finding for finding in findings if in_range(finding, scope)], problem)

    async def _useless_or_harmful(self, linter: Linter | None, path: str, before: bytes, after: bytes) -> str:
        now = await find_findings(self.bench, linter, [path])
        await asyncio.to_thread(self.bench.write, path, before)
        earlier = await find_findings(self.bench, linter, [path])
        await asyncio.to_thread(self.bench.write, path, after)
        if new := new_findings(earlier, now):
            return f"it adds a finding: {new[0]}"
        if len(now) >= len(earlier) and not self.bench.spec.instruction:
            return "the finding is still there"
        tests = from_json(TestRun, self.facts["tests"])
        if not tests.problem and tests.seconds <= QUICK_TESTS_S:
            return tests_harm(tests, await project_tests(self.bench))
        return ""

    def _next(self, findings: list[Finding], problem: str) -> ToolResult:
        """Once more the same finding, or the next one in a new chapter, or the end."""
        first = _easiest(self.bench, findings)
        before = self.current or (self._place(first) if first else None)
        if problem and before:
            self.attempts[before] += 1
        said = f"Not done, the file is as before: {problem}." if problem else "Done."
        finding = _easiest(self.bench, [finding for finding in findings if self.attempts[self._place(finding)] < MAX_ATTEMPTS])
        if finding is None:
            if self.bench.spec.instruction:
                return ToolResult(not problem, f"{said} Call finish when the user's wish is met.")
            return ToolResult(not problem, said, done=True)
        self.current = self._place(finding)
        if problem and self.current == before:
            return ToolResult(False, f"{said} Try once more. {finding.hint}")
        return ToolResult(not problem, said, next_question=_question(self.bench, finding, findings))

    def _place(self, finding: Finding) -> tuple[str, ...]:
        """One finding among equal ones, also after lines have moved: with the text of its line and of its function's first."""
        data = self.bench.read(finding.path)
        lines, function = decode(data).normalised.splitlines(), enclosing_function(data, finding.line)
        numbers = (finding.line, function.first) if function else (finding.line,)
        return *finding.key, *(lines[number - 1] for number in numbers if number <= len(lines))


def _easiest(bench: Workbench, findings: list[Finding]) -> Finding | None:
    """The first that is in a function, which small models rewrite more surely than they quote other lines; else the first."""
    ranges = {path: function_ranges(bench.read(path)) for path in dict.fromkeys(finding.path for finding in findings)}
    in_function = (item for item in findings if any(lines.first <= item.line <= lines.last for lines in ranges[item.path]))
    return next(in_function, findings[0] if findings else None)


def _question(bench: Workbench, finding: Finding, findings: list[Finding]) -> str:
    data = bench.read(finding.path)
    lines, function = decode(data).normalised.splitlines(), enclosing_function(data, finding.line)
    asked = prompts.finding_question(finding, lines, function)
    return asked + prompts.instruction(bench.spec.instruction) + _diagnostics(bench, findings)


async def _fix(
    bench: Workbench,
    linter: Linter,
    base: dict[str, bytes],
    *,
    before: list[Finding],
    scope: LineRange | None,
    formatted: list[str],
) -> list[str]:
    """Safe fixes and dead code, only hunks that touch the range. If they add findings they go without the rule that does it,
    or altogether; notes say so."""
    relevant = [finding for finding in before if finding.path in base]
    problem = ""
    for rule in ["", *sorted({finding.code for finding in relevant if finding.hint and finding.code != python_lint.UNREACHABLE})]:
        await _fix_once(bench, linter, base, scope=scope, formatted=formatted, without=rule)
        added = await _what_fixes_add(bench, linter, base, relevant)
        if not added:
            return [f"the linter's fixes of {rule} were left out: {problem}"] if rule else []
        problem = problem or added
        await asyncio.to_thread(_restore, bench, base)
    return [f"the linter's fixes were left out: {problem}"]


async def _what_fixes_add(bench: Workbench, linter: Linter, base: dict[str, bytes], before: list[Finding]) -> str:
    """Why the fixes in the worktree must not stay, or an empty text."""
    for path, data in base.items():
        if (syntax := syntax_problem(bench.read(path))) and not syntax_problem(data):
            return f"they break the syntax of {path}, {syntax}"
    new = new_findings(before, await python_lint.find(bench, linter, list(base)))
    return f"they add {new[0]}" if new else ""


async def _fix_once(
    bench: Workbench, linter: Linter, base: dict[str, bytes], *, scope: LineRange | None, formatted: list[str], without: str
) -> None:
    await python_lint.fix(bench, linter, list(base), without)
    if without != python_lint.UNUSED_VARIABLE:
        await python_lint.remove_dead_code(bench, linter, list(base))
    for path, data in base.items():
        if scope is not None:
            change = make_hunks(Path(path), data, bench.read(path))
            inside = [
                hunk.id for hunk in change.hunks if overlaps(hunk.old_start, hunk.old_start + max(hunk.old_lines - 1, 0), scope)
            ]
            bench.write(path, apply_hunks(change, inside) or b"")
        if path in formatted:
            await python_lint.format_file(bench, linter, path)


def _python_files(bench: Workbench) -> tuple[list[str], list[str]]:
    """The files asked for, and notes on what was left out."""
    is_folder = (bench.tree / bench.target).is_dir()
    if not is_folder:
        # Refuses what is missing, binary or too large before anything is run.
        text = decode(bench.read(bench.target), bench.target)
        num_lines, scope = len(text.normalised.splitlines()), bench.spec.range
        if scope and num_lines and scope.first > num_lines:
            raise TaskError(f"{bench.target} has {num_lines} lines, so there are none from {scope.first} on")
    paths = [path for path in (bench.files(bench.target) if is_folder else [bench.target]) if path.endswith((".py", ".pyi"))]
    reasons = {path: _reason_to_leave(bench, path) for path in paths}
    readable = [path for path in paths if not reasons[path]]
    notes = [f"left out: {path}, {reason}" for path, reason in reasons.items() if reason]
    if len(readable) > MAX_FILES:
        notes.append(f"{len(readable) - MAX_FILES} more files were left out: name a smaller folder")
    return readable[:MAX_FILES], notes


def _reason_to_leave(bench: Workbench, path: str) -> str:
    """Empty for a file that can be cleaned up. One that cannot must not keep the rest of a folder from it."""
    try:
        data = bench.read(path)
    except TaskError as error:
        return error.message
    return "" if _is_utf8(os.fsencode(path)) and _is_utf8(data) else "the linter reads UTF-8 only"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _outside(before: bytes, after: bytes, scope: LineRange | None) -> str:
    """Why an edit leaves the range, or an empty text."""
    if scope is None:
        return ""
    old, new = decode(before).normalised.splitlines(), decode(after).normalised.splitlines()
    regions = line_opcodes(old, new)
    if regions and (regions[0][0] + 1 < scope.first or regions[-1][1] > scope.last):
        return f"only lines {scope.first} to {scope.last} may be changed"
    return ""


def _diagnostics(bench: Workbench, left: list[Finding]) -> str:
    """What the editor saw that the linter does not say."""
    known = {finding.line for finding in left}
    seen = [item for item in bench.spec.diagnostics if Path(item.path).name == bench.spec.path.name and item.line not in known]
    return "".join(f"\nThe editor reports at line {item.line}: {neutralise(item.message)[:200]}" for item in seen[:5])


def _restore(bench: Workbench, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        if bench.read(path) != data:
            bench.write(path, data)

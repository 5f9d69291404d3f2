"""cleanup: the linter's safe fixes first, then a model for what is left, one finding at a time.

Each edit of the model is checked when it is made and taken back if it does not help. The gate compares findings and tests with
those before; what does not pass is taken back to the linter's own fixes, and those too if they do not pass.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.chat import Message, ToolCall
from . import prompts, python_lint
from .agent import Ending
from .codec import from_json, to_json
from .edits import apply_hunks, make_hunks
from .kind import Plan, Verdict
from .python_code import enclosing_function, function_names, functions_in_text
from .python_lint import Finding, Linter, find_linter, syntax_problem
from .python_tests import TestRun, find_interpreter, run_tests
from .task import Card, Evidence, LineRange
from .text import decode, line_opcodes, neutralise
from .tools import Toolbox, ToolResult, edit_file, finish, read_file, rewrite_function, text_argument
from .workbench import Workbench

MAX_FILES = 40
MAX_ATTEMPTS = 2
QUICK_TESTS_S = 10.0
"""Tests that take no longer are run after every edit, so that one bad edit does not cost the good ones."""
MAX_LEFT_SHOWN = 20


class Cleanup:
    async def prepare(self, bench: Workbench) -> Plan:
        paths, notes = await asyncio.to_thread(_python_files, bench)
        if not paths:
            return Plan({"unsupported": f"{bench.target}: only Python files in UTF-8 can be cleaned up so far", "notes": notes})
        linter = find_linter(bench.spec.root, bench.tree) if not bench.no_commands else None
        if linter is None:
            notes.append("not verified: no sandbox" if bench.no_commands else "not linted: ruff is not installed")
        bench.progress("running the tests as they are", 0, 0)
        tests = await _tests(bench)
        bench.progress("running the linter", 0, 0)
        before = await _find(bench, linter, paths)
        scope = bench.spec.range if paths == [bench.target] else None
        wanted = sorted({finding.path for finding in before if _in_range(finding, scope)})
        base = {path: bench.read(path) for path in (wanted or paths[:1])}
        formatted = [path for path in base if linter and await python_lint.is_formatted(bench, linter, path)]
        if linter and wanted:
            await _fix(bench, linter, base, before=before, scope=scope, formatted=formatted)
        left = await _find(bench, linter, list(base))
        facts = {
            "base": to_json(base),
            "fixed": to_json({path: bench.read(path) for path in base}),
            "formatted": formatted,
            "before": to_json([finding for finding in before if finding.path in base]),
            "after_fix": len([finding for finding in left if _in_range(finding, scope)]),
            "tests": to_json(tests),
            "notes": notes,
        }
        return Plan(facts, self._messages(bench, facts, left))

    def _messages(self, bench: Workbench, facts: dict[str, Any], left: list[Finding]) -> tuple[Message, ...]:
        scope = _scope(bench, facts)
        finding = next((finding for finding in left if _in_range(finding, scope)), None)
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
        base, fixed = _bytes(facts["base"]), _bytes(facts["fixed"])
        linter = find_linter(bench.spec.root, bench.tree) if not bench.no_commands else None
        for path in facts["formatted"]:
            if linter and bench.read(path) != fixed[path]:
                await python_lint.format_file(bench, linter, path)
        notes = [*facts["notes"], *([ending.note] if ending.note else [])]
        by_model = {path: bench.read(path) for path in base} != fixed
        check = await _check(bench, linter, facts)
        feedback = ""
        if by_model and check.harm:
            feedback = f"Your edits were taken back: {check.harm}."
            notes.append(f"the model's edits were taken back: {check.harm}")
            await asyncio.to_thread(_restore, bench, fixed)
            by_model = False
            check = await _check(bench, linter, facts)
        if check.harm:
            notes.append(f"the linter's fixes were taken back: {check.harm}")
            await asyncio.to_thread(_restore, bench, base)
            check = await _check(bench, linter, facts)
        changed = tuple(path for path, data in base.items() if bench.read(path) != data)
        return Verdict(_card(bench, facts, check, changed=changed, notes=notes, by_model=by_model), changed, feedback)


@dataclass
class _Session:
    """The model's way through the findings. `attempts` counts edits that did not help, by finding."""

    bench: Workbench
    facts: dict[str, Any]
    attempts: Counter[tuple[str, str, str]]
    current: tuple[str, str, str] | None = None

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
        problem = problem or _outside(before, after, _scope(self.bench, self.facts, before)) or syntax_problem(after)
        if not problem:
            problem = await self._useless_or_harmful(linter, path, before, after)
        if problem:
            await asyncio.to_thread(self.bench.write, path, before)
        scope = _scope(self.bench, self.facts)
        findings = await _find(self.bench, linter, list(self.facts["base"]))
        return self._next([finding for finding in findings if _in_range(finding, scope)], problem)

    async def _useless_or_harmful(self, linter: Linter | None, path: str, before: bytes, after: bytes) -> str:
        now = await _find(self.bench, linter, [path])
        await asyncio.to_thread(self.bench.write, path, before)
        earlier = await _find(self.bench, linter, [path])
        await asyncio.to_thread(self.bench.write, path, after)
        if new := _new_findings(earlier, now):
            return f"it adds a finding: {new[0]}"
        if len(now) >= len(earlier) and not self.bench.spec.instruction:
            return "the finding is still there"
        tests = from_json(TestRun, self.facts["tests"])
        if not tests.problem and tests.seconds <= QUICK_TESTS_S:
            return _tests_harm(tests, await _tests(self.bench))
        return ""

    def _next(self, findings: list[Finding], problem: str) -> ToolResult:
        """Once more the same finding, or the next one in a new chapter, or the end."""
        before = self.current or (findings[0].key if findings else None)
        if problem and before:
            self.attempts[before] += 1
        said = f"Not done, the file is as before: {problem}." if problem else "Done."
        finding = next((finding for finding in findings if self.attempts[finding.key] < MAX_ATTEMPTS), None)
        if finding is None:
            if self.bench.spec.instruction:
                return ToolResult(not problem, f"{said} Call finish when the user's wish is met.")
            return ToolResult(not problem, said, done=True)
        self.current = finding.key
        if problem and finding.key == before:
            return ToolResult(False, f"{said} Try once more. {finding.hint}")
        return ToolResult(not problem, said, next_question=_question(self.bench, finding, findings))


def _question(bench: Workbench, finding: Finding, findings: list[Finding]) -> str:
    data = bench.read(finding.path)
    lines, function = decode(data).normalised.splitlines(), enclosing_function(data, finding.line)
    asked = prompts.finding_question(finding, lines, function)
    return asked + prompts.instruction(bench.spec.instruction) + _diagnostics(bench, findings)


@dataclass(frozen=True, slots=True)
class _Check:
    """The worktree against what was before. `harm` is why it must not be proposed, or empty."""

    findings: list[Finding]
    tests: TestRun
    harm: str
    syntax: str
    new: list[Finding]


async def _check(bench: Workbench, linter: Linter | None, facts: dict[str, Any]) -> _Check:
    base = _bytes(facts["base"])
    baseline = from_json(TestRun, facts["tests"])
    before = [from_json(Finding, item) for item in facts["before"]]
    changed = [path for path, data in base.items() if bench.read(path) != data]
    syntax = next((f"{path}, {problem}" for path in changed if (problem := syntax_problem(bench.read(path)))), "")
    findings = await _find(bench, linter, list(base))
    new = _new_findings(before, findings)
    tests = baseline
    if changed and not syntax and not baseline.problem:
        bench.progress("running the tests", 0, 0)
        tests = await _tests(bench)
    harm = f"syntax error in {syntax}" if syntax else f"new finding {new[0]}" if new else _tests_harm(baseline, tests)
    return _Check(findings, tests, harm if changed else "", syntax, new)


def _card(
    bench: Workbench, facts: dict[str, Any], check: _Check, *, changed: tuple[str, ...], notes: list[str], by_model: bool
) -> Card:
    scope = _scope(bench, facts)
    asked = [
        finding for finding in (from_json(Finding, item) for item in facts["before"]) if _in_range(finding, bench.spec.range)
    ]
    left = [finding for finding in check.findings if _in_range(finding, scope)]
    linter = find_linter(bench.spec.root, bench.tree) if not bench.no_commands else None
    baseline = from_json(TestRun, facts["tests"])
    evidence = (
        Evidence("syntax", not check.syntax, "", check.syntax or "every changed file parses"),
        _lint_evidence(linter, facts, asked, left, check.new),
        _tests_evidence(baseline, check.tests, bool(changed)),
    )
    fixed_by_linter = len(asked) - facts["after_fix"] if changed else 0
    findings = {
        "before": len(asked),
        "after": len(left),
        "fixed_by_linter": fixed_by_linter,
        "fixed_by_model": facts["after_fix"] - len(left) if by_model else 0,
        "left": [neutralise(str(finding)) for finding in left[:MAX_LEFT_SHOWN]],
    }
    title = _title(len(asked), len(left), bool(changed))
    return Card(
        title=title,
        verified=all(item.passed is True for item in evidence),
        summary=f"{bench.target}: {fixed_by_linter} by the linter, {findings['fixed_by_model']} by the model, {len(left)} left",
        evidence=evidence,
        findings=findings,
        notes=tuple(neutralise(note) for note in notes),
    )


def _title(before: int, after: int, is_changed: bool) -> str:
    if not before:
        return "cleaned up as asked" if is_changed else "nothing to clean up"
    if not is_changed:
        return f"{before} findings, none mended"
    return f"{before} findings, all mended" if not after else f"{before - after} of {before} findings mended"


def _lint_evidence(
    linter: Linter | None, facts: dict[str, Any], asked: list[Finding], left: list[Finding], new: list[Finding]
) -> Evidence:
    command = "ruff check " + " ".join(facts["base"])
    if linter is None:
        return Evidence("linter clean", None, command, "the linter could not be run; only code that never runs was looked for")
    detail = f"{len(asked)} findings before, {len(left)} after, {len(new)} new ({linter.rules})"
    return Evidence("linter clean", not left and not new, command, detail)


def _tests_evidence(before: TestRun, after: TestRun, is_changed: bool) -> Evidence:
    if before.problem:
        return Evidence("tests unchanged", None, before.command, before.problem)
    if after.problem:
        return Evidence("tests unchanged", False, before.command, after.problem)
    counts = f"{len(after.passed)} passed, {len(after.failed)} failed"
    detail = f"{counts}, the same as before" if is_changed else f"{counts}; nothing was changed"
    return Evidence("tests unchanged", not _tests_harm(before, after), before.command, detail)


def _tests_harm(before: TestRun, after: TestRun) -> str:
    if before.problem:
        return ""
    if after.problem:
        return f"the tests do not run any more: {after.problem}"
    changed = sorted((before.passed ^ after.passed) | (before.failed ^ after.failed))
    return f"the result of {changed[0]} changed" if changed else ""


async def _tests(bench: Workbench) -> TestRun:
    if bench.no_commands:
        return TestRun({}, problem="no sandbox")
    interpreter = await asyncio.to_thread(find_interpreter, bench.spec.root)
    if interpreter is None:
        return TestRun({}, problem="pytest is not installed in the project's environment")
    return await run_tests(bench, interpreter)


async def _find(bench: Workbench, linter: Linter | None, paths: list[str]) -> list[Finding]:
    if linter is not None:
        return await python_lint.find(bench, linter, paths)
    return [finding for path in paths for finding in python_lint.unreachable(path, bench.read(path))]


async def _fix(
    bench: Workbench,
    linter: Linter,
    base: dict[str, bytes],
    *,
    before: list[Finding],
    scope: LineRange | None,
    formatted: list[str],
) -> None:
    """Safe fixes and dead code, only hunks that touch the range; all of them taken back if they add findings."""
    await python_lint.fix(bench, linter, list(base))
    await python_lint.remove_dead_code(bench, linter, list(base))
    for path, data in base.items():
        if scope is not None:
            change = make_hunks(Path(path), data, bench.read(path))
            inside = [
                hunk.id for hunk in change.hunks if _overlaps(hunk.old_start, hunk.old_start + max(hunk.old_lines - 1, 0), scope)
            ]
            bench.write(path, apply_hunks(change, inside) or b"")
        if path in formatted:
            await python_lint.format_file(bench, linter, path)
    relevant = [finding for finding in before if finding.path in base]
    broken = any(syntax_problem(bench.read(path)) and not syntax_problem(data) for path, data in base.items())
    if broken or _new_findings(relevant, await python_lint.find(bench, linter, list(base))):
        await asyncio.to_thread(_restore, bench, base)


def _new_findings(before: list[Finding], after: list[Finding]) -> list[Finding]:
    """Findings of `after` that `before` has not, or not as often. Lines are ignored: they move."""
    counts = Counter(finding.key for finding in before)
    new = []
    for finding in after:
        counts[finding.key] -= 1
        if counts[finding.key] < 0:
            new.append(finding)
    return new


def _python_files(bench: Workbench) -> tuple[list[str], list[str]]:
    """The files asked for, and notes on what was left out."""
    is_folder = (bench.tree / bench.target).is_dir()
    if not is_folder:
        decode(bench.read(bench.target), bench.target)  # refuses what is missing, binary or too large before anything is run
    paths = [path for path in (bench.files(bench.target) if is_folder else [bench.target]) if path.endswith((".py", ".pyi"))]
    readable = [path for path in paths if _is_utf8(bench.read(path))]
    notes = [f"left out, since the linter reads UTF-8 only: {path}" for path in paths if path not in readable]
    if len(readable) > MAX_FILES:
        notes.append(f"{len(readable) - MAX_FILES} more files were left out: name a smaller folder")
    return readable[:MAX_FILES], notes


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _scope(bench: Workbench, facts: dict[str, Any], data: bytes | None = None) -> LineRange | None:
    """The range asked for, grown or shrunk by the edits made in it so far, or up to the file's state `data`."""
    asked = bench.spec.range
    if asked is None:
        return None
    base = _bytes(facts["base"])[bench.target]
    return LineRange(asked.first, asked.last + _growth(base, bench.read(bench.target) if data is None else data))


def _in_range(finding: Finding, scope: LineRange | None) -> bool:
    return scope is None or _overlaps(finding.line, max(finding.line, finding.end_line), scope)


def _overlaps(first: int, last: int, scope: LineRange) -> bool:
    return first <= scope.last and last >= scope.first


def _outside(before: bytes, after: bytes, scope: LineRange | None) -> str:
    """Why an edit leaves the range, or an empty text."""
    if scope is None:
        return ""
    old, new = decode(before).normalised.splitlines(), decode(after).normalised.splitlines()
    regions = line_opcodes(old, new)
    if regions and (regions[0][0] + 1 < scope.first or regions[-1][1] > scope.last):
        return f"only lines {scope.first} to {scope.last} may be changed"
    return ""


def _growth(before: bytes, after: bytes) -> int:
    return len(decode(after).normalised.splitlines()) - len(decode(before).normalised.splitlines())


def _diagnostics(bench: Workbench, left: list[Finding]) -> str:
    """What the editor saw that the linter does not say."""
    known = {finding.line for finding in left}
    seen = [item for item in bench.spec.diagnostics if Path(item.path).name == bench.spec.path.name and item.line not in known]
    return "".join(f"\nThe editor reports at line {item.line}: {neutralise(item.message)[:200]}" for item in seen[:5])


def _restore(bench: Workbench, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        if bench.read(path) != data:
            bench.write(path, data)


def _bytes(files: dict[str, str]) -> dict[str, bytes]:
    return {path: base64.b64decode(data) for path, data in files.items()}

"""The gate of cleanup: findings and tests of the worktree against those before, and the card that tells the difference."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from dataclasses import dataclass
from typing import Any

from . import python_lint
from .codec import from_json
from .python_lint import UNREACHABLE, Finding, Linter, find_linter, syntax_problem
from .python_tests import TestRun, find_interpreter, run_tests
from .task import Card, Evidence, LineRange
from .text import decode, neutralise
from .workbench import Workbench

MAX_LEFT_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Check:
    """The worktree against what was before. `harm` is why it must not be proposed, or empty."""

    findings: list[Finding]
    tests: TestRun
    harm: str
    syntax: str
    new: list[Finding]


async def check_worktree(bench: Workbench, linter: Linter | None, facts: dict[str, Any]) -> Check:
    base = decoded_files(facts["base"])
    baseline = from_json(TestRun, facts["tests"])
    before = [from_json(Finding, item) for item in facts["before"]]
    changed = [path for path, data in base.items() if bench.read(path) != data]
    syntax = next((f"{path}, {problem}" for path in changed if (problem := syntax_problem(bench.read(path)))), "")
    findings = await find_findings(bench, linter, list(base))
    new = new_findings(before, findings)
    tests = baseline
    if changed and not syntax and not baseline.problem:
        bench.progress("running the tests", 0, 0)
        tests = await project_tests(bench)
    harm = f"syntax error in {syntax}" if syntax else f"new finding {new[0]}" if new else tests_harm(baseline, tests)
    return Check(findings, tests, harm if changed else "", syntax, new)


def result_card(
    bench: Workbench, facts: dict[str, Any], check: Check, *, changed: tuple[str, ...], notes: list[str], by_model: bool
) -> Card:
    scope = current_scope(bench, facts)
    asked = [finding for finding in (from_json(Finding, item) for item in facts["before"]) if in_range(finding, bench.spec.range)]
    left = [finding for finding in check.findings if in_range(finding, scope)]
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
    num_own = sum(finding.code == UNREACHABLE for finding in asked)
    own = f" ({num_own} of them code that never runs, which ruff does not report)" if num_own else ""
    detail = f"{len(asked)} findings before{own}, {len(left)} after, {len(new)} new ({linter.rules})"
    return Evidence("linter clean", not left and not new, command, detail)


def _tests_evidence(before: TestRun, after: TestRun, is_changed: bool) -> Evidence:
    if before.problem:
        return Evidence("tests unchanged", None, before.command, before.problem)
    if after.problem:
        return Evidence("tests unchanged", False, before.command, after.problem)
    counts = f"{len(after.passed)} passed, {len(after.failed)} failed"
    detail = f"{counts}, the same as before" if is_changed else f"{counts}; nothing was changed"
    return Evidence("tests unchanged", not tests_harm(before, after), before.command, detail)


def tests_harm(before: TestRun, after: TestRun) -> str:
    if before.problem:
        return ""
    if after.problem:
        return f"the tests do not run any more: {after.problem}"
    changed = sorted((before.passed ^ after.passed) | (before.failed ^ after.failed))
    return f"the result of {changed[0]} changed" if changed else ""


async def project_tests(bench: Workbench) -> TestRun:
    if bench.no_commands:
        return TestRun({}, problem="no sandbox")
    interpreter = await asyncio.to_thread(find_interpreter, bench.spec.root)
    if interpreter is None:
        return TestRun({}, problem="pytest is not installed in the project's environment")
    return await run_tests(bench, interpreter)


async def find_findings(bench: Workbench, linter: Linter | None, paths: list[str]) -> list[Finding]:
    if linter is not None:
        return await python_lint.find(bench, linter, paths)
    return [finding for path in paths for finding in python_lint.unreachable(path, bench.read(path))]


def new_findings(before: list[Finding], after: list[Finding]) -> list[Finding]:
    """Findings of `after` that `before` has not, or not as often. Lines are ignored: they move."""
    counts = Counter(finding.key for finding in before)
    new = []
    for finding in after:
        counts[finding.key] -= 1
        if counts[finding.key] < 0:
            new.append(finding)
    return new


def current_scope(bench: Workbench, facts: dict[str, Any], data: bytes | None = None) -> LineRange | None:
    """The range asked for, grown or shrunk by the edits made in it so far, or up to the file's state `data`."""
    asked = bench.spec.range
    if asked is None:
        return None
    base = decoded_files(facts["base"])[bench.target]
    return LineRange(asked.first, asked.last + _growth(base, bench.read(bench.target) if data is None else data))


def in_range(finding: Finding, scope: LineRange | None) -> bool:
    return scope is None or overlaps(finding.line, max(finding.line, finding.end_line), scope)


def overlaps(first: int, last: int, scope: LineRange) -> bool:
    return first <= scope.last and last >= scope.first


def _growth(before: bytes, after: bytes) -> int:
    return len(decode(after).normalised.splitlines()) - len(decode(before).normalised.splitlines())


def decoded_files(files: dict[str, str]) -> dict[str, bytes]:
    return {path: base64.b64decode(data) for path, data in files.items()}

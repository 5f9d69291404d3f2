"""Findings in Python files: ruff's, by the project's own rules if it has any, and code that can never run."""

from __future__ import annotations

import ast
import configparser
import itertools
import json
import re
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TaskError
from .sandbox import CommandResult
from .text import TextError, decode, split_lines
from .workbench import Workbench

DEFAULT_RULES = "E4,E7,E9,F,B"
UNREACHABLE = "unreachable"
UNUSED_VARIABLE = "F841"
SYNTAX = "syntax"
_FLAKE8_FILES = (".flake8", "setup.cfg", "tox.ini")
_SHARED_CODE = re.compile(r"[EWFB]\d{0,3}$")
_MEASURE = re.compile(r"\(\d+ > \d+\)")
_JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Finding:
    """`line` counts from 1. `hint` is how the linter would mend it, or empty."""

    path: str
    line: int
    code: str
    message: str
    hint: str = ""
    end_line: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """The same finding after lines have moved, and after a line that is too long has become less so."""
        return self.path, self.code, _MEASURE.sub("", self.message)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.message}"


@dataclass(frozen=True, slots=True)
class Linter:
    """How ruff is called. No `options`: the project has ruff rules of its own. `readable`: what it needs beside the worktree."""

    ruff: Path
    options: tuple[str, ...]
    readable: tuple[Path, ...]
    has_project_rules: bool

    @property
    def rules(self) -> str:
        return "the project's own rules" if self.has_project_rules else f"rules {DEFAULT_RULES}"


def find_linter(root: Path, tree: Path) -> Linter | None:
    """The workspace's own ruff, else the one installed beside this program. None if there is none."""
    scripts = Path(sysconfig.get_path("scripts"))
    places = [(root / name / "bin" / "ruff", ()) for name in (".venv", "venv")] + [(scripts / "ruff", (scripts,))]
    ruff, readable = next(((path, needs) for path, needs in places if path.is_file()), (None, ()))
    if ruff is None:
        return None
    if _has_ruff_rules(tree):
        return Linter(ruff, (), readable, has_project_rules=True)
    flake8 = _flake8_options(tree)
    options = ("--isolated", *(flake8 or (f"--select={DEFAULT_RULES}",)))
    return Linter(ruff, options, readable, has_project_rules=bool(flake8))


def _has_ruff_rules(tree: Path) -> bool:
    if any((tree / name).is_file() for name in ("ruff.toml", ".ruff.toml")):
        return True
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    tools = project.get("tool")
    return isinstance(tools, dict) and "ruff" in tools


def _flake8_options(tree: Path) -> tuple[str, ...]:
    """What of a flake8 configuration means the same to ruff; empty if there is none."""
    for name in _FLAKE8_FILES:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string((tree / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, configparser.Error):
            continue
        if not parser.has_section("flake8"):
            continue
        section = parser["flake8"]
        options = [f"--select={_codes(section.get('select', '')) or 'E4,E7,E9,F'}"]
        ignored = [_codes(section.get(key, "")) for key in ("ignore", "extend-ignore")]
        options += [f"--ignore={codes}" for codes in ignored if codes]
        return tuple(options)
    return ()


def _codes(text: str) -> str:
    return ",".join(code for code in re.split(r"[\s,]+", text) if _SHARED_CODE.match(code))


async def find(bench: Workbench, linter: Linter, paths: Sequence[str]) -> list[Finding]:
    """All findings in `paths`, by file and line. Raises TaskError when ruff cannot run or refuses its configuration."""
    options = ["check", "--output-format=json", "--exit-zero"]
    result, report = await bench.run_for_report(
        lambda name: _argv(linter, [*options, f"--output-file={name}"], paths), readable=linter.readable
    )
    if result.exit_code != 0 or report is None:
        raise _failed(result)
    try:
        findings = [_finding(bench, item) for item in json.loads(report)]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"ruff gave no readable report: {error}", "run ruff check in the project by hand") from error
    findings += [finding for path in paths for finding in unreachable(path, bench.read(path))]
    return sorted(findings, key=lambda finding: (finding.path, finding.line, finding.code))


async def fix(bench: Workbench, linter: Linter, paths: Sequence[str], without: str = "") -> None:
    """Apply ruff's safe fixes in place, but not those of the rule `without`."""
    options = ["check", "--fix", "--exit-zero", "--quiet", *([f"--unfixable={without}"] if without else [])]
    result = await bench.run(_argv(linter, options, paths), readable=linter.readable)
    if result.exit_code != 0:
        raise _failed(result)


async def remove_dead_code(bench: Workbench, linter: Linter, paths: Sequence[str]) -> None:
    """Delete what can never run, and assignments to names that are never read (what they call is still called)."""
    isolated = ["--isolated"] if linter.options else []
    options = ["check", "--fix", "--unsafe-fixes", f"--select={UNUSED_VARIABLE}", "--exit-zero", "--quiet", "--no-cache"]
    has_unused = [path for path in paths if any(item.code == UNUSED_VARIABLE for item in await find(bench, linter, [path]))]
    if has_unused:
        result = await bench.run([str(linter.ruff), *options, *isolated, "--", *has_unused], readable=linter.readable)
        if result.exit_code != 0:
            raise _failed(result)
    for path in paths:
        data = bench.read(path)
        shorter = _without_lines(data, unreachable(path, data))
        if shorter != data and not syntax_problem(shorter):
            bench.write(path, shorter)


def _without_lines(data: bytes, findings: Sequence[Finding]) -> bytes:
    if not findings:
        return data
    file = decode(data)
    dead = {number for finding in findings if finding.hint for number in range(finding.line, finding.end_line + 1)}
    return file.encode("".join(line for number, line in enumerate(split_lines(file.text), 1) if number not in dead))


async def is_formatted(bench: Workbench, linter: Linter, path: str) -> bool:
    """Whether a project with ruff rules of its own keeps this file in ruff's format."""
    if linter.options:
        return False
    result = await bench.run(_argv(linter, ["format", "--check", "--quiet"], [path]), readable=linter.readable)
    return result.exit_code == 0


async def format_file(bench: Workbench, linter: Linter, path: str) -> None:
    await bench.run(_argv(linter, ["format", "--quiet"], [path]), readable=linter.readable)


def _argv(linter: Linter, arguments: Sequence[str], paths: Sequence[str]) -> list[str]:
    return [str(linter.ruff), *arguments, "--no-cache", *linter.options, "--", *paths]


def _failed(result: CommandResult) -> TaskError:
    return TaskError(f"ruff failed: {result.output.strip()[-300:]}", "run ruff check in the project by hand")


def _finding(bench: Workbench, item: dict[str, Any]) -> Finding:
    hint = str((item.get("fix") or {}).get("message") or "")
    code = item["code"] if item["code"] and item["code"] != "invalid-syntax" else SYNTAX
    path = bench.snapshot.relative(item["filename"])
    return Finding(path, int(item["location"]["row"]), code, str(item["message"]), hint, int(item["end_location"]["row"]))


def syntax_problem(data: bytes) -> str:
    """Why `data` is not valid Python, or an empty text."""
    try:
        ast.parse(data)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be parsed: {error}"
    return ""


def unreachable(path: str, data: bytes) -> list[Finding]:
    """Statements behind a return, raise, continue or break of the same block. None for a file that does not parse."""
    try:
        tree = ast.parse(data)
        lines = decode(data).normalised.splitlines()
    except (SyntaxError, ValueError, RecursionError, MemoryError, TextError):
        return []
    found = []
    for block in _blocks(tree):
        for statement, following in itertools.pairwise(block):
            # A yield behind the return still makes the function a generator: removing it would change what it is.
            if isinstance(statement, _JUMPS) and not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _nodes(block)):
                jump = type(statement).__name__.lower()
                text = lines[following.lineno - 1].strip()[:60]
                last = block[-1].end_lineno or following.lineno
                message = f"code after {jump} never runs: {text}"
                shares_line = following.lineno == statement.end_lineno
                found.append(Finding(path, following.lineno, UNREACHABLE, message, "" if shares_line else "Delete it", last))
                break
    return found


def _nodes(block: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in block:
        yield from ast.walk(statement)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block

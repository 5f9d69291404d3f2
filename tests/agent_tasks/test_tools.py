"""Tools over a real worktree: whatever a model sends, the answer is a short text and the user's files are as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakes import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quadjet.agent_tasks.sandbox import Sandbox
from quadjet.agent_tasks.task import TaskKind, TaskSpec
from quadjet.agent_tasks.tools import (
    MAX_ENTRIES,
    Toolbox,
    ToolResult,
    argument_problem,
    edit_file,
    finish,
    list_files,
    read_file,
    run_command,
    search,
    tail,
    text_argument,
)
from quadjet.agent_tasks.workbench import Workbench
from quadjet.agent_tasks.worktree import create_snapshot
from quadjet.engine.chat import ToolCall
from task_harness import fingerprint, make_repository

FILES = {
    "a.py": "one\ntwo\nthree\n",
    "long.txt": "".join(f"line {n}\n" for n in range(1, 301)),
    "wide.txt": "x" * 5000 + "\n",
    ".env": "SECRET=needle\n",
    "deep/b.py": "needle\n",
}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    root = make_repository(tmp_path / "project", FILES)
    before = fingerprint(root)
    snapshot = await create_snapshot(root, "t1", tmp_path / "worktrees", {})
    spec = TaskSpec(TaskKind.CLEANUP, root / "a.py", root)
    yield Workbench(spec, snapshot, Sandbox(), "", 20.0, lambda message, done, total: None)
    assert fingerprint(root) == before


def toolbox(bench: Workbench) -> Toolbox:
    async def after(path: str, before: bytes, problem: str) -> ToolResult:
        return ToolResult(not problem, problem or f"edited {path}, which had {len(before)} bytes")

    tools = [list_files(bench), search(bench), read_file(bench), edit_file(bench, [], after), run_command(bench)]
    return Toolbox([*tools, finish({"summary": text_argument("", 20)})])


async def ask(bench: Workbench, name: str, **arguments: Any) -> ToolResult:
    return await toolbox(bench).call(call(name, **arguments))


async def test_list_shows_what_a_task_may_read(bench: Workbench) -> None:
    result = await ask(bench, "list_files")
    assert result.text.splitlines() == ["a.py", "deep/b.py", "long.txt", "wide.txt"]


async def test_list_says_how_much_it_leaves_out(bench: Workbench) -> None:
    for number in range(MAX_ENTRIES):
        (bench.tree / f"f{number}.txt").write_text("")
    assert (await ask(bench, "list_files")).text.endswith("[4 more files: name a folder]")
    assert (await ask(bench, "list_files", folder="deep")).text == "deep/b.py"


async def test_search_names_file_and_line_and_not_secrets(bench: Workbench) -> None:
    assert (await ask(bench, "search", text="needle")).text == "deep/b.py:1: needle"
    assert "no line contains" in (await ask(bench, "search", text="nothing like it")).text


async def test_search_passes_over_what_it_cannot_read(bench: Workbench) -> None:
    (bench.tree / "large.csv").write_text("needle,1\n" * 300_000)
    (bench.tree / "data.bin").write_bytes(b"needle\0")
    assert (await ask(bench, "search", text="needle")).text == "deep/b.py:1: needle"


async def test_read_gives_ranges_and_says_what_is_left(bench: Workbench) -> None:
    assert (await ask(bench, "read_file", path="a.py")).text == "one\ntwo\nthree"
    part = (await ask(bench, "read_file", path="long.txt", first=10, last=12)).text
    assert part == "line 10\nline 11\nline 12\n[lines 10 to 12 of 300]"
    assert (await ask(bench, "read_file", path="long.txt")).text.endswith("line 120\n[lines 1 to 120 of 300]")
    assert (await ask(bench, "read_file", path="wide.txt")).text.endswith("[4600 more characters]")
    assert (await ask(bench, "read_file", path="a.py", first=9)).text == "a.py has 3 lines."


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "/etc/passwd", ".env", "missing.py", "", "deep", "\x00", "\ud800", "x" * 300]
)
async def test_read_refuses_what_it_must_not_show(bench: Workbench, path: str) -> None:
    assert not (await ask(bench, "read_file", path=path)).ok


async def test_edit_replaces_one_place(bench: Workbench) -> None:
    assert (await ask(bench, "edit_file", path="a.py", search="two", replace="2")).ok
    assert (bench.tree / "a.py").read_text() == "one\n2\nthree\n"


@pytest.mark.parametrize(
    ("path", "search_text"), [("a.py", "four"), ("a.py", ""), (".git/config", "x"), (".vscode/settings.json", "x"), ("../x", "x")]
)
async def test_edit_refuses_and_changes_nothing(bench: Workbench, path: str, search_text: str) -> None:
    before = fingerprint(bench.tree)
    assert not (await ask(bench, "edit_file", path=path, search=search_text, replace="y")).ok
    assert fingerprint(bench.tree) == before


async def test_run_works_in_the_worktree_only(bench: Workbench) -> None:
    result = await ask(bench, "run_command", argv=["python3", "-c", "open('made.txt', 'w').write(open('a.py').read())"])
    assert result.text.startswith("exit code 0")
    assert (bench.tree / "made.txt").read_text() == FILES["a.py"]


async def test_run_refuses_what_policy_does_not_allow(bench: Workbench) -> None:
    assert "not allowed" in (await ask(bench, "run_command", argv=["curl", "http://example.org"])).text


def test_a_long_output_keeps_its_end() -> None:
    assert tail("a" * 10 + "end", 3) == "[10 earlier characters left out]\nend"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"summary": "x"}, ""),
        ({}, "summary missing"),
        ({"summary": 1}, "must be a text"),
        ({"summary": "x" * 21}, "longer than 20"),
        ({"summary": "x", "other": "y"}, "unknown argument"),
    ],
)
def test_arguments_are_checked_against_the_schema(bench: Workbench, arguments: dict[str, Any], problem: str) -> None:
    schema = finish({"summary": text_argument("", 20)}).spec.parameters
    assert argument_problem(schema, arguments).find(problem) >= 0
    assert bool(argument_problem(schema, arguments)) == bool(problem)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 400)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["a.py", "two"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_KEYS = st.sampled_from(["path", "search", "replace", "first", "last", "text", "folder", "argv", "summary", "x"])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["list_files", "search", "read_file", "edit_file", "finish", "none"]),
    arguments=st.dictionaries(_KEYS, _JSON),
)
async def test_no_call_is_an_error_of_ours(bench: Workbench, name: str, arguments: dict[str, Any]) -> None:
    result = await toolbox(bench).call(ToolCall(name, arguments))
    assert isinstance(result.text, str)
    assert len(result.text) < 20_000

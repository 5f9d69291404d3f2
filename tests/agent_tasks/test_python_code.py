"""Reading Python without running it."""

from __future__ import annotations

import pytest
from quadjet.agent_tasks.edits import apply_edit
from quadjet.agent_tasks.errors import TaskError
from quadjet.agent_tasks.python_code import (
    called_names,
    enclosing_function,
    find_function,
    function_edit,
    is_test_file,
    unhandled_none,
)
from quadjet.agent_tasks.python_lint import syntax_problem, unreachable
from quadjet.agent_tasks.task import LineRange

SOURCE = b"""class A:
    @staticmethod
    def f(x):
        def inner():
            return g(x)
        return inner()


def g(x):
    return x
"""


def rewritten(data: bytes, name: str, code: str) -> bytes:
    return apply_edit(data, *function_edit(data, name, code))


def test_the_innermost_function_around_a_line_is_found() -> None:
    assert enclosing_function(SOURCE, 5) == LineRange(4, 5)
    assert enclosing_function(SOURCE, 2) == LineRange(2, 6)
    assert enclosing_function(SOURCE, 1) is None
    assert enclosing_function(b"def f(:", 1) is None


def test_calls_and_definitions_are_found_by_name() -> None:
    assert called_names(SOURCE, LineRange(4, 6)) == ["inner", "g"]
    assert find_function(SOURCE, "g") == LineRange(9, 10)
    assert find_function(SOURCE, "h") is None


def test_a_function_is_replaced_at_its_indentation_and_keeps_its_decorators() -> None:
    text = rewritten(SOURCE, "f", "```python\ndef f(x):\n    y = x\n\n    return y\n```").decode()
    assert "    @staticmethod\n    def f(x):\n        y = x\n\n        return y\n\n\ndef g(x):" in text


def test_line_endings_are_kept() -> None:
    assert (
        rewritten(b"def g():\r\n    pass\r\nx = 1\r\n", "g", "def g():\n    return 1") == b"def g():\r\n    return 1\r\nx = 1\r\n"
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("h", "def h(): pass"),
        ("g", "def other(): pass"),
        ("g", "x = 1"),
        ("g", "def g(:"),
        ("g", "def g(): pass\nx = 1"),
        ("g", ""),
    ],
)
def test_what_is_not_that_function_is_refused(name: str, code: str) -> None:
    with pytest.raises(TaskError):
        function_edit(SOURCE, name, code)


def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(TaskError, match="2 functions"):
        function_edit(b"def f(): pass\ndef f(): pass\n", "f", "def f(): return 1")


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("test_a.py", True),
        ("a/b_test.py", True),
        ("tests/helpers.py", True),
        ("conftest.py", True),
        ("a/contest.py", False),
        ("latest.py", False),
    ],
)
def test_test_files_are_known_by_name(path: str, is_test: bool) -> None:
    assert is_test_file(path) is is_test


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    return 1\n    x = 2\n", [3]),
        ("while True:\n    break\n    x = 2\nelse:\n    raise E\n    y = 1\n", [3, 6]),
        ("def f():\n    return\n    yield\n", []),
        ("def f():\n    if x:\n        return 1\n    return 2\n", []),
        ("def f(:", []),
    ],
)
def test_code_that_never_runs_is_found(source: str, lines: list[int]) -> None:
    assert [finding.line for finding in unreachable("a.py", source.encode())] == lines


def test_hostile_source_is_a_problem_and_not_a_crash() -> None:
    assert syntax_problem(b"(" * 100_000)
    assert syntax_problem(b"x = " + b"-" * 100_000 + b"1")
    assert syntax_problem(b"\x00")
    assert syntax_problem(b"x = 1") == ""


@pytest.mark.parametrize(
    ("body", "is_handled"),
    [
        ("x.append(1)", False),
        ("x += [1]", False),
        ("return [len(y) for y in x]", False),
        ("x = [] if x is None else x", True),
        ("x = x or []", True),
        ("if not x:\n        return", True),
        ("x = []", True),
        ("pass", True),
    ],
)
def test_a_default_of_none_that_nothing_asks_for_is_seen(body: str, is_handled: bool) -> None:
    before, after = "def f(a, *, x=[]):\n    pass\n", f"def f(a, *, x=None):\n    {body}\n"
    assert (unhandled_none(before.encode(), after.encode()) == "") == is_handled
    assert unhandled_none(after.encode(), after.encode()) == ""

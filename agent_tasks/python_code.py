"""Finds code in a Python workspace without running it: functions by line, and the workspace files that a module imports."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from .errors import TaskError
from .task import LineRange
from .text import decode
from .workbench import Workbench

MAX_IMPORTED_FILES = 12
_FENCED = re.compile(r"^```[a-zA-Z]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_test_file(path: str) -> bool:
    """By pytest's own habit of names."""
    pure = PurePosixPath(path)
    return (
        pure.name == "conftest.py" or pure.name.startswith("test_") or pure.stem.endswith("_test") or "tests" in pure.parts[:-1]
    )


def enclosing_function(data: bytes, line: int) -> LineRange | None:
    """The innermost function around `line`, decorators included. None outside of any, or if the file does not parse."""
    best: LineRange | None = None
    for function in _functions(parse(data)):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        last = function.end_lineno or function.lineno
        if first <= line <= last and (best is None or last - first <= best.last - best.first):
            best = LineRange(first, last)
    return best


def function_names(data: bytes) -> list[str]:
    return [function.name for function in _functions(parse(data))]


def function_ranges(data: bytes) -> list[LineRange]:
    """The lines of each function, from its def on."""
    return [LineRange(function.lineno, function.end_lineno or function.lineno) for function in _functions(parse(data))]


def unhandled_none(before: bytes, after: bytes) -> str:
    """Why an edit that makes None a parameter's default is half done: nothing asks for it. Or an empty text.

    The usual half of mending a mutable default, and one that fails only when somebody leaves the argument out.
    """
    had_none = Counter((function.name, name) for function in _functions(parse(before)) for name in _none_defaults(function))
    for function in _functions(parse(after)):
        for name in _none_defaults(function):
            had_none[function.name, name] -= 1
            if had_none[function.name, name] < 0 and _is_used_unasked(function, name):
                return f"{name} is None when {function.name} is called without it, and nothing there handles that"
    return ""


def called_names(data: bytes, lines: LineRange) -> list[str]:
    """Names of what is called in `lines`, in order: the last part of a dotted name."""
    names: list[str] = []
    for node in ast.walk(parse(data)):
        if isinstance(node, ast.Call) and lines.first <= node.lineno <= lines.last:
            target = node.func
            name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
            if name and name not in names:
                names.append(name)
    return names


def find_function(data: bytes, name: str) -> LineRange | None:
    """The first function or method called `name`."""
    for function in _functions(parse(data)):
        if function.name == name:
            return LineRange(function.lineno, function.end_lineno or function.lineno)
    return None


def is_function(data: bytes, name: str, code: str) -> bool:
    """Whether `code`, from its def line on, is one of the functions called `name` as it stands."""
    lines = decode(data).normalised.split("\n")
    found = [function for function in _functions(parse(data)) if function.name == name]
    return any(textwrap.dedent("\n".join(lines[item.lineno - 1 : item.end_lineno])) == code.rstrip("\n") for item in found)


def function_edit(data: bytes, name: str, code: str) -> tuple[str, str]:
    """Search and replace texts that put `code` in the place of the function `name`, at its indentation; decorators stay.

    Raises TaskError if there is not exactly one such function, or `code` is not one function of that name.
    """
    places = [function for function in _functions(parse(data)) if function.name == name]
    if len(places) != 1:
        raise TaskError(f"the file has {len(places) or 'no'} functions called {name[:60]}, so it is not clear what to replace")
    new = textwrap.dedent(_without_fence(code)).strip("\n")
    body = parse(new.encode("utf-8", "replace")).body
    if len(body) != 1 or not isinstance(body[0], _Function) or body[0].name != name:
        raise TaskError(f"the code is not one valid Python function called {name[:60]}, from its def line to its end")
    lines = decode(data).normalised.split("\n")
    first, last = places[0].lineno, places[0].end_lineno or places[0].lineno
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    code_lines = new.split("\n")[body[0].lineno - 1 :]
    if code_lines == textwrap.dedent("\n".join(lines[first - 1 : last])).split("\n"):
        raise TaskError(f"this is {name[:60]} as it was, nothing is changed")
    code_lines = [indent + line if line.strip() else "" for line in code_lines]
    # The whole file is the search text: the text of a function may occur twice, its place does not.
    return "\n".join(lines), "\n".join([*lines[: first - 1], *code_lines, *lines[last:]])


def functions_in_text(text: str) -> dict[str, str]:
    """Functions and methods in the code blocks of an answer, by name; the last of a name counts. An open block is read too."""
    found: dict[str, str] = {}
    for block in _FENCED.findall(text):
        lines = textwrap.dedent(block).split("\n")
        for function in _functions(parse("\n".join(lines).encode("utf-8", "replace"))):
            code = lines[function.lineno - 1 : function.end_lineno]
            found[function.name] = textwrap.dedent("\n".join(code))
    return found


def prose_of(text: str) -> str:
    """The first sentence outside the code blocks."""
    words = " ".join(_FENCED.sub(" ", text).replace("```", " ").split())
    return re.split(r"(?<=[.!?])\s", words)[0]


def _without_fence(code: str) -> str:
    lines = code.strip("\n").split("\n")
    return "\n".join(lines[1:-1]) if len(lines) > 2 and lines[0].startswith("```") and lines[-1].startswith("```") else code


def imported_files(bench: Workbench, path: str) -> list[str]:
    """Workspace files that `path` imports, directly or through each other, nearest first; test files are left out."""
    files = set(bench.files("."))
    found: list[str] = []
    waiting = [path]
    while waiting and len(found) < MAX_IMPORTED_FILES:
        current = waiting.pop(0)
        try:
            tree = parse(bench.read(current))
        except TaskError:
            continue
        for module in _imported_modules(tree, current):
            for candidate in _module_files(module):
                if candidate in files and candidate not in (*found, path):
                    waiting.append(candidate)
                    if not is_test_file(candidate):
                        found.append(candidate)
    return found[:MAX_IMPORTED_FILES]


def parse(data: bytes) -> ast.Module:
    """An empty module for what does not parse."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _none_defaults(function: _Function) -> list[str]:
    """Names of parameters whose default is None."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += [(name, default) for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default]
    return [name.arg for name, default in pairs if isinstance(default, ast.Constant) and default.value is None]


def _is_used_unasked(function: _Function, name: str) -> bool:
    """Whether the body reads `name` and never asks whether it is None or false."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    read = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    read += [node.target for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)]
    if not any(_is_name(node, name) for node in read):
        return False
    return not any(_is_name(operand, name) for node in nodes for operand in _asked(node))


def _asked(node: ast.AST) -> Sequence[ast.expr]:
    """What `node` compares or takes as true or false."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.If() | ast.IfExp() | ast.While():
            return [node.test]
        case ast.Match():
            return [node.subject]
    return []


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _functions(tree: ast.AST) -> list[_Function]:
    return [node for node in ast.walk(tree) if isinstance(node, _Function)]


def _imported_modules(tree: ast.AST, path: str) -> list[tuple[str, ...]]:
    """Dotted names as tuples; `from a import b` may mean module a.b or a name in a, so it gives both."""
    package = PurePosixPath(path).parent.parts
    modules: list[tuple[str, ...]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = (*start, *(node.module.split(".") if node.module else ()))
            modules += [(*base, alias.name) for alias in node.names] + [base]
    return modules


def _module_files(module: Sequence[str]) -> list[str]:
    if not module:
        return []
    stem = "/".join(module)
    return [f"{stem}.py", f"{stem}/__init__.py", f"src/{stem}.py", f"src/{stem}/__init__.py"]

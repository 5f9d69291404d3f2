"""The tools a model may call, over one worktree. Whatever it sends, the answer is a short text, never an error of ours.

A kind picks its tools from the functions at the top. Results are kept short and say what they leave out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.chat import ToolCall, ToolSpec
from .edits import apply_edit
from .errors import TaskError
from .policy import Verdict, check_command
from .python_code import function_edit
from .text import decode
from .workbench import Workbench

MAX_LINES = 120
MAX_LINE_CHARS = 400
MAX_ENTRIES = 80
MAX_HITS = 25
MAX_OUTPUT_CHARS = 3000
MAX_SEARCHED_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told. `done`: the loop ends here.

    `next_question`, if any, opens a new chapter: the model is asked it afresh, without what was said before.
    """

    ok: bool
    text: str
    done: bool = False
    next_question: str = ""


Handler = Callable[[Mapping[str, Any]], Awaitable[ToolResult]]
AfterEdit = Callable[[str, bytes, str], Awaitable[ToolResult]]
"""Called after every edit with the relative path, the bytes before, and why the edit was not made (or an empty text).

What it returns is what the model is told.
"""


@dataclass(frozen=True, slots=True)
class Tool:
    spec: ToolSpec
    handle: Handler


class Toolbox:
    """The tools of one task. `read_text`, if given, finds a call in plain text: small models write code better than calls."""

    def __init__(self, tools: Sequence[Tool], read_text: Callable[[str], ToolCall | None] | None = None) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        self.specs = tuple(tool.spec for tool in tools)
        self.read_text = read_text

    async def call(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(False, f"There is no tool {call.name[:40]!r}. Tools: {', '.join(self._tools)}.")
        problem = argument_problem(tool.spec.parameters, call.arguments)
        if problem:
            return ToolResult(False, f"{call.name} was not run: {problem}")
        try:
            return await tool.handle(call.arguments)
        except TaskError as error:
            return ToolResult(False, error.message)
        except OSError as error:
            return ToolResult(False, f"{call.name} failed: {error.strerror or error}")


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with `arguments` by the part of JSON schema that the tools here use, or an empty text."""
    properties: Mapping[str, Any] = schema["properties"]
    missing = [name for name in schema["required"] if name not in arguments]
    if missing:
        return f"{', '.join(missing)} missing. It takes {', '.join(properties)}."
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name[:40]!r}. It takes {', '.join(properties)}."
        problem = _value_problem(properties[name], value)
        if problem:
            return f"{name} {problem}."
    return ""


def _value_problem(schema: Mapping[str, Any], value: object) -> str:
    if schema["type"] == "integer":
        return "" if isinstance(value, int) and not isinstance(value, bool) else "must be a whole number"
    if schema["type"] == "array":
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return "" if texts and 0 < len(value) <= schema["maxItems"] else f"must be a list of 1 to {schema['maxItems']} texts"  # type: ignore[arg-type]
    if not isinstance(value, str):
        return "must be a text"
    if len(value) > schema["maxLength"]:
        return f"is longer than {schema['maxLength']} characters"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(schema['enum'])}"
    return ""


def text_argument(description: str, max_length: int, enum: Sequence[str] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": description, "maxLength": max_length}
    return {**schema, "enum": list(enum)} if enum else schema


def make_spec(name: str, description: str, properties: Mapping[str, Any], optional: Sequence[str] = ()) -> ToolSpec:
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}
    return ToolSpec(name, description, parameters)


def list_files(bench: Workbench) -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        paths = await asyncio.to_thread(bench.files, arguments.get("folder", "."))
        shown = "\n".join(paths[:MAX_ENTRIES]) or "no files"
        left = len(paths) - MAX_ENTRIES
        return ToolResult(True, shown + (f"\n[{left} more files: name a folder]" if left > 0 else ""))

    spec = make_spec("list_files", "List the files of a folder.", {"folder": text_argument("relative path", 300)}, ["folder"])
    return Tool(spec, handle)


def search(bench: Workbench) -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(True, await asyncio.to_thread(_search, bench, arguments["text"]))

    return Tool(make_spec("search", "Find lines that contain a text.", {"text": text_argument("exact text", 120)}), handle)


def _search(bench: Workbench, text: str) -> str:
    hits: list[str] = []
    for path in bench.files("."):
        try:
            data = bench.read(path)
        except TaskError:  # larger than what tools read, or gone by now
            continue
        if len(data) > MAX_SEARCHED_BYTES or b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if text in line:
                hits.append(f"{path}:{number}: {line.strip()[:160]}")
                if len(hits) > MAX_HITS:
                    return "\n".join(hits[:MAX_HITS]) + "\n[more lines match: search for a longer text]"
    return "\n".join(hits) or f"no line contains {text[:60]!r}"


def read_file(bench: Workbench, default_path: str = "") -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        data = await asyncio.to_thread(bench.read, arguments["path"])
        bench.seen(arguments["path"], data)
        lines = decode(data).normalised.splitlines()
        first = max(1, arguments.get("first", 1))
        last = min(arguments.get("last", len(lines)), first + MAX_LINES - 1, len(lines))
        if first > len(lines):
            return ToolResult(False, f"{arguments['path']} has {len(lines)} lines.")
        shown = "\n".join(excerpt_line(line) for line in lines[first - 1 : last])
        whole = first == 1 and last == len(lines)
        return ToolResult(True, shown if whole else f"{shown}\n[lines {first} to {last} of {len(lines)}]")

    properties = {
        "path": text_argument("relative path", 300),
        "first": {"type": "integer", "description": "first line", "minimum": 1},
        "last": {"type": "integer", "description": "last line", "minimum": 1},
    }
    return Tool(make_spec("read_file", "Read lines of a file.", properties, ["first", "last"]), handle)


def excerpt_line(line: str) -> str:
    """One line for a prompt; a very long one is cut and says so."""
    left = len(line) - MAX_LINE_CHARS
    return f"{line[:MAX_LINE_CHARS]} [{left} more characters]" if left > 0 else line


def edit_file(bench: Workbench, paths: Sequence[str], after: AfterEdit, extra: Mapping[str, Any] | None = None) -> Tool:
    """Replace one exact piece of a file. `paths`, if any, are the only files it takes; `extra` are arguments asked for first."""

    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        return await _edit(bench, arguments["path"], after, lambda data: (arguments["search"], arguments["replace"]))

    properties = {
        **(extra or {}),
        "path": text_argument("file", 300, paths),
        "search": text_argument("lines to replace, copied exactly from the file", 900),
        "replace": text_argument("the lines to put there", 1200),
    }
    return Tool(make_spec("edit_file", "Replace lines of a file.", properties), handle)


def rewrite_function(bench: Workbench, paths: Sequence[str], after: AfterEdit, extra: Mapping[str, Any] | None = None) -> Tool:
    """Replace a whole Python function: what small models get right more often than quoting lines."""

    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        return await _edit(
            bench, arguments["path"], after, lambda data: function_edit(data, arguments["name"], arguments["code"])
        )

    properties = {
        **(extra or {}),
        "path": text_argument("file", 300, paths),
        "name": text_argument("function name", 100),
        "code": text_argument("the whole corrected function, from def on", 2000),
    }
    return Tool(make_spec("rewrite_function", "Replace a Python function.", properties), handle)


async def _edit(bench: Workbench, path: str, after: AfterEdit, edit: Callable[[bytes], tuple[str, str]]) -> ToolResult:
    path = bench.canonical(path)
    before = await asyncio.to_thread(bench.read, path)
    try:
        edited = apply_edit(before, *edit(before))
    except TaskError as error:
        return await after(path, before, error.message)
    await asyncio.to_thread(bench.write, path, edited)
    bench.seen(path, edited)
    return await after(path, before, "")


def run_command(bench: Workbench) -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        argv: list[str] = arguments["argv"]
        judged = check_command(argv)
        if judged.verdict is not Verdict.ALLOW:
            return ToolResult(False, f"This command is not allowed: {judged.reason}")
        result = await bench.run(argv)
        status = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        return ToolResult(result.exit_code == 0 and not result.timed_out, f"{status}\n{tail(result.output)}")

    argv = {
        "type": "array",
        "items": {"type": "string", "maxLength": 300},
        "maxItems": 20,
        "description": "program and arguments",
    }
    return Tool(make_spec("run_command", "Run a program, no shell.", {"argv": argv}), handle)


def tail(output: str, limit: int = MAX_OUTPUT_CHARS) -> str:
    """The end of an output, where programs put their verdict."""
    left = len(output) - limit
    return f"[{left} earlier characters left out]\n{output[-limit:]}" if left > 0 else output


def finish(properties: Mapping[str, Any], description: str = "End the task.") -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(True, "finished", done=True)

    return Tool(make_spec("finish", description, properties), handle)

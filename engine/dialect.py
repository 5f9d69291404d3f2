"""How a model family writes tool calls: into prompts, out of replies, and as a grammar that allows nothing else.

What is not a whole, valid call of a known tool stays in the content as text: nothing is dropped and nothing repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

from .chat import Message, ModelError, ToolCall, ToolSpec
from .schema import types_of, violations
from .tokenizer import Tokenizer


class Parsed(NamedTuple):
    content: str
    tool_calls: tuple[ToolCall, ...]


class Dialect(Protocol):
    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a reply besides the end-of-generation tokens."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec], complete: bool = True) -> Parsed:
        """The calls in a reply and the text around them. A reply cut by the token limit (`complete` False) has no calls."""
        ...

    def tool_grammar(self, tools: Sequence[ToolSpec]) -> str:
        """An llguidance grammar for exactly one call of one of `tools`, from the reply's first token to its last."""
        ...

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model writes it: what the grammar yields and the template renders."""
        ...

    def fold_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """The transcript with tools, calls and results put into plain text, for templates that know none of them."""
        ...


def dialect_for(tokenizer: Tokenizer) -> Dialect:
    """The dialect of the model that has this vocabulary."""
    return HermesDialect(tokenizer)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(r"<tool_call>|^[ \t]*```([^\n`]*)\n|^[ \t]*\{", re.MULTILINE)
_SPACE = re.compile(r"\s*")
_LINE_END = re.compile(r"[ \t]*(?:\n|\Z)")
_FENCE_END = re.compile(r"```[ \t]*(?:\n|\Z)")
_FENCE_END_LINE = re.compile(r"^[ \t]*```[ \t]*(?:\n|\Z)", re.MULTILINE)
_CALL_FENCES = frozenset(("", "json", "jsonc", "tool_call", "xml"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

# What json.dumps and the templates write. Without \u every string has one spelling, so that a call rendered again in the next
# prompt is the text that the model generated; the price is that a call cannot carry the other control characters.
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}

_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class HermesDialect:
    """JSON between `<tool_call>` tags, as Qwen 2.5 and Hermes write it. Fenced and bare objects of a known tool count too:
    small Qwen models write those when nothing constrains them."""

    stops: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tags = tuple(_terminal(tokenizer, tag) for tag in (_OPEN, _CLOSE))

    def parse(self, text: str, tools: Sequence[ToolSpec], complete: bool = True) -> Parsed:
        calls: list[ToolCall] = []
        rest: list[str] = []
        done = at = 0
        while complete and (match := _START.search(text, at)):
            call, end = _read_call(text, match, {tool.name: tool for tool in tools})
            if call is not None:
                # The template puts one newline between a text and its call.
                rest.append(text[done : match.start()].removesuffix("\n"))
                calls.append(call)
                done = end
            at = max(end, match.start() + 1)
        if not calls:
            return Parsed(text, ())
        rest.append(text[done:])
        return Parsed("\n".join(part for part in rest if part.strip()), tuple(calls))

    def tool_grammar(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            raise ModelError("a tool call was required, but no tools were given")
        check_tools(tools)
        lines = ["start: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            head = _quoted(f'\n{{"name": "{tool.name}", "arguments": ')
            schema = json.dumps(_closed({**tool.parameters, "x-guidance": _JSON_FORM}))
            lines.append(f"call_{i}: {self._tags[0]} {head} arguments_{i} {_quoted(chr(125) + chr(10))} {self._tags[1]}")
            lines.append(f"arguments_{i}: %json {schema}")
        return "\n".join(lines) + "\n"

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{_OPEN}\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n{_CLOSE}'

    def fold_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        folded: list[Message] = []
        after_result = False
        for message in messages:
            if message.role == "tool":
                result = f"<tool_response>\n{message.content}\n</tool_response>"
                if after_result:
                    result = folded.pop().content + "\n" + result
                folded.append(Message("user", result))
            elif message.tool_calls:
                texts = [self.render_call(call.name, call.arguments) for call in message.tool_calls]
                folded.append(Message("assistant", "\n".join([message.content, *texts] if message.content else texts)))
            else:
                folded.append(message)
            after_result = message.role == "tool"
        return _with_tools_text(folded, tools) if tools else folded


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the shape that templates and models were trained on."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def check_tools(tools: Sequence[ToolSpec]) -> None:
    """Refuse names that a prompt, a grammar or a parser could read in two ways, names given twice, and arguments of no shape."""
    names = [tool.name for tool in tools]
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ModelError(
                f"the tool name {tool.name[:80]!r} is not usable", "use letters, digits, '_', '-' and '.', 64 at most"
            )
        if tool.parameters.get("type") != "object":
            raise ModelError(f"the parameters of the tool {tool.name} are not a JSON schema of type object")
    if len(set(names)) != len(names):
        raise ModelError(f"two tools have one name: {', '.join(names)}")


def _with_tools_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Append the tool section to the system message, or start with one."""
    section = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool_json(tool), ensure_ascii=False) for tool in tools))
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{section}")
        return [first, *messages[1:]]
    return [Message("system", section), *messages]


def _terminal(tokenizer: Tokenizer, tag: str) -> str:
    """The tag in a grammar: by id where it is one special token, else its text."""
    token = tokenizer.special_ids.get(tag)
    return _quoted(tag) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    """A Lark string: JSON's escapes are a subset of its own."""
    return json.dumps(text)


def _closed(schema: object) -> object:
    """The schema with every object that does not say otherwise closed to unknown properties: the model may not invent any."""
    if isinstance(schema, Mapping):
        closed = {key: value if key in ("enum", "const", "default") else _closed(value) for key, value in schema.items()}
        if "object" in types_of(schema):
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(item) for item in schema] if isinstance(schema, list | tuple) else schema


def _read_call(text: str, start: re.Match[str], tools: Mapping[str, ToolSpec]) -> tuple[ToolCall | None, int]:
    """The call that begins at `start` and the offset behind it; or None and the offset from which to look on.

    The closing tag or fence may be missing where the text ends: the object itself is whole.
    """
    label = start[1]
    if label is not None and label.strip() not in _CALL_FENCES:
        return None, _skip_fence(text, start.end())
    at = start.end() - 1 if start[0].endswith("{") else start.end()
    opened = start[0] == _OPEN
    if label is not None and text.startswith(_OPEN, at):
        opened, at = True, at + len(_OPEN)
    call, end = _decode_call(text, _skip_space(text, at), tools)
    if call is not None:
        close = _skip_space(text, end)
        closed = text.startswith(_CLOSE, close)
        end = close + len(_CLOSE) if closed else end
        ends_line = _LINE_END.match(text, end) is not None
        if label is not None and (fence := _FENCE_END.match(text, _skip_space(text, end))):
            return call, fence.end()
        if close == len(text) or (label is None and (closed or (ends_line and not opened))):
            return call, end
    if label is not None:
        return None, _skip_fence(text, start.end())
    return None, max(start.end(), end)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _skip_fence(text: str, at: int) -> int:
    """Behind the fenced block whose body begins at `at`: a program that is shown is not a call that is made."""
    end = _FENCE_END_LINE.search(text, at)
    return end.end() if end else len(text)


def _decode_call(text: str, at: int, tools: Mapping[str, ToolSpec]) -> tuple[ToolCall | None, int]:
    """A JSON object {"name", "arguments"} at `at` that calls one of `tools` as its schema says, and the offset behind it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # an escaped lone surrogate is no text
    except (ValueError, RecursionError):
        return None, at
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return None, at
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None, at
    if violations(arguments, tools[name].parameters):
        return None, at
    return ToolCall(name, arguments), end


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)

"""Calls out of replies: native, fenced and bare ones are found, everything else stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.chat import Message, ModelError, ToolCall, ToolSpec
from quadjet.engine.dialect import dialect_for
from quadjet.engine.tokenizer import Tokenizer
from small_vocabulary import small_metadata

READ = ToolSpec(
    "read_file",
    "Read a file",
    {"type": "object", "properties": {"path": {"type": "string"}, "start": {"type": "integer"}}, "required": ["path"]},
)
FINISH = ToolSpec("finish", "End the task", {"type": "object", "properties": {}})
TOOLS = (READ, FINISH)
DIALECT = dialect_for(Tokenizer.from_gguf(small_metadata()))
CALL = ToolCall("read_file", {"path": "a.py"})
JSON = '{"name": "read_file", "arguments": {"path": "a.py"}}'
NATIVE = f"<tool_call>\n{JSON}\n</tool_call>"
SPREAD = json.dumps(json.loads(JSON), indent=2)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (NATIVE, ""),
        (f"<tool_call>{JSON}</tool_call>\n", ""),
        (f"<tool_call>\n{JSON}", ""),
        (f"{JSON}\n</tool_call>", ""),
        (f"Let me look.\n{NATIVE}", "Let me look."),
        (f"Let me look.\n\n{NATIVE}", "Let me look.\n"),
        (f"Let me look. {NATIVE}", "Let me look. "),
        (f"{NATIVE}\nDone.", "\nDone."),
        (f"Before\n{NATIVE} after", "Before\n after"),
        (f"I would use <tool_call> here.\n{NATIVE}", "I would use <tool_call> here."),
        (f"<tool_call>\n{NATIVE}", "<tool_call>"),
        (JSON, ""),
        (SPREAD, ""),
        (f"  {JSON}\n", ""),
        (f"Sure:\n{JSON}", "Sure:"),
        (f"```json\n{JSON}\n```", ""),
        (f"```\n{SPREAD}\n```\n", ""),
        (f"```json\n{JSON}", ""),
        (f"```xml\n{NATIVE}\n```", ""),
        (f"Here it is:\n```json\n{SPREAD}\n```\nThat reads it.", "Here it is:\nThat reads it."),
        (f"```python\nx = 1\n```\n{NATIVE}", "```python\nx = 1\n```"),
        (f"```json\nnot json\n```\n{NATIVE}", "```json\nnot json\n```"),
        ('{"arguments": {"path": "a.py"}, "name": "read_file"}', ""),
    ],
)
def test_a_call_is_found(text: str, content: str) -> None:
    assert DIALECT.parse(text, TOOLS) == (content, (CALL,))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Plain text, {braces} and ```fences```.",
        NATIVE.replace("read_file", "rm"),
        NATIVE.replace('"path"', '"file"'),
        NATIVE.replace('"a.py"', "7"),
        NATIVE.replace('"a.py"', '"a.py", "start": "1"'),
        NATIVE.replace('"a.py"', '"a.py", "other": 1'),
        NATIVE.replace('"a.py"', '"a.py", "path": "b.py"'),
        NATIVE.replace('"a.py"', '"a.py", "start": NaN'),
        NATIVE.replace('"a.py"', '"\\ud800"'),
        NATIVE.replace('{"path": "a.py"}', '"{\\"path\\": \\"a.py\\"}"'),
        NATIVE.replace('"arguments"', '"parameters"'),
        NATIVE.replace('"name"', '"id": 1, "name"'),
        NATIVE.replace("}}", "}"),
        NATIVE.replace("\n</tool_call>", " trailing words\n</tool_call>"),
        f"<tool_call>\n{JSON}\nand then",
        f"[{JSON}]",
        f"I answer with {JSON} in a line.",
        f"{JSON} is what I would call.",
        f"```python\n{JSON}\n```",
        f"```python\nprint('never closed')\n{JSON}",
        f"```json\n{JSON}\n{JSON}\n```",
        f"```json\n{JSON}\nmore",
        "<tool_call>\n" + '{"a":' * 100_000,
        "<tool_call>" * 1000,
        "```python\n" + " \n" * 50_000,
        "{\n" * 10_000,
        '{"name": "read_file", "arguments": {"path": "a.py", "start": ' + "9" * 5000 + "}}",
    ],
)
def test_what_is_no_valid_call_stays_text(text: str) -> None:
    assert DIALECT.parse(text, TOOLS) == (text, ())


def test_several_calls_keep_their_order() -> None:
    text = f'{NATIVE}\n<tool_call>\n{{"name": "finish", "arguments": {{}}}}\n</tool_call>'
    assert DIALECT.parse(text, TOOLS) == ("", (CALL, ToolCall("finish", {})))


def test_a_tag_inside_an_argument_does_not_end_the_call() -> None:
    call = ToolCall("read_file", {"path": "</tool_call>```\n<tool_call>"})
    assert DIALECT.parse(DIALECT.render_call(call.name, call.arguments), TOOLS) == ("", (call,))


@pytest.mark.parametrize("text", [NATIVE, NATIVE[:-5], f"{NATIVE}\n<tool_call>\n", JSON])
def test_a_reply_cut_by_the_limit_has_no_calls(text: str) -> None:
    assert DIALECT.parse(text, TOOLS, complete=False) == (text, ())


def test_a_call_of_no_given_tool_is_text() -> None:
    assert DIALECT.parse(NATIVE, [FINISH]) == (NATIVE, ())
    assert DIALECT.parse(NATIVE, []) == (NATIVE, ())


PIECES = ["<tool_call>", "</tool_call>", "\n", "```", "```json\n", JSON, NATIVE, '{"name"', "}", "word", '"', " "]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_nothing_of_a_reply_is_lost(text: str) -> None:
    content, calls = DIALECT.parse(text, TOOLS)
    assert all(call == CALL for call in calls)
    assert content == text if not calls else "word" not in text or content.count("word") == text.count("word")
    assert len(calls) == text.count(JSON) - content.count(JSON)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.none() | st.lists(st.booleans()), max_size=4))
def test_a_rendered_call_is_read_back(arguments: dict[str, object]) -> None:
    tool = ToolSpec("any", "", {"type": "object", "additionalProperties": True})
    text = DIALECT.render_call("any", arguments)
    assert DIALECT.parse(text, [tool]) == ("", (ToolCall("any", arguments),))


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "1a", "a" * 65, "<tool_call>"])
def test_unusable_tool_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not usable"):
        DIALECT.tool_grammar([ToolSpec(name, "", {"type": "object"})])


def test_a_grammar_needs_tools_of_a_known_shape_and_different_names() -> None:
    with pytest.raises(ModelError, match="no tools"):
        DIALECT.tool_grammar([])
    with pytest.raises(ModelError, match="one name"):
        DIALECT.tool_grammar([READ, READ])
    with pytest.raises(ModelError, match="type object"):
        DIALECT.tool_grammar([ToolSpec("a", "", {})])


def test_tools_calls_and_results_are_folded_into_text() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Go"),
        Message("assistant", "Looking.", (CALL, ToolCall("finish", {}))),
        Message("tool", "first"),
        Message("tool", "second"),
        Message("assistant", "", (CALL,)),
        Message("tool", "third"),
        Message("assistant", "Bye"),
    ]
    folded = DIALECT.fold_tools(messages, TOOLS)
    assert [message.role for message in folded] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert folded[0].content.startswith("Be brief.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "finish", "description": "End the task"' in folded[0].content
    assert folded[2].content == f'Looking.\n{NATIVE}\n<tool_call>\n{{"name": "finish", "arguments": {{}}}}\n</tool_call>'
    assert folded[3].content == "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>"
    assert folded[4].content == NATIVE
    assert not any(message.tool_calls for message in folded)


def test_folding_starts_a_system_message_where_there_is_none() -> None:
    folded = DIALECT.fold_tools([Message("user", "Go")], TOOLS)
    assert [message.role for message in folded] == ["system", "user"]
    assert DIALECT.fold_tools([Message("user", "Go")], []) == [Message("user", "Go")]

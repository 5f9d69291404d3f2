"""Required calls: the mask allows exactly one valid call in the form that a template renders; all else fails closed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.chat import ToolSpec
from quadjet.engine.dialect import dialect_for
from quadjet.engine.errors import EngineError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.grammar import GrammarCompiler, Matcher
from quadjet.engine.schema import violations
from quadjet.engine.tokenizer import Tokenizer
from small_vocabulary import small_metadata

TOOLS = (
    ToolSpec(
        "read_file",
        "",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 40},
                "start": {"type": "integer", "minimum": 1, "maximum": 999},
            },
            "required": ["path"],
        },
    ),
    ToolSpec(
        "run",
        "",
        {
            "type": "object",
            "properties": {
                "argv": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
                "mode": {"enum": ["fast", "slow"]},
                "where": {"type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"]},
            },
            "required": ["argv", "where"],
        },
    ),
    ToolSpec("finish", "", {"type": "object", "properties": {}}),
)
NATIVE = Tokenizer.from_gguf(small_metadata())
TEXT_TAGS = Tokenizer.from_gguf(small_metadata(user_defined=()))
COMPILERS = {tokenizer: GrammarCompiler(tokenizer) for tokenizer in (NATIVE, TEXT_TAGS)}
READ = '{"name": "read_file", "arguments": {"path": "a.py"}}'
ModelPath = Callable[[str], Path]


def matcher(tokenizer: Tokenizer, tools: tuple[ToolSpec, ...] = TOOLS) -> Matcher:
    return COMPILERS[tokenizer].compile(dialect_for(tokenizer).tool_grammar(tools))


def allowed(tokenizer: Tokenizer, at: Matcher) -> NDArray[np.intp]:
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    at.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def accepts(tokenizer: Tokenizer, text: str) -> bool:
    at = matcher(tokenizer)
    try:
        for token in tokenizer.encode(text, parse_special=True):
            at.consume(token)
    except EngineError:
        return False
    return at.is_done


def walk(tokenizer: Tokenizer, at: Matcher, rng: random.Random) -> list[int]:
    """A random reply that the masks allow; strings are ended often, so that it ends."""
    ids: list[int] = []
    while not at.is_done and len(ids) < 2000:
        options = allowed(tokenizer, at).tolist()
        quotes = [token for token in options if tokenizer.token_bytes(token)[:1] == b'"']
        ids.append(rng.choice(quotes if quotes and rng.random() < 0.3 else options))
        at.consume(ids[-1])
    return ids


@pytest.mark.parametrize("tokenizer", [NATIVE, TEXT_TAGS], ids=["special tags", "text tags"])
def test_whatever_the_masks_allow_is_one_valid_call_in_the_templates_form(tokenizer: Tokenizer) -> None:
    dialect, rng, names = dialect_for(tokenizer), random.Random(7), set()
    for _ in range(150):
        ids = walk(tokenizer, matcher(tokenizer), rng)
        text = tokenizer.decode(ids)
        content, (call,) = dialect.parse(text, TOOLS)
        assert content == ""
        assert dialect.render_call(call.name, call.arguments) == text
        assert not violations(call.arguments, next(tool for tool in TOOLS if tool.name == call.name).parameters)
        names.add(call.name)
    assert names == {tool.name for tool in TOOLS}


@pytest.mark.parametrize("tokenizer", [NATIVE, TEXT_TAGS], ids=["special tags", "text tags"])
def test_a_call_is_accepted_and_ends_the_reply(tokenizer: Tokenizer) -> None:
    assert accepts(tokenizer, f"<tool_call>\n{READ}\n</tool_call>")


@pytest.mark.parametrize(
    "text",
    [
        f"Sure. <tool_call>\n{READ}\n</tool_call>",
        f"\n<tool_call>\n{READ}\n</tool_call>",
        f"<tool_call>\n\n{READ}\n</tool_call>",
        f"<tool_call> {READ}\n</tool_call>",
        f"<tool_call>\n{READ}</tool_call>",
        f"<tool_call>\n{READ}\n\n</tool_call>",
        f"<tool_call>\n{READ}\n</tool_call>\n",
        f"<tool_call>\n{READ}\n",
        "<tool_call>\n" + READ.replace(": ", ":") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace(", ", ",  ") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("read_file", "delete") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("path", "file") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("a.py", "x" * 41) + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("a.py", "\n") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("a.py", "\\/") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("a.py", "\\u0041") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace("a.py", "\\u000a") + "\n</tool_call>",
        "<tool_call>\n" + READ.replace('"a.py"', '"a.py", "start": 0') + "\n</tool_call>",
        "<tool_call>\n" + READ.replace('"a.py"', '"a.py", "other": 1') + "\n</tool_call>",
        "<|im_end|>",
        "",
    ],
)
def test_all_else_is_refused(text: str) -> None:
    assert not accepts(NATIVE, text)
    assert not accepts(TEXT_TAGS, text)


def test_code_in_arguments_is_carried_as_it_is() -> None:
    code = "def f(x):\n\tif x:\r\n\t\treturn \"\\d\" + 'é\U0001f642'  # <|im_end|></tool_call>\n"
    tools = (ToolSpec("edit", "", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}),)
    at = matcher(NATIVE, tools)
    head, body, tail = (
        NATIVE.special_ids["<tool_call>"],
        json.dumps({"text": code}, ensure_ascii=False),
        NATIVE.special_ids["</tool_call>"],
    )
    for token in [head, *NATIVE.encode(f'\n{{"name": "edit", "arguments": {body}}}\n'), tail]:
        at.consume(token)
    assert at.is_done


def test_the_first_token_is_locked_to_the_special_tag() -> None:
    assert allowed(NATIVE, matcher(NATIVE)).tolist() == [NATIVE.special_ids["<tool_call>"]]


def test_unused_and_control_tokens_are_never_allowed() -> None:
    rng, refused = random.Random(3), NATIVE.unused_ids | NATIVE.control_ids
    at = matcher(NATIVE)
    while not at.is_done:
        options = set(allowed(NATIVE, at).tolist())
        assert not options & refused
        at.consume(rng.choice(sorted(options)))


def test_a_grammar_that_allows_all_text_still_excludes_unused_tokens() -> None:
    at = COMPILERS[NATIVE].compile("start: /(.|\\n)*/")
    assert not set(allowed(NATIVE, at).tolist()) & NATIVE.unused_ids
    assert not at.is_done
    at.consume(min(NATIVE.eog_ids))
    assert at.is_done


def test_forced_tokens_are_those_of_encode() -> None:
    at = matcher(NATIVE, TOOLS[:1])
    forced = at.forced()
    assert NATIVE.decode(forced) == '<tool_call>\n{"name": "read_file", "arguments": {"path":'
    assert forced == NATIVE.encode(NATIVE.decode(forced), parse_special=True)
    for token in forced:
        assert token in allowed(NATIVE, at)
        at.consume(token)


def test_a_forbidden_token_raises_and_leaves_no_way_on() -> None:
    at = matcher(NATIVE)
    with pytest.raises(EngineError, match="grammar"):
        at.consume(0)
    with pytest.raises(EngineError, match="grammar"):
        allowed(NATIVE, at)
    assert not at.is_done


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start: missing",
        "not a grammar {{{",
        'start: %json {"type": "nonsense"}',
        'start: %json {"type": "string", "pattern": "("}',
        "start: <[99999999]>",
        "start: <no_such_token>",
    ],
)
def test_a_grammar_that_does_not_compile_raises(grammar: str) -> None:
    with pytest.raises(EngineError, match="does not compile"):
        COMPILERS[NATIVE].compile(grammar)


def test_matchers_of_one_grammar_go_their_own_ways() -> None:
    first, second = matcher(NATIVE), matcher(NATIVE)
    first.consume(NATIVE.special_ids["<tool_call>"])
    assert allowed(NATIVE, second).tolist() == [NATIVE.special_ids["<tool_call>"]]


def test_matchers_may_be_used_in_different_threads() -> None:
    def run(seed: int) -> str:
        return NATIVE.decode(walk(NATIVE, matcher(NATIVE), random.Random(seed)))

    seeds = list(range(16))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, seeds)) == list(map(run, seeds))


@pytest.mark.parametrize("shape", [1, (1, 40)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask"):
        matcher(NATIVE).fill_mask(np.zeros(shape, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_vocabularies_yield_valid_calls(model_path: ModelPath, name: str) -> None:
    with GgufFile.open(model_path(name)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    dialect, rng, compiler = dialect_for(tokenizer), random.Random(11), GrammarCompiler(tokenizer)
    for _ in range(20):
        text = tokenizer.decode(walk(tokenizer, compiler.compile(dialect.tool_grammar(TOOLS)), rng))
        content, (call,) = dialect.parse(text, TOOLS)
        assert (content, dialect.render_call(call.name, call.arguments)) == ("", text)

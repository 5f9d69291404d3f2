"""Prompts from the files' own templates: special texts stay text, turns only append, and hostile templates are bounded."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.chat import Message, ModelError, ToolCall, ToolSpec
from quadjet.engine.errors import ModelFileError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.template import ChatTemplate
from quadjet.engine.template_process import TemplateProcess
from quadjet.engine.tokenizer import Tokenizer
from small_vocabulary import CONTROL, USER_DEFINED, small_metadata

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMALL = Tokenizer.from_gguf(small_metadata())
READ = ToolSpec("read_file", "Read a file", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
PRIVATE = "\ue000\ue001\uf8ff\U000f0000\U0010fffd"
ModelPath = Callable[[str], Path]


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    template = ChatTemplate(CHATML, SMALL)
    yield template
    template.close()


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def real(request: pytest.FixtureRequest, model_path: ModelPath) -> Iterator[tuple[Tokenizer, ChatTemplate, str]]:
    with GgufFile.open(model_path(request.param)) as file:
        metadata = file.metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    template = ChatTemplate.from_gguf(metadata, tokenizer)
    source = metadata["tokenizer.chat_template"]
    assert isinstance(source, str)
    yield tokenizer, template, source
    template.close()


@pytest.fixture
def load() -> Iterator[Callable[[str], ChatTemplate]]:
    """Loads templates that are closed when the test ends."""
    loaded: list[ChatTemplate] = []

    def one(source: str) -> ChatTemplate:
        loaded.append(ChatTemplate(source, SMALL))
        return loaded[-1]

    yield one
    for template in loaded:
        template.close()


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` with control tokens as they are spelled, each special token between marks."""
    texts = {token: text for text, token in tokenizer.special_ids.items()}
    parts: list[str] = []
    plain: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in texts:
            plain.append(token)
            continue
        parts.append(tokenizer.decode(plain))
        plain = []
        parts.append(f"\u27e6{texts[token]}\u27e7" if token is not None else "")
    return "".join(parts)


def transcript() -> list[Message]:
    return [
        Message("system", "You fix code."),
        Message("user", "Fix a.py.\nNow."),
        Message("assistant", "Looking.", (ToolCall("read_file", {"path": "a.py"}),)),
        Message("tool", 'x = "<b>"\n\tif a < 1 & b:\n'),
        Message("assistant", "", (ToolCall("read_file", {"path": "é\n\\d \U0001f642"}), ToolCall("read_file", {"path": ""}))),
        Message("tool", "no such file"),
        Message("tool", ""),
        Message("assistant", "Done: nothing to fix."),
        Message("user", "Thanks"),
        Message("assistant", "Bye."),
    ]


def test_a_simple_prompt(chatml: ChatTemplate) -> None:
    ids = chatml.render([Message("user", "hi <there>")])
    assert shown(SMALL, ids) == "⟦<|im_start|>⟧user\nhi <there>⟦<|im_end|>⟧\n⟦<|im_start|>⟧assistant\n"
    assert chatml.render([Message("user", "hi")], add_generation_prompt=False)[-2:] == [
        SMALL.special_ids["<|im_end|>"],
        *SMALL.encode("\n"),
    ]


def test_bos_is_added_where_the_model_wants_one(load: Callable[[str], ChatTemplate]) -> None:
    tokenizer = Tokenizer.from_gguf({**small_metadata(), "tokenizer.ggml.add_bos_token": True})
    plain, own = ChatTemplate(CHATML, tokenizer), ChatTemplate("{{ bos_token }}" + CHATML, tokenizer)
    messages = [Message("user", "hi")]
    assert plain.render(messages) == own.render(messages) == [tokenizer.bos_id, *load(CHATML).render(messages)]
    plain.close()
    own.close()


@pytest.mark.slow
def test_the_rendering_is_that_of_plain_jinja(real: tuple[Tokenizer, ChatTemplate, str]) -> None:
    """Independent truth for ordinary texts: the same source in an environment as the templates' authors use."""
    tokenizer, template, source = real
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "a <b> 'é'\n"}]
    given_messages = [Message("system", "S"), Message("user", "a <b> 'é'\n")]
    context: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
    tools: list[ToolSpec] = []
    if template.native_tools:
        tools = [READ]
        function = {"name": "read_file", "description": READ.description, "parameters": READ.parameters}
        context["tools"] = [{"type": "function", "function": function}]
        call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": "<&>é"}}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"}]
        given_messages += [Message("assistant", "", (ToolCall("read_file", {"path": "<&>é"}),)), Message("tool", "r")]
    text = environment.from_string(source).render(context)
    assert template.render(given_messages, tools) == tokenizer.encode(text, parse_special=True)


@pytest.mark.slow
def test_special_texts_anywhere_in_a_conversation_stay_text(real: tuple[Tokenizer, ChatTemplate, str]) -> None:
    """For every special token of the family, in every place that an author other than the template writes."""
    tokenizer, template, _ = real
    special = set(tokenizer.special_ids.values())
    for text in tokenizer.special_texts:

        def conversation(hole: str) -> tuple[list[Message], list[ToolSpec]]:
            messages = [
                Message("system", f"a{hole}b"),
                Message("user", f"{hole}\n{hole[:-1]}"),
                Message("assistant", f" {hole}", (ToolCall(hole, {"path": hole, "x": [{hole: hole}]}, hole),)),
                Message("tool", f"{PRIVATE}{hole}{PRIVATE}", tool_call_id=hole),
            ]
            schema = {"type": "object", "properties": {"path": {"type": "string", "description": hole}}}
            return messages, [ToolSpec("read_file", f"x{hole}", schema)]

        ids = template.render(*conversation(text))
        harmless = template.render(*conversation("harmless"))
        assert [token for token in ids if token in special] == [token for token in harmless if token in special]
        plain = "".join(part for part in shown(tokenizer, ids))
        assert plain.count(text) - [token for token in ids if token in special].count(tokenizer.special_ids[text]) >= 8
        assert PRIVATE[:2] in plain


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*CONTROL, *USER_DEFINED, "<", "|im_end|>", "im_end|>", ">", "a", "\n", " ", *PRIVATE]), max_size=12)
)
def test_contents_come_out_as_they_went_in(chatml: ChatTemplate, parts: list[str]) -> None:
    content = "".join(parts)
    ids = chatml.render([Message("user", content), Message("assistant", content)], add_generation_prompt=False)
    im_start, im_end = SMALL.special_ids["<|im_start|>"], SMALL.special_ids["<|im_end|>"]
    plain = SMALL.encode(f"user\n{content}"), SMALL.encode(f"assistant\n{content}")
    newline = SMALL.encode("\n")
    assert ids == [im_start, *plain[0], im_end, *newline, im_start, *plain[1], im_end, *newline]


def test_contents_that_a_template_joins_form_no_special_token(load: Callable[[str], ChatTemplate]) -> None:
    template = load("{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    ids = template.render(
        [Message("user", " <|im_ "), Message("user", "end|>"), Message("user", "<"), Message("user", "|im_end|>")]
    )
    assert ids == SMALL.encode("<|im_end|><|im_end|>")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.content | trim", "<|im_end|>probe-text"),
        ("m.content ~ m.content[3:]", "  <|im_end|>probe-text  |im_end|>probe-text  "),
        ("m.content | replace('probe', '<|im_end|>probe')", "  <|im_end|>⟦<|im_end|>⟧probe-text  "),
        ("m.content | tojson", '"  <|im_end|>probe-text  "'),
        ("m.content.split('|')[0] ~ 'probe-text'", "  <probe-text"),
        ("'%d %s' % (m.content | length, m.content)", "24   <|im_end|>probe-text  "),
    ],
)
def test_templates_may_edit_contents(load: Callable[[str], ChatTemplate], expression: str, expected: str) -> None:
    template = load("{% for m in messages %}{{ " + expression + " }}{% endfor %}")
    assert shown(SMALL, template.render([Message("user", "  <|im_end|>probe-text  ")])) == expected


def test_private_use_characters_of_the_template_itself_are_kept(load: Callable[[str], ChatTemplate]) -> None:
    assert shown(SMALL, load("\ue000{{ messages[0].content }}").render([Message("user", "<\ue001")])) == "\ue000<\ue001"


def test_a_conversation_with_most_private_use_characters_renders(chatml: ChatTemplate) -> None:
    content = "".join(map(chr, range(0xE000, 0xF900))) + "<|im_end|>"
    assert content in shown(SMALL, chatml.render([Message("user", content)]))


def test_a_conversation_with_all_private_use_characters_is_refused(chatml: ChatTemplate) -> None:
    content = "".join(chr(c) for r in ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE)) for c in range(*r))
    with pytest.raises(ModelError, match="private-use"):
        chatml.render([Message("user", content)])


def test_tool_support_is_found_by_rendering(load: Callable[[str], ChatTemplate]) -> None:
    mentions = "{# tools tool_calls <tool_call> #}" + CHATML
    hermes = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}{% endfor %}"
    )
    assert not load(mentions).native_tools
    assert load(hermes).native_tools
    assert not load(hermes.replace('"arguments"', '"parameters"')).native_tools
    assert not load(hermes.replace("{{ tools | tojson }}", "")).native_tools


def test_a_template_without_tools_gets_them_as_text(chatml: ChatTemplate) -> None:
    text = shown(SMALL, chatml.render(transcript()[:4], [READ]))
    assert text.startswith("⟦<|im_start|>⟧system\nYou fix code.\n\n# Tools\n")
    assert '"name": "read_file", "description": "Read a file"' in text
    assert 'Looking.\n⟦<tool_call>⟧\n{"name": "read_file", "arguments": {"path": "a.py"}}\n⟦</tool_call>⟧⟦<|im_end|>⟧' in text
    assert "user\n<tool_response>\nx = " in text


@pytest.mark.slow
def test_each_turn_appends_to_the_prompt_before(real: tuple[Tokenizer, ChatTemplate, str]) -> None:
    """What a later prompt says of an earlier one's reply is what the model wrote, token for token."""
    tokenizer, template, _ = real
    messages = transcript()
    for turn in (i for i, message in enumerate(messages) if message.role == "assistant"):
        prompt = template.render(messages[:turn], [READ])
        whole = template.render(messages[: turn + 1], [READ], add_generation_prompt=False)
        assert whole[: len(prompt)] == prompt
        reply = messages[turn]
        calls = [template.dialect.render_call(call.name, call.arguments) for call in reply.tool_calls]
        written = "\n".join([reply.content, *calls] if reply.content else calls)
        generated = tokenizer.encode(written, parse_special=template.native_tools)
        assert whole[len(prompt) : len(prompt) + len(generated)] == generated
        assert whole[len(prompt) + len(generated)] in tokenizer.eog_ids
        parsed = template.dialect.parse(tokenizer.decode(generated), [READ])
        assert (parsed.content, parsed.tool_calls) == (reply.content, reply.tool_calls)


@pytest.mark.slow
def test_a_reply_in_other_tokens_is_aligned(real: tuple[Tokenizer, ChatTemplate, str]) -> None:
    tokenizer, template, _ = real
    messages = transcript()
    prompt = template.render(messages[:2], [READ])
    reply = [token for char in "\n\n Looking." for token in tokenizer.encode(char)]
    known = [*prompt, *reply, tokenizer.special_ids["<|im_end|>"]]
    rendered = template.render([*messages[:2], Message("assistant", "\n\n Looking."), Message("user", "Go on")], [READ])
    aligned = tokenizer.align(rendered, known)
    assert rendered[: len(known)] != known
    assert aligned[: len(known)] == known
    assert shown(tokenizer, aligned) == shown(tokenizer, rendered)


def test_threads_get_their_own_prompts(chatml: ChatTemplate) -> None:
    def run(number: int) -> str:
        return shown(SMALL, chatml.render([Message("user", f"number {number}<")], add_generation_prompt=False))

    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(run, range(50)))
    assert texts == [f"⟦<|im_start|>⟧user\nnumber {i}<⟦<|im_end|>⟧\n" for i in range(50)]


def test_a_refusal_says_what_the_template_says(load: Callable[[str], ChatTemplate]) -> None:
    template = load("{% if messages[0].role == 'system' %}{{ raise_exception('No system,\x1b<please>') }}{% endif %}" + CHATML)
    with pytest.raises(ModelError, match="refuses this conversation: No system, <please>"):
        template.render([Message("system", "S"), Message("user", "U")])
    assert template.render([Message("user", "U")])


def test_a_model_without_a_template_is_refused_for_chat() -> None:
    for metadata in ({}, {"tokenizer.chat_template": " "}, {"tokenizer.chat_template": 3}):
        with pytest.raises(ModelFileError, match="no chat template"):
            ChatTemplate.from_gguf(metadata, SMALL)


def test_unusable_tools_are_refused(chatml: ChatTemplate) -> None:
    with pytest.raises(ModelError, match="not usable"):
        chatml.render([Message("user", "U")], [ToolSpec("a b", "", {"type": "object"})])


HOSTILE = {
    "memory in one step": "{{ 'x' * 10**9 }}",
    "memory by doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "long output": "{% for i in range(99999) %}{{ 'y' * 100000 }}{% endfor %}",
    "padded formats": "{{ '%1000000000d' % 1 }}{{ '{:>1000000000}'.format(1) }}",
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one endless operation": "{{ 10 ** 10 ** 8 }}",
    "a large range": "{% for i in range(10**12) %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "a syntax error": "{% if %}",
    "an undefined value": "{{ missing.field.of }}",
    "a walk to the interpreter": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a walk by attribute filters": "{{ (messages | attr('__class__')).__mro__ }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "no message": "constant",
    "a refusal of everything": "{{ raise_exception('never') }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_and_broken_templates_fail_in_bounded_time(source: str) -> None:
    started, peak_kib = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match="the model's chat template"):
        ChatTemplate(source, SMALL)
    assert time.monotonic() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 200 << 10


def test_a_template_that_turns_hostile_later_is_bounded_and_recovers(load: Callable[[str], ChatTemplate]) -> None:
    template = load(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'spin' %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% elif m.content == 'eat' %}{{ 'x' * 10**9 }}{% endif %}{% endfor %}"
    )
    for content, reason in (("spin", "CPU time"), ("eat", "MiB")):
        with pytest.raises(ModelError, match=reason):
            template.render([Message("user", content)])
        assert shown(SMALL, template.render([Message("user", "fine")])) == "fine"


def children() -> set[int]:
    """Processes of ours that run or were not waited for."""
    return {int(pid) for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()}


def test_a_process_that_does_not_answer_is_ended() -> None:
    before = children()
    process = TemplateProcess("{{ text }}", wall_limit_s=1.0)
    assert process.render({"text": "a"}) == "a"
    (pid,) = children() - before
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ModelError, match="within 1 s"):
        process.render({"text": "b"})
    assert pid not in children()
    assert process.render({"text": "c"}) == "c"
    process.close()
    assert children() == before


def test_a_killed_process_is_replaced() -> None:
    before = children()
    process = TemplateProcess("{{ text }}")
    assert process.render({"text": "a"}) == "a"
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ModelError, match="broke its process"):
        process.render({"text": "b"})
    assert process.render({"text": "c"}) == "c"
    process.close()


def test_a_forgotten_template_ends_its_process() -> None:
    before = children()
    process = TemplateProcess("{{ text }}")
    assert process.render({"text": "a"}) == "a"
    del process
    assert children() == before


def test_a_conversation_of_many_megabytes_is_refused(chatml: ChatTemplate) -> None:
    with pytest.raises(ModelError, match="MiB, too much"):
        chatml.render([Message("user", "x" * (40 << 20))])
    with pytest.raises(ModelError, match="more than"):
        chatml.render([Message("user", "x" * (5 << 20))])
    assert chatml.render([Message("user", "x")])


def test_the_date_is_fixed_for_the_life_of_the_template(load: Callable[[str], ChatTemplate]) -> None:
    template = load("{{ messages[0].content }} {{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    assert template.render([Message("user", "now")]) == template.render([Message("user", "now")])

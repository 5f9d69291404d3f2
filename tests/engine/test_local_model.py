"""Chats with a real engine process. The model is tiny and random: it says anything, which is what a parser must stand."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quadjet.engine.backend import PAGE_TOKENS
from quadjet.engine.channel import RemoveSource
from quadjet.engine.chat import (
    ChatModel,
    ContextOverflowError,
    FinishReason,
    Message,
    ModelError,
    SamplingParams,
    ToolSpec,
)
from quadjet.engine.client import EngineSettings
from quadjet.engine.errors import ModelFileError
from quadjet.engine.local_model import LocalChatModel, StopText
from tiny_models import tiny_model

USER = [Message("user", "Tell me about pages.")]
READ = ToolSpec(
    "read_file",
    "Read lines of a file.",
    {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 12}, "first": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["path", "first"],
        "additionalProperties": False,
    },
)
FINISH = ToolSpec("finish", "End the work.", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), arch="qwen2", seed=5)


@pytest.fixture
async def model(tiny_path: Path) -> AsyncIterator[LocalChatModel]:
    loaded = await LocalChatModel.load(EngineSettings(tiny_path, context=2048), name="tiny")
    yield loaded
    await loaded.close()


def params(seed: int = 1, max_tokens: int = 40, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, stop=stop)


async def test_it_is_a_chat_model(model: LocalChatModel) -> None:
    chat: ChatModel = model
    assert (chat.name, chat.context) == ("tiny", 2048)
    assert chat.count_tokens(USER) == (await chat.complete(USER, params=params())).usage.prompt_tokens
    assert chat.count_tokens(USER, [READ]) > chat.count_tokens(USER)


async def test_text_streams_and_adds_up(model: LocalChatModel) -> None:
    for seed in range(5):
        heard: list[str] = []
        reply = await model.complete(USER, params=params(seed), on_text=heard.append)
        assert "".join(heard) == reply.message.content
        assert all(heard)
        assert reply.message.role == "assistant"
        is_cut = reply.usage.completion_tokens == 40
        assert reply.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)


async def test_the_same_seed_says_the_same(model: LocalChatModel) -> None:
    once, again, other = [(await model.complete(USER, params=params(seed))).message for seed in (3, 3, 4)]
    assert once == again
    assert once != other


async def test_a_stop_string_ends_the_reply_and_is_never_shown(model: LocalChatModel) -> None:
    whole = (await model.complete(USER, params=params(2))).message.content
    for stop in (whole[10:12], whole[15:19], whole[20:21]):
        heard: list[str] = []
        reply = await model.complete(USER, params=params(2, stop=("never", stop)), on_text=heard.append)
        assert reply.message.content == whole[: whole.index(stop)] == "".join(heard)
        assert reply.finish_reason is FinishReason.STOP
        assert 0 < reply.usage.completion_tokens < 40
        assert (await model.client.stats())["running"] == 0


async def test_required_calls_always_parse_whatever_the_model_wants(model: LocalChatModel) -> None:
    async def call(seed: int) -> set[str]:
        heard: list[str] = []
        choice = params(seed, max_tokens=200)
        reply = await model.complete(USER, tools=[READ, FINISH], tool_choice="required", params=choice, on_text=heard.append)
        assert heard == []
        assert reply.finish_reason is FinishReason.TOOL_CALLS
        (only,) = reply.message.tool_calls
        if only.name == "read_file":
            assert isinstance(only.arguments["path"], str)
            assert 1 <= only.arguments["first"] <= 99
            assert len(only.arguments) == 2
        else:
            assert only.arguments == {}
        return {only.name}

    names = await asyncio.gather(*[call(seed) for seed in range(20)])
    assert set.union(*names) == {"read_file", "finish"}


async def test_a_call_that_is_cut_is_never_a_call(model: LocalChatModel) -> None:
    for max_tokens in (1, 5, 12):
        reply = await model.complete(USER, tools=[READ], tool_choice="required", params=params(max_tokens=max_tokens))
        assert reply.finish_reason is FinishReason.LENGTH
        assert reply.message.tool_calls == ()
        assert reply.usage.completion_tokens == max_tokens


async def test_a_required_call_needs_tools(model: LocalChatModel) -> None:
    with pytest.raises(ModelError, match="no tools"):
        await model.complete(USER, tool_choice="required")


async def test_what_does_not_fit_is_refused_before_computing(model: LocalChatModel) -> None:
    with pytest.raises(ContextOverflowError) as caught:
        await model.complete(USER, params=params(max_tokens=2048))
    assert caught.value.prompt_tokens == model.count_tokens(USER)
    assert caught.value.context == 2048
    with pytest.raises(ContextOverflowError):
        await model.complete([Message("user", "word " * 3000)], params=params())
    assert (await model.client.stats())["steps"] == 0


async def test_bad_parameters_are_model_errors(model: LocalChatModel) -> None:
    for bad, reason in (
        (SamplingParams(temperature=-1), "temperature must be"),
        (SamplingParams(max_tokens=0), "max_tokens must be"),
        (SamplingParams(stop=("",)), "stop string is empty"),
    ):
        with pytest.raises(ModelError, match=reason):
            await model.complete(USER, params=bad)


async def test_the_next_turn_computes_only_what_is_new(model: LocalChatModel) -> None:
    transcript = [Message("system", "You read files. " * 10), *USER]
    known = 0
    for turn in range(4):
        reply = await model.complete(transcript, tools=[READ], params=params(turn), key="task 1")
        # A random reply holds half characters, which no transcript can keep: all of it may differ, and the page it began in.
        assert reply.usage.cached_tokens >= known - PAGE_TOKENS
        known = reply.usage.prompt_tokens
        transcript += [reply.message, Message("user", f"Go on with number {turn}.")]


@pytest.mark.slow
async def test_a_real_models_reply_is_not_computed_again(model_path: Callable[[str], Path]) -> None:
    model = await LocalChatModel.load(EngineSettings(model_path("smollm2-135m")))
    try:
        transcript = [Message("system", "You are terse."), *USER]
        known = 0
        for turn in range(3):
            reply = await model.complete(transcript, tools=[READ], params=params(turn, max_tokens=12), key="task 1")
            assert reply.usage.cached_tokens >= known
            known = reply.usage.prompt_tokens + reply.usage.completion_tokens - 1  # the last token is sampled, not computed
            transcript += [reply.message, Message("user", f"Go on with number {turn}.")]
    finally:
        await model.close()


async def test_cancelling_a_reply_frees_its_sequence(model: LocalChatModel) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(model.complete(USER, params=params(max_tokens=1900), on_text=lambda _: started.set()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await model.client.stats()
    assert (after["running"], after["pages_used"]) == (0, 0)


async def test_a_reply_survives_its_engine_process_to_the_letter(model: LocalChatModel) -> None:
    wanted = params(2, max_tokens=120)
    calm = await model.complete(USER, params=wanted)
    at = len(calm.message.content) * 2 // 3
    wanted = replace(wanted, stop=(calm.message.content[at : at + 3],))
    calm = await model.complete(USER, params=wanted)
    heard: list[str] = []
    told: list[str] = []

    def kill_once(text: str) -> None:
        heard.append(text)
        if len(heard) == 5:
            os.kill(model.client.pid, signal.SIGKILL)

    reply = await model.complete(USER, params=wanted, on_text=kill_once, on_progress=lambda message, *_: told.append(message))
    assert (reply.message, reply.finish_reason) == (calm.message, calm.finish_reason)
    assert "".join(heard) == calm.message.content
    assert reply.usage.completion_tokens == calm.usage.completion_tokens
    assert model.client.num_restarts == 1
    assert told[0] == "the engine died and is started again"


async def test_a_tool_call_survives_its_engine_process(model: LocalChatModel) -> None:
    wanted = params(3, max_tokens=200)
    calm = await model.complete(USER, tools=[READ, FINISH], tool_choice="required", params=wanted)
    task = asyncio.create_task(model.complete(USER, tools=[READ, FINISH], tool_choice="required", params=wanted))
    before = await model.client.stats()
    while (await model.client.stats())["generated_tokens"] < before["generated_tokens"] + 5:
        pass
    os.kill(model.client.pid, signal.SIGKILL)
    assert (await task).message == calm.message


async def test_an_engine_that_cannot_be_started_again_is_a_model_error(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    model = await LocalChatModel.load(EngineSettings(path, context=2048))
    try:
        path.unlink()
        os.kill(model.client.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match=path.name):
            await model.complete(USER)
    finally:
        await model.close()


async def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        await LocalChatModel.load(EngineSettings(tmp_path / "absent.gguf"))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_text_passes_on_exactly_what_comes_before_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop, shown = StopText(stops), ""
    for piece in pieces:
        shown += stop.push(piece)
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)
    shown += stop.flush()
    ends = [text.index(s) + len(s) for s in stops if s in text]
    assert stop.is_found == bool(ends)
    if not ends:
        assert shown == text


def test_stop_text_holds_back_a_beginning_only_as_long_as_it_is_one() -> None:
    stop = StopText(["</end>", "\n\n"])
    assert [stop.push(part) for part in ("a<", "/e", "x\n", "b", "\n\n c")] == ["a", "", "</ex", "\nb", ""]
    assert stop.is_found
    assert stop.flush() == stop.push("more") == ""


async def test_texts_to_copy_from_reach_the_engine_and_change_no_reply(model: LocalChatModel) -> None:
    plain = await model.complete(USER, params=params(max_tokens=60))
    await model.update_source("said", plain.message.content)
    await model.update_source("other", "def f():\n    return 1\n", "agent")
    await model.update_source("other", "def f():\n    return 12\n", "agent")
    again = await model.complete(USER, params=params(max_tokens=60))
    assert again.message.content == plain.message.content
    stats = await model.client.stats()
    assert stats["draft_sources"] == 4  # each as it is, and as in JSON
    assert stats["draft_document_accepted"] > 0
    await model.remove_source("said")
    await model.remove_source("never there")
    assert (await model.client.stats())["draft_sources"] == 2


async def test_a_text_that_the_engine_does_not_have_is_sent_whole(model: LocalChatModel) -> None:
    await model.update_source("a", "one\ntwo\n")
    model.client.update_source(RemoveSource("text:a"))  # as if its memory had been needed
    await model.update_source("a", "one\ntwo\nthree\n")  # a change to what is not there: the engine says so
    await model.client.stats()
    await model.update_source("a", "one\ntwo\nthree\nfour\n")
    assert (await model.client.stats())["draft_sources"] == 2

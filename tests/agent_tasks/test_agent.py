"""The loop alone, with a scripted model and one tool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fakes import Script, ScriptedModel, call
from quadjet.agent_tasks.agent import Agent, EndReason, Limits
from quadjet.agent_tasks.task import TaskState
from quadjet.agent_tasks.tools import Tool, Toolbox, ToolResult, finish, make_spec, text_argument
from quadjet.engine.chat import ContextOverflowError, FinishReason, Message, ModelError, Reply, ToolCall, Usage

START = [Message("system", "s"), Message("user", "u")]


class Loop:
    """An Agent and what it told."""

    def __init__(self, script: Script, transcript: Sequence[Message] = START, **limits: Any) -> None:
        self.model = ScriptedModel(script)
        self.journal = list(transcript)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.states: list[TaskState] = []
        self.agent = Agent(
            model=self.model,
            toolbox=Toolbox([echo(), finish({"summary": text_argument("", 100)})]),
            transcript=list(transcript),
            append=self._append,
            emit=lambda kind, data, **changes: self.told.append((kind, data)),
            move=lambda state, message: self.states.append(state),
            limits=Limits(**{"max_turns": 20, "timeout_s": 60.0, **limits}),
            key="k",
        )

    async def _append(self, position: int, messages: Sequence[Message]) -> None:
        assert position == len(self.journal)
        self.journal += messages


def echo() -> Tool:
    async def handle(arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(True, f"you said {arguments['text']}", next_question="what now?" if arguments["text"] == "next" else "")

    return Tool(make_spec("echo", "", {"text": text_argument("", 100)}), handle)


END = call("finish", summary="done")


async def test_calls_and_results_alternate_until_finish() -> None:
    loop = Loop([call("echo", text="a"), END])
    ending = await loop.agent.run()
    assert (ending.reason, ending.arguments) == (EndReason.FINISHED, {"summary": "done"})
    assert [message.role for message in loop.journal] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert loop.journal == loop.agent.transcript
    assert loop.journal[3].content == "you said a"
    assert loop.journal[3].tool_call_id == loop.journal[2].tool_calls[0].id
    assert [kind for kind, _ in loop.told] == ["turn", "tool_call", "tool_result"] * 2
    assert loop.states == [TaskState.WAITING_TOOL, TaskState.RUNNING] * 2


async def test_each_prompt_extends_the_one_before() -> None:
    loop = Loop([call("echo", text="a"), Message("assistant", "prose"), call("echo", text="b"), END])
    await loop.agent.run()
    for earlier, later in zip(loop.model.prompts, loop.model.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert set(loop.model.keys) == {"k"}


async def test_a_new_question_is_asked_without_what_was_said_before() -> None:
    loop = Loop([call("echo", text="next"), call("echo", text="a"), END])
    await loop.agent.run()
    assert loop.model.prompts[1] == [START[0], Message("user", "what now?")]
    assert loop.model.prompts[2][:2] == loop.model.prompts[1]
    assert loop.journal[:2] == START
    assert loop.journal[3].content == "you said next"
    assert [message.role for message in loop.journal].count("system") == 2


async def test_calls_of_a_chapter_that_is_over_are_dropped() -> None:
    both = Message("assistant", "", (call("echo", text="next"), call("echo", text="late")))
    loop = Loop([both, END])
    await loop.agent.run()
    assert "you said late" not in [message.content for message in loop.journal]


async def test_code_in_text_is_read_as_a_call_and_other_text_leads_to_a_locked_turn() -> None:
    loop = Loop([Message("assistant", "hm"), call("echo", text="a"), Message("assistant", "echo: b"), END])
    loop.agent.toolbox.read_text = lambda text: call("echo", text=text[6:]) if text.startswith("echo: ") else None
    await loop.agent.run()
    assert loop.model.choices == ["auto", "required", "auto", "auto"]
    assert loop.journal[-3] == Message("user", "you said b")


async def test_a_cut_off_call_is_not_run() -> None:
    cut = Reply(Message("assistant", "", (call("echo", text="half"),)), FinishReason.LENGTH, Usage())
    loop = Loop([cut, END], max_tokens=7)
    await loop.agent.run()
    assert "tool_call" in [kind for kind, _ in loop.told]
    assert "you said half" not in [message.content for message in loop.journal]
    assert "cut off after 7 tokens" in loop.journal[3].content


async def test_several_calls_in_one_reply_are_all_answered() -> None:
    loop = Loop([Message("assistant", "", (call("echo", text="a"), call("echo", text="b"))), END])
    await loop.agent.run()
    assert [message.content for message in loop.journal if message.role == "tool"] == ["you said a", "you said b", "finished"]


async def test_the_third_repeat_asks_for_another_way_and_the_fourth_ends() -> None:
    same = [call("echo", text=text) for text in ("again", "again ", " AGAIN", "again")]
    loop = Loop(same)
    ending = await loop.agent.run()
    results = [message.content for message in loop.journal if message.role == "tool"]
    assert ending.reason is EndReason.STUCK
    assert ["Do something else" in text for text in results] == [False, False, True, False]


async def test_silence_is_a_repeat_too() -> None:
    loop = Loop([Message("assistant", "")] * 4)
    assert (await loop.agent.run()).reason is EndReason.STUCK


async def test_turns_are_counted() -> None:
    loop = Loop([call("echo", text=str(n)) for n in range(3)], max_turns=3)
    ending = await loop.agent.run()
    assert (ending.reason, loop.agent.turns) == (EndReason.BUDGET, 3)


async def test_time_is_limited() -> None:
    loop = Loop([asyncio.Event()], timeout_s=0.01)
    assert (await loop.agent.run()).reason is EndReason.BUDGET
    assert loop.model.cancelled == 1


async def test_a_full_context_ends_the_loop() -> None:
    loop = Loop([call("echo", text="a"), ContextOverflowError(9, 1, 8)])
    ending = await loop.agent.run()
    assert ending.reason is EndReason.CONTEXT
    assert "context" in ending.note


async def test_other_model_errors_are_raised() -> None:
    with pytest.raises(ModelError, match="gone"):
        await Loop([ModelError("gone")]).agent.run()


async def test_a_call_without_a_result_is_answered_before_going_on() -> None:
    open_call = Message("assistant", "", (ToolCall("echo", {"text": "a"}, "call-2-0"),))
    loop = Loop([END], [*START, open_call])
    await loop.agent.run("the reviewer says no")
    assert loop.journal[3].tool_call_id == "call-2-0"
    assert "interrupted" in loop.journal[3].content
    assert loop.journal[4] == Message("user", "the reviewer says no")


async def test_unknown_tools_and_bad_arguments_are_told() -> None:
    loop = Loop([call("fly"), call("echo"), call("echo", text=5), END])
    await loop.agent.run()
    results = [message.content for message in loop.journal if message.role == "tool"]
    assert ["no tool" in results[0], "missing" in results[1], "must be a text" in results[2]] == [True, True, True]

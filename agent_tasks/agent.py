"""The loop: transcript in, one tool call out, its result appended, again. Limits end it; the transcript only grows.

A system message opens a chapter, and the model sees the last one only: small models repeat what they did before, and the
part that all chapters share, the tools, stays in the cache.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ..engine.chat import ChatModel, ContextOverflowError, FinishReason, Message, SamplingParams, ToolCall
from . import prompts
from .task import TaskState
from .tools import Toolbox

STRATEGY_AT = 3
STUCK_AT = 4

_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


class EndReason(StrEnum):
    FINISHED = "finished"  # the model called finish, or a tool found that the work is done
    BUDGET = "budget"
    STUCK = "stuck"
    CONTEXT = "context"
    NO_MODEL = "no-model"  # there was nothing for a model to do


@dataclass(frozen=True, slots=True)
class Ending:
    """How the loop ended. `arguments` are those of `finish`; `note` is one line for a person."""

    reason: EndReason
    arguments: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    max_turns: int
    timeout_s: float
    max_tokens: int = 400


class LoopEnded(Exception):
    """Leaves the loop from anywhere in it."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.note)
        self.ending = ending


@dataclass
class Agent:
    """One run of the loop over one transcript. `append` journals new messages before the loop goes on."""

    model: ChatModel
    toolbox: Toolbox
    transcript: list[Message]
    append: Callable[[int, Sequence[Message]], Awaitable[None]]
    emit: Callable[..., object]
    move: Callable[[TaskState, str], object]
    limits: Limits
    key: str
    turns_before: int = 0
    turns: int = 0
    must_call: bool = False
    """The last answer was neither a call nor text that could be read as one, so the next is held to a call by grammar."""
    seen: Counter[str] = field(default_factory=Counter)

    async def run(self, feedback: str = "") -> Ending:
        """`feedback` is said to the model first: why an earlier result was not taken.

        Raises ModelError when the model fails. Cancelling it cancels the completion or the command that is under way.
        """
        try:
            async with asyncio.timeout(self.limits.timeout_s) as deadline:
                await self._answer_interrupted()
                if feedback and self.transcript[-1] != Message("user", feedback):
                    await self._append(Message("user", feedback))
                while True:
                    await self._turn()
        except LoopEnded as end:
            return end.ending
        except ContextOverflowError as error:
            return Ending(EndReason.CONTEXT, note=f"the model's context is full: {error.message}")
        except TimeoutError:
            if not deadline.expired():
                raise
            return Ending(EndReason.BUDGET, note=f"the time budget of {self.limits.timeout_s:.0f} s is used up")

    async def _turn(self) -> None:
        if self.turns >= self.limits.max_turns:
            raise LoopEnded(Ending(EndReason.BUDGET, note=f"the budget of {self.limits.max_turns} turns is used up"))
        is_free = self.toolbox.read_text is not None and not self.must_call
        reply = await self.model.complete(
            self._chapter(),
            tools=self.toolbox.specs,
            tool_choice="auto" if is_free else "required",
            params=SamplingParams(max_tokens=self.limits.max_tokens),
            on_progress=self._held_up,
            key=self.key,
        )
        self.turns += 1
        number, usage = self.turns_before + self.turns, reply.usage
        self.emit("turn", {"number": number, **asdict(usage)}, turns=number)
        await self._take(reply.message, reply.finish_reason)

    def _held_up(self, message: str, done: int, total: int) -> None:
        self.emit("progress", {"message": message, "done": done, "total": total}, message=message)

    async def _take(self, message: Message, finish_reason: FinishReason) -> None:
        cut_off = finish_reason is FinishReason.LENGTH
        calls = () if cut_off else tuple(_named(call, len(self.transcript), n) for n, call in enumerate(message.tool_calls))
        message = replace(message, content=_THINKING.sub("", message.content).strip(), tool_calls=calls)
        await self._append(message)
        if message.content:
            self.emit("text", {"text": message.content})
        for call in calls:
            if await self._answer(call):
                break  # what else this reply wanted belongs to the chapter that is over
        if calls:
            self.must_call = False
        elif not cut_off and self.toolbox.read_text and (meant := self.toolbox.read_text(message.content)):
            await self._answer(_named(meant, len(self.transcript), 0), in_text=True)
        else:
            await self._nudge(cut_off)

    async def _nudge(self, cut_off: bool) -> None:
        self.must_call = True
        names = ", ".join(spec.name for spec in self.toolbox.specs)
        text = prompts.CUT_OFF.format(tokens=self.limits.max_tokens) if cut_off else prompts.NO_CALL.format(names=names)
        count = self._count("", text)
        await self._append(Message("user", text))
        self._check_stuck(count)

    async def _answer(self, call: ToolCall, in_text: bool = False) -> bool:
        """Run a call and append its result; to a call that was read from text it is said as a user. True: a chapter begins."""
        self.emit("tool_call", {"id": call.id, "name": call.name, "arguments": call.arguments})
        self.move(TaskState.WAITING_TOOL, f"running {call.name}")
        result = await self.toolbox.call(call)
        self.move(TaskState.RUNNING, f"{self.model.name} is working")
        count = self._count(_normal_call(call), result.text)
        if count == STRATEGY_AT and not result.done:
            result = replace(result, text=f"{result.text}\n{prompts.STRATEGY.format(count=count)}")
        await self._append(Message("user", result.text) if in_text else Message("tool", result.text, tool_call_id=call.id))
        self.emit("tool_result", {"id": call.id, "name": call.name, "ok": result.ok, "text": result.text})
        if result.done:
            raise LoopEnded(Ending(EndReason.FINISHED, call.arguments))
        self._check_stuck(count)
        if result.next_question:
            self.seen.clear()  # the same answer to another question is no repetition
            await self._append(self._chapter()[0], Message("user", result.next_question))
        return bool(result.next_question)

    async def _answer_interrupted(self) -> None:
        """A call may have no result after a pause or a crash; every call needs one before the model is asked again."""
        chapter = self._chapter()
        answered = {message.tool_call_id for message in chapter if message.role == "tool"}
        for message in chapter:
            for call in message.tool_calls:
                if call.id not in answered:
                    await self._append(Message("tool", prompts.INTERRUPTED, tool_call_id=call.id))

    def _chapter(self) -> list[Message]:
        start = max((n for n, message in enumerate(self.transcript) if message.role == "system"), default=0)
        return self.transcript[start:]

    async def _append(self, *messages: Message) -> None:
        await self.append(len(self.transcript), messages)
        self.transcript += messages

    def _count(self, call: str, result: str) -> int:
        key = f"{call}\n{_normal(result)}"
        self.seen[key] += 1
        return self.seen[key]

    def _check_stuck(self, count: int) -> None:
        if count >= STUCK_AT:
            raise LoopEnded(Ending(EndReason.STUCK, note=f"the model repeated one step {count} times with the same result"))


def _named(call: ToolCall, position: int, n: int) -> ToolCall:
    """Ids tie results to calls in the journal, so they are unique within a transcript whatever the model wrote."""
    return replace(call, id=f"call-{position}-{n}")


def _normal_call(call: ToolCall) -> str:
    arguments = {name: _normal(value) if isinstance(value, str) else value for name, value in call.arguments.items()}
    return call.name + json.dumps(arguments, sort_keys=True)


def _normal(text: str) -> str:
    """Without what differs between two runs of the same step: white space, case, durations."""
    return re.sub(r"\d+\.\d+ ?s\b", "", re.sub(r"\s+", " ", text)).strip().lower()

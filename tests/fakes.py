"""Stand-ins for what is outside the code under test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from quadjet.engine.chat import (
    ContextOverflowError,
    FinishReason,
    Message,
    ProgressCallback,
    Reply,
    SamplingParams,
    SourceKind,
    ToolCall,
    ToolSpec,
    Usage,
)

Answer = Reply | Message | ToolCall | Exception | asyncio.Event
Script = Sequence[Answer] | Callable[[Sequence[Message]], Answer]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


class ScriptedModel:
    """A ChatModel that replays answers; everything around it is real.

    An answer is a tool call, a message, a whole reply, an exception to raise, or an Event: then the model blocks until it is set
    and takes the next answer. A callable gets the transcript and returns an answer. `prompts` holds every transcript it was
    asked with, `waiting` is set while it blocks, and `cancelled` counts completions that were cancelled. `sources` holds the
    texts that it was told to copy from.
    """

    def __init__(self, script: Script, context: int = 1_000_000) -> None:
        self._answers = None if callable(script) else list(script)
        self._function = script if callable(script) else None
        self.context = context
        self.prompts: list[list[Message]] = []
        self.tools: list[tuple[ToolSpec, ...]] = []
        self.choices: list[str] = []
        self.keys: list[str] = []
        self.waiting = asyncio.Event()
        self.cancelled = 0
        self.sources: dict[str, str] = {}

    @property
    def name(self) -> str:
        return "scripted"

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """A word is a token."""
        texts = [message.content + json.dumps([item.arguments for item in message.tool_calls]) for message in messages]
        return sum(len(text.split()) for text in texts)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        tool_choice: Literal["none", "auto", "required"] = "auto",
        params: SamplingParams | None = None,
        on_text: Callable[[str], None] | None = None,
        on_progress: ProgressCallback | None = None,
        key: str = "",
    ) -> Reply:
        self.prompts.append(list(messages))
        self.tools.append(tuple(tools))
        self.choices.append(tool_choice)
        self.keys.append(key)
        tokens = self.count_tokens(messages, tools)
        if tokens > self.context:
            raise ContextOverflowError(tokens, (params or SamplingParams()).max_tokens, self.context)
        answer = self._next(messages)
        while isinstance(answer, asyncio.Event):
            await self._block(answer)
            answer = self._next(messages)
        if isinstance(answer, Exception):
            raise answer
        return _reply(answer, tokens)

    async def update_source(self, name: str, text: str, kind: SourceKind = "document") -> None:
        self.sources[name] = text

    async def remove_source(self, name: str) -> None:
        self.sources.pop(name, None)

    def _next(self, messages: Sequence[Message]) -> Answer:
        if self._function is not None:
            return self._function(messages)
        assert self._answers, "the script is over, but the model was asked again"
        return self._answers.pop(0)

    async def _block(self, event: asyncio.Event) -> None:
        self.waiting.set()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting.clear()


def _reply(answer: Reply | Message | ToolCall, prompt_tokens: int) -> Reply:
    if isinstance(answer, Reply):
        return answer
    message = Message("assistant", "", (answer,)) if isinstance(answer, ToolCall) else answer
    reason = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
    return Reply(message, reason, Usage(prompt_tokens=prompt_tokens, completion_tokens=1))


class FakeEditor:
    """Holds one text per path. `refusals`: how many edits it answers with False, as if it had changed meanwhile."""

    def __init__(self, name: str = "editor", refusals: int = 0) -> None:
        self.name = name
        self.refusals = refusals
        self.texts: dict[Any, str] = {}
        self.edits: list[Mapping[str, Any]] = []
        self.on_refusal: Callable[[], None] = lambda: None

    async def apply_edit(self, path: Any, base_version: int, new_text: str, label: str) -> bool:
        if self.refusals:
            self.refusals -= 1
            self.on_refusal()
            return False
        self.texts[path] = new_text
        self.edits.append({"path": path, "version": base_version, "text": new_text, "label": label})
        return True

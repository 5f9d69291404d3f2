"""Runs the real daemon with a model that follows the script in a task's instruction: `{"steps": [step, ...]}`, one step a turn.

step: {"edit": [path, search, replace]} | {"read": [path, first line]} | {"finish": summary}, and with it
  "say": text, "repeat": n   to write n copies of a text before the call
  "wait": path               to answer only once that file exists
  "delay_s": seconds         to take that long for each answer
  "times": n                 to take the step n times, reading one line further each time
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from quadjet.agent_tasks.run import ProgressCallback
from quadjet.daemon import config
from quadjet.daemon.server import serve
from quadjet.engine.chat import ChatModel, FinishReason, Message, Reply, SamplingParams, SourceKind, ToolCall, ToolSpec, Usage
from quadjet.engine.errors import QuadjetError

_POLL_S = 0.01


class FollowingModel:
    """ChatModel whose next reply is a function of the transcript, so any number of tasks may use it at once."""

    name = "scripted"
    context = 1_000_000

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        return sum(len(message.content) for message in messages)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        tool_choice: Literal["none", "auto", "required"] = "auto",
        params: SamplingParams | None = None,
        on_text: Callable[[str], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
        key: str = "",
    ) -> Reply:
        step = self._step(messages)
        while "wait" in step and not await asyncio.to_thread(Path(step["wait"]).exists):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)  # made by another process: there is nothing to be woken by
        await asyncio.sleep(step.get("delay_s", 0))
        text = step.get("say", "") * step.get("repeat", 1)
        message = Message("assistant", text, (_call(step),))
        return Reply(message, FinishReason.TOOL_CALLS, Usage(self.count_tokens(messages), 0, len(text)))

    async def update_source(self, name: str, text: str, kind: SourceKind = "document") -> None:
        """It needs no drafts."""

    async def remove_source(self, name: str) -> None:
        """It has none."""

    def _step(self, messages: Sequence[Message]) -> dict[str, Any]:
        said = "".join(message.content for message in messages if message.role == "user")
        begin = said.find('{"steps"')
        steps = json.JSONDecoder().raw_decode(said[begin:])[0]["steps"] if begin >= 0 else []
        turns = [(step, count) for step in steps for count in range(step.get("times", 1))]
        turn = sum(message.role == "assistant" for message in messages)
        step, count = turns[turn] if turn < len(turns) else ({"finish": "done"}, 0)
        taken: dict[str, Any] = dict(step)
        if "read" in taken:
            path, first = taken["read"]
            taken["read"] = [path, first + count]
        return taken


def _call(step: dict[str, Any]) -> ToolCall:
    if "edit" in step:
        return ToolCall("edit_file", dict(zip(("path", "search", "replace"), step["edit"], strict=True)))
    if "read" in step:
        return ToolCall("read_file", dict(zip(("path", "first"), step["read"], strict=True)))
    return ToolCall("finish", {"summary": step.get("finish", "done")})


class FollowingSource:
    """daemon.server.ModelSource."""

    def __init__(self) -> None:
        self._model: ChatModel = FollowingModel()

    async def __call__(self, on_progress: ProgressCallback, /) -> ChatModel:
        return self._model

    async def close(self) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"name": "scripted", "loaded": True}


def main() -> int:
    places = config.Places.from_environment()
    try:
        asyncio.run(serve(config.load({}, places).config, places, FollowingSource()))
    except QuadjetError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

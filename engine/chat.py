"""The seam between agents and inference: messages in, a reply out. Everything above this file knows no tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from .errors import QuadjetError

ProgressCallback = Callable[[str, int, int], None]
"""message, done, total"""

Role = Literal["system", "user", "assistant", "tool"]

SourceKind = Literal["document", "agent"]
"""Who wrote a text that replies may copy from: an open document, or a file that an agent read or edited."""


class ModelError(QuadjetError):
    """The model could not answer: engine gone, prompt over the context, template refused."""


class ContextOverflowError(ModelError):
    """The transcript and the room asked for its reply do not fit the context. Nothing was generated."""

    def __init__(self, prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and may be answered with {max_tokens}, but the context holds {context}",
            "raise engine.context, or give the task a smaller file or range",
        )
        self.prompt_tokens = prompt_tokens
        self.context = context


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the model may call. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete, parsed call. A call cut off by the token limit never becomes one of these."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a transcript. `tool_call_id` ties a tool message to the call it answers."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; same seed, same text."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens or the context was reached: tool calls in the text are not complete
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens; times in seconds. cached_tokens of the prompt were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)


class ChatModel(Protocol):
    """A model that answers transcripts. Cancelling the coroutine of `complete` frees its sequence within one step."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> int:
        """Tokens that prompt and reply may have together."""
        ...

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Tokens of the rendered prompt."""
        ...

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
        """The next assistant message.

        tool_choice "required": the reply is locked by grammar to exactly one call of one of `tools` from its first token.
        "auto": text is free; a native, fenced or bare call of a known tool in it is returned in `message.tool_calls`.
        `key` names the transcript's owner (a task id): its cache is looked up first. `on_text` gets text as it streams,
        `on_progress` what holds the reply up: an engine that died and is started again.
        Raises ContextOverflowError before computing anything, ModelError when the engine fails.
        """
        ...

    async def update_source(self, name: str, text: str, kind: SourceKind = "document") -> None:
        """Name a text that replies may copy from, or what it is by now: replies come faster then and say the same.

        Only the lines that changed cost anything. ModelError for a text that no tokenizer can encode.
        """
        ...

    async def remove_source(self, name: str) -> None:
        """The text of this name is of no use any more."""
        ...

"""ChatModel over the engine process: messages become tokens here, and tokens a reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

from .backend import TokenSampling
from .chat import (
    ContextOverflowError,
    FinishReason,
    Message,
    ModelError,
    ProgressCallback,
    Reply,
    SamplingParams,
    SourceKind,
    ToolSpec,
    Usage,
)
from .client import EngineSettings, GenerateRequest, TokenEvent
from .draft_text import DraftTexts
from .errors import EngineError, ModelFileError
from .gguf_file import GgufFile
from .supervisor import EngineSupervisor
from .template import ChatTemplate
from .tokenizer import Tokenizer

_MAX_TRANSCRIPTS = 64

OnText = Callable[[str], None]


class LocalChatModel:
    """One model in one engine, which survives its process. Make one with `load`, end it with `close`."""

    def __init__(self, client: EngineSupervisor, tokenizer: Tokenizer, template: ChatTemplate, name: str) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._name = name
        # What the model saw and wrote under each key. Its own cut into tokens is kept in the next prompt, or the cache is lost.
        self._transcripts: OrderedDict[str, list[int]] = OrderedDict()
        self._texts = DraftTexts(tokenizer.encode)
        client.on_source_gone = self._texts.source_gone
        self._source_lock = asyncio.Lock()

    @classmethod
    async def load(cls, settings: EngineSettings, on_progress: ProgressCallback = lambda *_: None, *, name: str = "") -> Self:
        """Read the file's vocabulary and template, then start the engine. ModelFileError or EngineError says what is wrong."""
        tokenizer, template = await asyncio.to_thread(_read_text_parts, settings.model_path)
        try:
            client = await EngineSupervisor.start(settings, on_progress)
        except BaseException:
            template.close()
            raise
        return cls(client, tokenizer, template, name or settings.model_path.stem)

    @property
    def name(self) -> str:
        return self._name

    @property
    def context(self) -> int:
        """Tokens that prompt and reply may have together."""
        return self._client.info.context

    @property
    def client(self) -> EngineSupervisor:
        """The engine itself: statistics, restarts, and what ended it."""
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Tokens of the rendered prompt."""
        return len(self._template.render(messages, tools))

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        tool_choice: Literal["none", "auto", "required"] = "auto",
        params: SamplingParams | None = None,
        on_text: OnText | None = None,
        on_progress: ProgressCallback | None = None,
        key: str = "",
    ) -> Reply:
        """The next assistant message, as ChatModel says. A required call is not text: `on_text` hears nothing of it."""
        params = params or SamplingParams()
        prompt = await asyncio.to_thread(self._prompt, messages, tools, key)
        if len(prompt) + params.max_tokens > self.context:
            raise ContextOverflowError(len(prompt), params.max_tokens, self.context)
        is_required = tool_choice == "required"
        request = GenerateRequest(
            prompt,
            sampling=_token_sampling(params),
            max_tokens=params.max_tokens,
            grammar=self._template.dialect.tool_grammar(tools) if is_required else None,
            key=key,
        )
        stops = () if is_required else (*params.stop, *self._template.dialect.stops)
        try:
            generated = await self._generate(request, StopText(stops), None if is_required else on_text, on_progress)
        except (EngineError, ModelFileError) as error:
            raise ModelError(error.message, error.fix) from error
        self._remember(key, [*prompt, *generated.tokens])
        return self._reply(generated, () if tool_choice == "none" else tools, is_required)

    async def update_source(self, name: str, text: str, kind: SourceKind = "document") -> None:
        """Replies may copy from `text` from here on, as ChatModel says."""
        async with self._source_lock:  # changes reach the engine in the order in which they were made
            for change in await asyncio.to_thread(self._texts.change, name, kind, text):
                self._client.update_source(change)

    async def remove_source(self, name: str) -> None:
        """Forget what `update_source` brought under this name."""
        async with self._source_lock:
            for change in self._texts.remove(name):
                self._client.update_source(change)

    async def close(self) -> None:
        """End the engine process and the template's."""
        await asyncio.to_thread(self._template.close)
        await self._client.close()

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec], key: str) -> list[int]:
        prompt = self._template.render(messages, tools)
        known = self._transcripts.get(key)
        return self._tokenizer.align(prompt, known) if known else prompt

    def _remember(self, key: str, tokens: list[int]) -> None:
        if not key:
            return
        self._transcripts[key] = tokens
        self._transcripts.move_to_end(key)
        if len(self._transcripts) > _MAX_TRANSCRIPTS:
            self._transcripts.popitem(last=False)

    async def _generate(
        self, request: GenerateRequest, stop: StopText, on_text: OnText | None, on_progress: ProgressCallback | None
    ) -> _Generated:
        result = _Generated()
        stream = self._tokenizer.stream()

        def add(text: str) -> None:
            if text:
                result.text += text
                if on_text is not None:
                    on_text(text)

        is_over = False
        async with contextlib.aclosing(self._client.generate(request, on_progress)) as events:
            async for event in events:
                if event.token is None:
                    result.last = event
                elif not is_over:  # what the engine sampled before it heard of the stop string is dropped
                    result.tokens.append(event.token)
                    add(stop.push(stream.push(event.token)))
                    is_over = stop.is_found
                    if is_over:
                        self._client.end_early(event)
        if not is_over:
            add(stop.push(stream.flush()))
            add(stop.flush())
        result.is_cut = result.last is not None and result.last.finish == "length" and not stop.is_found
        return result

    def _reply(self, generated: _Generated, tools: Sequence[ToolSpec], is_required: bool) -> Reply:
        parsed = self._template.dialect.parse(generated.text, tools, complete=not generated.is_cut)
        if generated.is_cut:
            finish = FinishReason.LENGTH
        elif parsed.tool_calls:
            finish = FinishReason.TOOL_CALLS
        elif is_required:
            raise ModelError(f"the reply is no tool call, though a grammar held it to one: {generated.text[:200]!r}")
        else:
            finish = FinishReason.STOP
        message = Message("assistant", parsed.content, parsed.tool_calls)
        return Reply(message, finish, _usage(generated))


@dataclass(slots=True)
class _Generated:
    """A reply as it grows."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    is_cut: bool = False
    """It ended at max_tokens, not by itself."""
    last: TokenEvent | None = None


class StopText:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ModelError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """The part of all text so far that is sure to come before a stop string and was not returned yet."""
        if self.is_found:
            return ""
        text = self._held + text
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.is_found = bool(places)
        safe = min(places) if places else len(text) - self._num_held(text)
        self._held = "" if places else text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back: the text is over and it was no stop string. Empty after one was found."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = (n for stop in self._stops for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
        return max(lengths, default=0)


class _TextParts(NamedTuple):
    tokenizer: Tokenizer
    template: ChatTemplate


def _read_text_parts(path: Path) -> _TextParts:
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        return _TextParts(tokenizer, ChatTemplate.from_gguf(file.metadata, tokenizer))


def _token_sampling(params: SamplingParams) -> TokenSampling:
    return TokenSampling(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)


def _usage(generated: _Generated) -> Usage:
    usage = generated.last.usage if generated.last is not None else None
    if usage is None:
        raise ModelError("the engine ended a reply without saying how")
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=len(generated.tokens),
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
    )

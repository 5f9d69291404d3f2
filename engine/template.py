"""The model file's own chat template: transcripts to token ids, in a child process that a hostile template cannot leave or hold.

A persistent child renders every prompt (template_child.py says why every one): 0.1 ms for a short prompt, 3 ms for 300 messages.
Text inside a conversation never becomes a special token: before rendering, the characters that special texts begin with are
swapped for private-use ones that occur nowhere in the request, one for one, so that the template may trim, cut or join contents
and still no special text can form from them. After the split at special tokens they are swapped back and encoded as plain text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from .chat import Message, ModelError, ToolCall, ToolSpec
from .dialect import Dialect, check_tools, dialect_for, tool_json
from .errors import ModelFileError
from .template_process import TemplateProcess
from .tokenizer import Tokenizer

_CACHED_PARTS = 512
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE_USE_PATTERN = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class ChatTemplate:
    """Renders transcripts with one model's template and vocabulary. Thread-safe. `close` ends its process."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile and test-render. ModelFileError for a template that is damaged, hostile, or renders no simple conversation."""
        self._tokenizer = tokenizer
        self._process = TemplateProcess(source)
        self._first_chars = sorted({text[0] for text in tokenizer.special_texts})
        self._source_private = set(_PRIVATE_USE_PATTERN.findall(source))
        self._special_names = {
            name: next((text for text, i in tokenizer.special_ids.items() if i == token), "")
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        # The parts of a transcript come again in every turn's prompt; only what is new is encoded.
        self._encode = lru_cache(maxsize=_CACHED_PARTS)(lambda part: array("i", tokenizer.encode(part)))
        self.dialect: Dialect = dialect_for(tokenizer)
        self.native_tools = False
        """The template renders tools, calls and results itself, in the dialect; else the dialect puts them into text."""
        try:
            if "probe-text" not in self._text([Message("user", "probe-text")], [], True):
                raise ModelFileError("the model's chat template does not render a user's message")
            self.native_tools = self._renders_tools()
        except ModelError as error:
            self.close()
            raise ModelFileError(
                f"the model's chat template does not work: {error.message}", "use another file of this model"
            ) from None
        except ModelFileError:
            self.close()
            raise

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str) or not source.strip():
            raise ModelFileError(
                "the model file has no chat template: it is a base model, which cannot chat", "use its instruct version"
            )
        return cls(source, tokenizer)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of the whole prompt, bos included where the model wants one.

        ModelError for a conversation that the template refuses, in its own words, and for a template that passes its limits.
        """
        check_tools(tools)
        swap = self._swap(messages, tools)
        messages = [swap.message(message) for message in messages]
        tools = [swap.tool(tool) for tool in tools]
        if not self.native_tools:
            messages, tools = self.dialect.fold_tools(messages, tools), []
        ids: list[int] = []
        for i, part in enumerate(self._tokenizer.split_special(self._text(messages, tools, add_generation_prompt))):
            ids += [self._tokenizer.special_ids[part]] if i % 2 else self._encode(swap.back(part))
        if self._tokenizer.add_bos and self._tokenizer.bos_id is not None and ids[:1] != [self._tokenizer.bos_id]:
            ids.insert(0, self._tokenizer.bos_id)
        return ids

    def close(self) -> None:
        self._process.close()

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], add_generation_prompt: bool) -> str:
        context: dict[str, Any] = {
            "messages": [_message_json(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **self._special_names,
        }
        if tools:
            context["tools"] = [tool_json(tool) for tool in tools]
        return self._process.render(context)

    def _renders_tools(self) -> bool:
        """Whether a probe of a tool, its call and its result come out, the call in the very form of the dialect."""
        tool = ToolSpec("probe_tool", "probe-description", {"type": "object", "properties": {"key": {"type": "string"}}})
        call = ToolCall(tool.name, {"key": "probe-value"}, "probe00id")
        messages = [
            Message("user", "probe-text"),
            Message("assistant", "", (call,)),
            Message("tool", "probe-result", tool_call_id=call.id),
        ]
        try:
            text = self._text(messages, [tool], True)
        except ModelError:
            return False
        return all(
            probe in text for probe in (tool.description, "probe-result", self.dialect.render_call(call.name, call.arguments))
        )

    def _swap(self, messages: Iterable[Message], tools: Iterable[ToolSpec]) -> _Swap:
        used = set(self._source_private)
        for text in chain(_strings([_message_json(m) for m in messages]), _strings([tool_json(tool) for tool in tools])):
            used.update(_PRIVATE_USE_PATTERN.findall(text))
        free = (char for char in map(chr, chain(*_PRIVATE_USE)) if char not in used)
        pairs = dict(zip(self._first_chars, free, strict=False))
        if len(pairs) < len(self._first_chars):
            raise ModelError("the conversation uses every private-use character of Unicode")
        return _Swap(pairs)


class _Swap:
    """Replaces characters one for one in everything that a conversation's authors wrote, and back."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._there = str.maketrans(dict(pairs))
        self._back = str.maketrans({private: char for char, private in pairs.items()})

    def message(self, message: Message) -> Message:
        calls = tuple(
            ToolCall(call.name.translate(self._there), self._object(call.arguments), call.id.translate(self._there))
            for call in message.tool_calls
        )
        content, answered = message.content.translate(self._there), message.tool_call_id.translate(self._there)
        return Message(message.role, content, calls, answered)

    def tool(self, tool: ToolSpec) -> ToolSpec:
        return replace(tool, description=tool.description.translate(self._there), parameters=self._object(tool.parameters))

    def back(self, text: str) -> str:
        return text.translate(self._back)

    def _object(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {key.translate(self._there): self._value(item) for key, item in value.items()}

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return value.translate(self._there)
        if isinstance(value, Mapping):
            return self._object(value)
        return [self._value(item) for item in value] if isinstance(value, list | tuple) else value


def _message_json(message: Message) -> dict[str, Any]:
    """A message in the shape that templates expect."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        data["tool_call_id"] = message.tool_call_id
    return data


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)

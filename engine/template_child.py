"""The child process that renders one chat template: `python -m quadjet.engine.template_child`, frames on standard input.

A template is a program from a model file, and it may behave by what a conversation contains, so every render is confined, not
only the first. The process can open nothing, has 512 MiB, and arms a timer whose signal kills it from the kernel: that also ends
what runs inside one C call (`2 ** 10 ** 10`), where no Python handler gets a turn. CPU time is counted, not wall time, so that a
busy machine does not fail an honest template.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_LIMIT_S = 1.0
MEMORY_LIMIT_BYTES = 512 << 20
MAX_TEXT_CHARS = 4 << 20
FRAME_HEADER = struct.Struct("<I")
"""Every frame, both ways: the length of the JSON object that follows."""

Request = dict[str, Any]


def main() -> None:
    """Answer {"source", "now"} and then any number of {"context"} requests, until the other end closes.

    An answer is {"text"}, {"refused": the template's own words} or {"failed": what went wrong}.
    """
    channel = socket.socket(fileno=0)
    start = _receive(channel)
    _confine()
    render: Callable[[Request], Request] | None = None
    if start is not None:
        answer, render = _limited(lambda: _compile(start))
        _send(channel, answer)
    while render is not None and (request := _receive(channel)) is not None:
        answer, _ = _limited(lambda request=request: (render(request), None))  # type: ignore[misc]
        _send(channel, answer)


def _compile(start: Request) -> tuple[Request, Callable[[Request], Request]]:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    now = datetime.fromisoformat(start["now"])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=now.strftime)
    template = environment.from_string(start["source"])

    def render(request: Request) -> Request:
        text = template.render(request["context"])
        if len(text) > MAX_TEXT_CHARS:
            return {"failed": f"it writes more than {MAX_TEXT_CHARS} characters"}
        return {"text": text}

    return {"text": ""}, render


def _limited(action: Callable[[], tuple[Request, Any]]) -> tuple[Request, Any]:
    """Run a part of the template under the timer; its exceptions become answers."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        return action()
    except _RefusedError as refusal:
        return {"refused": str(refusal)[:1000]}, None
    except MemoryError:
        return {"failed": f"it needs more than {MEMORY_LIMIT_BYTES >> 20} MiB"}, None
    except Exception as error:  # whatever a foreign program raises is an answer, never the end of this one
        return {"failed": f"{type(error).__name__}: {error}"[:1000]}, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _RefusedError(Exception):
    """The template called raise_exception: it does not render such a conversation."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the templates' authors had it: unlike Jinja's own filter it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _confine() -> None:
    # Rendering once, and failing once, loads what Python and Jinja import late, while files can still be opened.
    environment = jinja2.Environment(extensions=[loopcontrols])
    environment.from_string(r"{% set a = '\n\u00e9' %}{{ lipsum(1) ~ a | pprint | upper | urlize }}{{ 1.5 | round }}").render()
    _limited(lambda: (environment.from_string("{{ a.b.c }}").render(), None))  # type: ignore[arg-type,return-value]
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _receive(channel: socket.socket) -> Request | None:
    header = _read(channel, FRAME_HEADER.size)
    if header is None:
        return None
    data = _read(channel, FRAME_HEADER.unpack(header)[0])
    return None if data is None else json.loads(data)


def _read(channel: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        part = channel.recv(length - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _send(channel: socket.socket, answer: Request) -> None:
    data = json.dumps(answer).encode()
    channel.sendall(FRAME_HEADER.pack(len(data)) + data)


if __name__ == "__main__":
    main()

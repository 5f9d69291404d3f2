"""Runs a chat template in a child process and ends that process when it passes its limits (template_child.py).

`subprocess` is used, never a fork of this process: the daemon has threads and an event loop.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from .chat import ModelError
from .template_child import CPU_LIMIT_S, FRAME_HEADER

WALL_LIMIT_S = 30.0
_MAX_FRAME_BYTES = 32 << 20


class TemplateProcess:
    """The child for one template: started at the first render, and again after it died."""

    def __init__(self, source: str, wall_limit_s: float = WALL_LIMIT_S) -> None:
        # Fixed for the life of the template: a date in the prompt must not change between two turns.
        self._start = {"source": source, "now": datetime.now().isoformat()}
        self._wall_limit_s = wall_limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, context: Mapping[str, Any]) -> str:
        """The template's text for `context`, a JSON object. ModelError if it refuses, fails or passes a limit. Thread-safe."""
        with self._lock:
            if self._child is None:
                self._spawn()
            return self._request({"context": context})

    def close(self) -> None:
        with self._lock:
            self._end()

    def _spawn(self) -> None:
        self._child = _Child()
        try:
            self._request(self._start)
        except ModelError:
            self._end()
            raise

    def _request(self, request: Mapping[str, Any]) -> str:
        assert self._child is not None
        try:
            answer = self._child.exchange(request, self._wall_limit_s)
        except TimeoutError:
            self._end()
            raise ModelError(f"the chat template did not finish within {self._wall_limit_s:g} s") from None
        except OSError:
            code = self._end()
            reason = (
                f"needs more than {CPU_LIMIT_S:.0f} s of CPU time" if code == -signal.SIGPROF else f"broke its process ({code})"
            )
            raise ModelError(f"the chat template {reason}") from None
        if "refused" in answer:
            raise ModelError(f"the chat template refuses this conversation: {_printable(answer['refused'])}")
        if "failed" in answer:
            raise ModelError(f"the chat template failed: {_printable(answer['failed'])}")
        text: str = answer["text"]
        return text

    def _end(self) -> int | None:
        child, self._child = self._child, None
        return child.stop() if child is not None else None


class _Child:
    """The running process and its channel."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        # -P: the current folder may be a stranger's. The environment holds secrets that a template has no use for.
        environment = {key: value for key, value in os.environ.items() if key.startswith("PYTHON") or key == "LD_LIBRARY_PATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quadjet.engine.template_child"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _stop, self._process, self._channel)

    def exchange(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer. TimeoutError, or another OSError when the process is gone."""
        deadline = time.monotonic() + timeout_s
        data = json.dumps(request).encode()
        if len(data) > _MAX_FRAME_BYTES:
            raise ModelError(f"the conversation has {len(data) >> 20} MiB, too much for a template", "start a task on less text")
        self._channel.settimeout(timeout_s)
        self._channel.sendall(FRAME_HEADER.pack(len(data)) + data)
        (length,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size, deadline))
        if length > _MAX_FRAME_BYTES:
            raise ConnectionError("the answer is too long")
        try:
            answer = json.loads(self._read(length, deadline))
        except (ValueError, RecursionError):
            raise ConnectionError("the answer is not JSON") from None
        if not isinstance(answer, dict) or not answer.keys() & {"text", "refused", "failed"}:
            raise ConnectionError("the answer is not of the agreed form")
        return answer

    def stop(self) -> int | None:
        """End the process and return its exit status: negative for the signal that ended it."""
        self._finalizer()
        return self._process.returncode

    def _read(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._channel.recv(min(length - len(data), 1 << 20))
            if not part:
                raise ConnectionError("the process ended")
            data += part
        return bytes(data)


def _stop(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _printable(text: object) -> str:
    """A stranger's words, fit for a terminal."""
    return "".join(char if char.isprintable() else " " for char in str(text))

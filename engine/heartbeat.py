"""The engine process's sign of life, from a thread of its own: that it runs, and how long it has been at what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .channel import Alive

INTERVAL_S = 1.0


class Heartbeat:
    def __init__(self, send: Callable[[Alive], None]) -> None:
        self._send = send
        self._since: dict[str, float] = {}
        self._ended = threading.Event()

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """The calling thread is at `work`: one thread's own name for something that must end soon."""
        self._since[work] = time.monotonic()
        try:
            yield
        finally:
            del self._since[work]

    def go_on(self, work: str) -> None:
        """Something of `work` is done: its time counts from here."""
        self._since[work] = time.monotonic()

    @contextmanager
    def beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            now = time.monotonic()
            times = [(now - since, work) for work, since in self._since.copy().items()]
            busy_s, work = max(times, default=(0.0, ""))
            try:
                self._send(Alive(work, busy_s))
            except (BrokenPipeError, ConnectionResetError):
                return  # the parent is gone, which ends the process

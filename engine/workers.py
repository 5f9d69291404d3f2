"""Threads that share out pieces of one computation and sleep in between.

The BLAS has threads of its own, but they meet at barriers: beside other busy processes, such as the tests that agents run, each
call then waits for the slowest core and steps take many times longer. Here whoever is free takes the next piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


class Workers:
    """`count` threads, the caller's included."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._helpers = ThreadPoolExecutor(count - 1, "workers") if count > 1 else None

    def run(self, work: Callable[[Item], object], items: Sequence[Item]) -> None:
        """Call `work` once for each item, in any order and thread, and return when all are done.

        If a call raises, so does this, once no thread is at work any more; some items may then be left out.
        """
        if self._helpers is None or len(items) < 2:
            for item in items:
                work(item)
            return
        queue = iter(items)  # a list's iterator gives each item once, also to several threads

        def drain() -> None:
            with np.errstate(all="ignore"):  # each thread has its own
                for item in queue:
                    work(item)

        helping = [self._helpers.submit(drain) for _ in range(min(self.count, len(items)) - 1)]
        try:
            drain()
        finally:
            # One that has not begun yet would find nothing left.
            wait([helper for helper in helping if not helper.cancel()])
        for helper in helping:
            if not helper.cancelled():
                helper.result()

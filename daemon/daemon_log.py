"""The daemon's log: one file, rotated, readable by its user only, without bodies of messages and harmless to show."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ..agent_tasks.text import neutralise
from ..lsp.protocol import tame_log

_MAX_BYTES = 4 * 2**20
_KEPT = 3


@contextmanager
def open_log(path: Path) -> Iterator[None]:
    """Everything logged goes to `path` while this is open."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _PrivateHandler(path, maxBytes=_MAX_BYTES, backupCount=_KEPT, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_HarmlessFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    tame_log()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


class _HarmlessFormatter(logging.Formatter):
    """Names of clients and files, and what tools said, are foreign text: people read this file with cat and tail."""

    def format(self, record: logging.LogRecord) -> str:
        return neutralise(super().format(record))


class _PrivateHandler(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return TextIOWrapper(open(descriptor, "ab"), encoding=self.encoding, errors=self.errors)  # noqa: PTH123

"""Keeps the model told of texts that its replies may copy from: open documents as they are, files that agents read and edit.

A file of a task goes by the task's id and the path, a document by its path, so neither takes the other's place. Everything runs
on the event loop and nobody waits for it: of several changes of one text that are still to be told, the last one is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from ..engine.chat import ChatModel, ModelError, SourceKind
from .text import TextError, decode
from .workspace import Workspace

log = logging.getLogger(__name__)


class _Offer(NamedTuple):
    text: str | bytes | None
    """None: the text is of no use any more."""
    kind: SourceKind


class DraftFeed:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._model: ChatModel | None = None
        self._pending: dict[str, _Offer] = {}
        self._sender: asyncio.Task[None] | None = None
        self._of_task: dict[str, set[str]] = {}
        workspace.subscribe(self._document_changed)

    def attach(self, model: ChatModel) -> None:
        """Tell `model` of all open documents and of every change from here on. No effect for the model that is told already."""
        if model is not self._model:
            self._model = model
            self._pending.clear()
            for path in self._workspace.paths():
                self._document_changed(path)

    def add_file(self, task_id: str, path: str, data: bytes) -> None:
        """An agent read or wrote this."""
        name = f"{task_id}:{path}"
        self._of_task.setdefault(task_id, set()).add(name)
        self._offer(name, _Offer(data, "agent"))

    def drop_task(self, task_id: str) -> None:
        """The task is over: what it made of its files is in the user's, or nowhere."""
        for name in self._of_task.pop(task_id, ()):
            self._offer(name, _Offer(None, "agent"))

    async def close(self) -> None:
        self._model = None
        if self._sender is not None:
            self._sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sender

    def _document_changed(self, path: Path) -> None:
        document = self._workspace.live(path)
        self._offer(str(path), _Offer(None if document is None else document.text, "document"))

    def _offer(self, name: str, offer: _Offer) -> None:
        if self._model is None:
            return
        self._pending[name] = offer
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._pending and self._model is not None:
            name = next(iter(self._pending))
            text, kind = self._pending.pop(name)
            try:
                if isinstance(text, bytes):
                    text = decode(text).normalised
                if text is None:
                    await self._model.remove_source(name)
                else:
                    await self._model.update_source(name, text, kind)
            except (ModelError, TextError) as error:  # binary, or no text that a model could write
                log.info("no drafts from %s: %s", name, error.message)
                await self._model.remove_source(name)

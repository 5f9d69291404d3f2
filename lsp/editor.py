"""The editor at the other end of a connection: the documents it holds, fed into the workspace, and the edits asked of it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from lsprotocol import types
from pygls.exceptions import JsonRpcException

from ..agent_tasks.workspace import Workspace
from .documents import Documents
from .protocol import ConnectionProtocol
from .workspace_edit import workspace_edit

logger = logging.getLogger(__name__)

APPLY_EDIT_TIMEOUT_S = 20.0
SYNC_TIMEOUT_S = 2.0


class ConnectedEditor:
    """Implements agent_tasks.workspace.Editor."""

    def __init__(self, protocol: ConnectionProtocol, workspace: Workspace) -> None:
        self._protocol = protocol
        self._workspace = workspace
        self._documents = Documents()
        self._changed = asyncio.Event()
        self._is_versioned = False
        self._name = "editor"

    @property
    def name(self) -> str:
        return self._name

    def initialize(self, params: types.InitializeParams) -> None:
        if params.client_info is not None:
            self._name = f"{params.client_info.name} {params.client_info.version or ''}".strip()
        edits = params.capabilities.workspace and params.capabilities.workspace.workspace_edit
        self._is_versioned = bool(edits and edits.document_changes)

    def open(self, params: types.DidOpenTextDocumentParams) -> None:
        document = self._documents.open(params.text_document)
        if document is not None:
            self._workspace.open(document.path, document.text, document.version, self)

    def change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self._documents.change(params, self._encoding)
        if document is not None:
            self._workspace.change(document.path, document.text, document.version, self)
            self._changed.set()

    def close(self, params: types.DidCloseTextDocumentParams) -> None:
        document = self._documents.close(params.text_document.uri)
        if document is not None:
            self._workspace.close(document.path, self)

    def leave(self) -> None:
        """The connection ended: what counts of its files is the disk, or another editor."""
        self._workspace.close_all(self)

    async def apply_edit(self, path: Path, base_version: int, new_text: str, label: str) -> bool:
        document = self._documents.at(path)
        if document is None or document.version != base_version:
            return False
        # A line diff of a large file takes a while, and editors are waiting for answers on this thread.
        edit = await asyncio.to_thread(workspace_edit, document, new_text, self._encoding, versioned=self._is_versioned)
        if self._documents.at(path) is not document:
            return False
        params = types.ApplyWorkspaceEditParams(edit, label=label)
        try:
            result = await self._protocol.ask(types.WORKSPACE_APPLY_EDIT, params, APPLY_EDIT_TIMEOUT_S)
        except (JsonRpcException, ConnectionError, TimeoutError) as error:
            logger.warning("%s did not apply an edit to %s: %s", self.name, path, error or type(error).__name__)
            return False
        if result.applied and document.text != new_text:
            await self._wait_for_change(path, base_version)
        return bool(result.applied)

    async def _wait_for_change(self, path: Path, version: int) -> None:
        """Editors report the edit as a change of theirs; the next merge must start from it."""
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                while (document := self._documents.at(path)) is not None and document.version == version:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("%s applied an edit to %s but did not report the change", self.name, path)

    @property
    def _encoding(self) -> str:
        encoding = self._protocol.server_capabilities.position_encoding
        return str(getattr(encoding, "value", encoding) or "utf-16")

"""Editors over the installed `quadjet lsp`, as VS Code and Neovim describe themselves, on a daemon with a scripted model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from editor_client import Home, fresh_home, make_repository, running_daemon, script
from lsprotocol import types
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

QUADJET = str(Path(sys.executable).with_name("quadjet"))
BEFORE = "# \U0001f600 caf\u00e9\ndef one():\n    return 1  # \U0001f600\n"
AFTER = BEFORE.replace("return 1", "return 9")


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with fresh_home() as found, running_daemon(found):
        make_repository(found.folder / "repo", {"one.py": BEFORE})
        yield found


@pytest.fixture(params=["visual-studio-code", "neovim"])
async def client(home: Home, request: pytest.FixtureRequest) -> AsyncIterator[LanguageClient]:
    config = ClientServerConfig(server_command=[QUADJET, "lsp"], server_env=home.env)
    client = cast(LanguageClient, await config.start())
    folder = types.WorkspaceFolder((home.folder / "repo").as_uri(), "repo")
    params = types.InitializeParams(client_capabilities(request.param), workspace_folders=[folder])
    client.initialize_result = await client.initialize_session(params)  # type: ignore[attr-defined]
    yield client
    await client.shutdown_session()
    await client.stop()  # type: ignore[no-untyped-call]


async def request(client: LanguageClient, method: str, **params: Any) -> Any:
    return await asyncio.wait_for(client.protocol.send_request_async(method, params), 60)  # type: ignore[no-untyped-call]


def decoded(text: str, edit: types.TextEdit, encoding: str) -> tuple[str, str, str]:
    """Text before the edit, the new text, text after it."""
    codec, width = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2)}[encoding]
    lines = text.splitlines(keepends=True)

    def before(position: types.Position) -> str:
        line = lines[position.line] if position.line < len(lines) else ""
        return "".join(lines[: position.line]) + line.encode(codec)[: position.character * width].decode(codec)

    return before(edit.range.start), edit.new_text, text[len(before(edit.range.end)) :]


async def test_from_code_action_to_accepted_edit(home: Home, client: LanguageClient) -> None:
    uri = (home.folder / "repo" / "one.py").as_uri()
    edits: list[types.WorkspaceEdit] = []
    finished = asyncio.Event()

    @client.feature(types.WORKSPACE_APPLY_EDIT)  # type: ignore[untyped-decorator]
    def apply_edit(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
        edits.append(params.edit)
        whole = types.TextDocumentContentChangeWholeDocument(AFTER)
        client.text_document_did_change(types.DidChangeTextDocumentParams(types.VersionedTextDocumentIdentifier(2, uri), [whole]))
        return types.ApplyWorkspaceEditResult(applied=True)

    @client.feature("agent/taskEvent")  # type: ignore[untyped-decorator]
    def on_event(params: Any) -> None:
        if params.type == "state" and params.data.state in ("proposed", "failed", "needs-you"):
            finished.set()

    item = types.TextDocumentItem(uri, "python", 1, BEFORE)
    client.text_document_did_open(types.DidOpenTextDocumentParams(item))
    span = types.Range(types.Position(1, 0), types.Position(2, 3))
    context = types.CodeActionContext(diagnostics=[])
    offered = await client.text_document_code_action_async(
        types.CodeActionParams(types.TextDocumentIdentifier(uri), span, context)
    )
    # lsprotocol reads a code action that carries a command as that command with a garbled name: the titles must do here.
    assert [action.title for action in offered or []] == ["Quadjet: clean up this file", "Quadjet: clean up the selection"]

    argument = {"kind": "cleanup", "uri": uri, "instruction": script({"edit": ["one.py", "return 1", "return 9"]})}
    answer: Any = await client.workspace_execute_command_async(types.ExecuteCommandParams("quadjet.sendToAgent", [argument]))
    await request(client, "agent/subscribe", taskId=answer["taskId"], afterSeq=0)
    await asyncio.wait_for(finished.wait(), 60)
    result = await request(client, "agent/accept", taskId=answer["taskId"])
    assert result.task.state == "accepted"

    initialized: types.InitializeResult = client.initialize_result  # type: ignore[attr-defined]
    encoding = str(getattr(initialized.capabilities.position_encoding, "value", initialized.capabilities.position_encoding))
    (edit,) = edits
    assert edit_of(edit, uri, encoding) == AFTER
    assert {type(value).__name__ for reports in client.progress_reports.values() for value in reports} >= {
        "WorkDoneProgressBegin",
        "WorkDoneProgressEnd",
    }
    assert any("done" in message.message for message in client.messages)


def edit_of(edit: types.WorkspaceEdit, uri: str, encoding: str) -> str:
    """The text after the edit, which must come in the form that the profile declares."""
    if encoding == "utf-8":  # Neovim: no documentChanges
        assert edit.document_changes is None
        assert edit.changes is not None
        changes: list[object] = list(edit.changes[uri])
    else:
        assert edit.changes is None
        assert edit.document_changes is not None
        (document,) = edit.document_changes
        assert isinstance(document, types.TextDocumentEdit)
        assert (document.text_document.uri, document.text_document.version) == (uri, 1)
        changes = list(document.edits)
    (change,) = changes
    assert isinstance(change, types.TextEdit)
    return "".join(decoded(BEFORE, change, encoding))


async def test_the_bridge_starts_the_daemon_and_a_client_ends_it() -> None:
    with fresh_home() as home:
        config = ClientServerConfig(server_command=[QUADJET, "lsp"], server_env=home.env)
        client = cast(LanguageClient, await config.start())
        await client.initialize_session(types.InitializeParams(client_capabilities("visual-studio-code")))
        assert (await request(client, "agent/status")).model.loaded is False
        assert home.places.socket.exists()
        await request(client, "quadjet/stop")
        async with asyncio.timeout(20):
            while await asyncio.to_thread(home.places.socket.exists):
                await asyncio.to_thread(time.sleep, 0.05)
        await client.stop()  # type: ignore[no-untyped-call]


async def test_untitled_documents_are_refused_and_unknown_methods_named(client: LanguageClient) -> None:
    argument = {"kind": "cleanup", "uri": "untitled:Untitled-1"}
    with pytest.raises(Exception, match="never saved"):
        await client.workspace_execute_command_async(types.ExecuteCommandParams("quadjet.sendToAgent", [argument]))
    with pytest.raises(Exception, match="agent/nothing"):
        await request(client, "agent/nothing")

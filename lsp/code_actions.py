"""Tasks in the editor's own lightbulb and refactor menus: each action is the command that sends the document to an agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lsprotocol import converters, types

from ..agent_tasks.task import TaskKind
from . import messages
from .documents import NotAFileError, to_lines, uri_to_path
from .protocol import Json

CLEANUP_SELECTION = "refactor.rewrite.quadjet.cleanup"
CLEANUP_FILE = "source.quadjet.cleanup"
TRIAGE = "quickfix.quadjet.triage"
_TITLE_CHARS = 60


def code_actions(
    params: types.CodeActionParams, capabilities: types.ClientCapabilities
) -> list[types.CodeAction] | list[types.Command]:
    """Clean-up of the file or a selection, triage of the diagnostics here. Bare commands for clients that know no more."""
    try:
        uri_to_path(params.text_document.uri)
    except NotAFileError:
        return []
    actions = [action for action in _offers(params) if _is_wanted(str(action.kind), params.context.only)]
    document = capabilities.text_document
    if document is not None and document.code_action is not None and document.code_action.code_action_literal_support is not None:
        return actions
    return [action.command for action in actions if action.command is not None]


def _offers(params: types.CodeActionParams) -> list[types.CodeAction]:
    uri = params.text_document.uri
    offers = [_action("Quadjet: clean up this file", CLEANUP_FILE, {"kind": TaskKind.CLEANUP.value, "uri": uri})]
    if to_lines(params.range) is not None:
        arguments = {"kind": TaskKind.CLEANUP.value, "uri": uri, "range": _plain(params.range)}
        offers.append(_action("Quadjet: clean up the selection", CLEANUP_SELECTION, arguments))
    found = params.context.diagnostics
    if found:
        message = str(getattr(found[0].message, "value", found[0].message)).splitlines() or [""]
        title = f"Quadjet: find the cause of: {message[0][:_TITLE_CHARS]}"
        arguments = {"kind": TaskKind.TRIAGE.value, "uri": uri, "range": _plain(params.range), "diagnostics": _plain(found)}
        offers.append(_action(title, TRIAGE, arguments))
    return offers


def _action(title: str, kind: str, argument: dict[str, Any]) -> types.CodeAction:
    return types.CodeAction(title, kind, command=types.Command(title, messages.SEND_TO_AGENT, arguments=[argument]))


def _is_wanted(kind: str, only: Iterable[types.CodeActionKind | str] | None) -> bool:
    """LSP's rule: a kind asked for includes the kinds below it."""
    return not only or any(
        kind == wanted or kind.startswith(f"{wanted}.") for wanted in (str(getattr(k, "value", k)) for k in only)
    )


def _plain(value: object) -> Json:
    return converters.get_converter().unstructure(value)

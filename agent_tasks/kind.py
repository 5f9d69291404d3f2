"""What a kind of task is: harness work before the model, tools for the model, a gate after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..engine.chat import Message
from .agent import Ending
from .task import Card
from .tools import Toolbox
from .workbench import Workbench


@dataclass(frozen=True, slots=True)
class Plan:
    """`facts` is plain JSON, kept in the journal: a task that goes on later gets it back and is not prepared again.

    No messages: there is nothing for a model to do.
    """

    facts: dict[str, Any]
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`paths`: files of the worktree, as they are, that make the proposal. `feedback`: what a model that goes on must know."""

    card: Card
    paths: tuple[str, ...] = ()
    feedback: str = ""


class Kind(Protocol):
    async def prepare(self, bench: Workbench) -> Plan:
        """In a fresh worktree. Raises TaskError when the task cannot be done at all."""
        ...

    def toolbox(self, bench: Workbench, facts: dict[str, Any]) -> Toolbox: ...

    async def verify(self, bench: Workbench, facts: dict[str, Any], ending: Ending) -> Verdict:
        """Run the gate. Edits that do not pass are taken back in the worktree, so that what is left is what may be proposed."""
        ...

"""The kinds of tasks there are."""

from __future__ import annotations

from .kind import Kind
from .kind_cleanup import Cleanup
from .kind_triage import Triage
from .task import TaskKind

KINDS: dict[TaskKind, Kind] = {TaskKind.CLEANUP: Cleanup(), TaskKind.TRIAGE: Triage()}

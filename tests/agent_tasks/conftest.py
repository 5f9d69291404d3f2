"""Repositories for tests of tasks."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from task_harness import make_repository


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """The bundled sample project as a git repository."""
    with as_file(files("quadjet.agent_tasks") / "sample") as source:
        shutil.copytree(source, tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    return make_repository(tmp_path / "shop", {})


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where journal and worktrees go."""
    return tmp_path / "state"

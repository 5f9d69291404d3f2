"""The import arrows between the folders, read from the sources: kernels <- engine <- agent_tasks <- lsp <- daemon."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": set[str](),
    "engine": {"kernels"},
    "agent_tasks": {"engine"},
    "lsp": {"agent_tasks"},
    "daemon": {"kernels", "engine", "agent_tasks", "lsp"},
}
SOURCES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module in inner_imports(path):
        target, _, name = module.partition(".")
        assert target in MAY_IMPORT[folder] | {folder}, f"{folder} may not import {target}"
        if (folder, target) == ("agent_tasks", "engine"):
            assert name == "chat", "agent_tasks sees the engine only through engine/chat.py"


def test_the_check_sees_relative_and_absolute_imports(tmp_path: Path) -> None:
    source = tmp_path / "lsp" / "x.py"
    source.parent.mkdir()
    source.write_text("from ..engine.chat import Message\nfrom ..kernels import abi\nfrom . import documents\nimport json\n")
    assert inner_imports(source, tmp_path) == ["engine.chat", "kernels.abi", "lsp.documents"]
    source.write_text("import quadjet.engine.chat\n")
    with pytest.raises(AssertionError, match="relative"):
        inner_imports(source, tmp_path)


def inner_imports(path: Path, root: Path = ROOT) -> list[str]:
    """The dotted names, from the folder on, of everything of ours that a file imports."""
    package = path.relative_to(root).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "quadjet" for alias in node.names), (
                "imports inside the folders are relative"
            )
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "quadjet", "imports inside the folders are relative"
            if node.level:
                base = [*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split("."))]
                names = [alias.name for alias in node.names] if len(base) <= 1 else [""]
                found += [".".join(filter(None, (*base, name))) for name in names]
    return found

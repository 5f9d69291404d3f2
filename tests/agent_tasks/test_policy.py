"""The path jail, protected, secret and flagged names, and the verdict on commands."""

import shlex
from pathlib import Path

import pytest
from quadjet.agent_tasks.policy import (
    PolicyError,
    Verdict,
    check_command,
    check_path,
    flag_reason,
    protected_reason,
    secret_reason,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a.py").write_text("x\n")
    (tmp_path / "outside.txt").write_text("secret\n")
    (tree / "escape").symlink_to(tmp_path)
    (tree / "absolute").symlink_to("/etc/passwd")
    (tree / "inner").symlink_to("src")
    (tree / "link.py").symlink_to("src/a.py")
    (tree / "loop").symlink_to("loop")
    (tree / "innocent").symlink_to(".env")
    (tree / "hidden").symlink_to(".git")
    (tree / "dangling").symlink_to("../new")
    return tree


def test_paths_inside_are_allowed(tree: Path) -> None:
    assert check_path(tree, "src/a.py", write=True) == tree / "src/a.py"
    assert check_path(tree, tree / "src/new.py", write=True) == tree / "src/new.py"
    assert check_path(tree, "src/../src/a.py", write=False) == tree / "src/a.py"
    assert check_path(tree, "inner/a.py", write=True) == tree / "src/a.py"
    assert check_path(tree, "link.py", write=False) == tree / "src/a.py"
    assert check_path(tree, ".", write=False) == tree


@pytest.mark.parametrize(
    "path",
    [
        *[
            "../outside.txt",
            "src/../../outside.txt",
            "/etc/passwd",
            "escape/outside.txt",
            "escape",
            "absolute",
            "dangling",
            "loop",
        ],
        *["", " ", "a\0b", "..", "/", "escape/../../x", "inner/../../outside.txt"],
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_paths_that_leave_the_tree_are_refused(tree: Path, path: str, write: bool) -> None:
    with pytest.raises(PolicyError):
        check_path(tree, path, write=write)


def test_a_symlink_itself_is_not_written(tree: Path) -> None:
    with pytest.raises(PolicyError, match="symbolic link"):
        check_path(tree, "link.py", write=True)


PROTECTED = [
    *[
        ".git",
        ".git/config",
        ".git/hooks/pre-commit",
        "sub/.git/config",
        ".vscode/settings.json",
        ".idea/x",
        ".zed/settings.json",
    ],
    *[".cursor/mcp.json", ".claude/settings.json", ".github/workflows/ci.yml", ".envrc", ".pre-commit-config.yaml", ".mcp.json"],
    *["AGENTS.md", "CLAUDE.md", "docs/AGENTS.md", "quadjet.toml", ".gitmodules", ".husky/pre-commit"],
    *[".GIT/config", ".Git/hooks/x", ".VSCode/settings.json", ".github/WorkFlows/x.yml", "Agents.MD", "GIT~1/config"],
    *[
        ".git./config",
        ".git /config",
        ".git::$INDEX_ALLOCATION/config",
        ".g\u200dit/config",
        ".gi\u200ct/hooks/x",
        "\uff0egit/config",
    ],
    *[".vscode\u2060/x", "hidden/config", "new/../.git/config"],
]


@pytest.mark.parametrize("path", PROTECTED)
def test_protected_paths_are_never_written_whether_they_exist_or_not(tree: Path, path: str) -> None:
    with pytest.raises(PolicyError, match=r"may not be changed|symbolic link"):
        check_path(tree, path, write=True)


SECRETS = [
    *[
        ".env",
        ".env.local",
        "config/.env.production",
        "prod.env",
        ".ENV",
        ".env\u200b",
        "id_rsa",
        "keys/id_ed25519",
        "server.pem",
    ],
    *["tls.KEY", ".netrc", ".ssh/config", ".aws/credentials", ".npmrc", "a.p12", "innocent", ".env "],
]


@pytest.mark.parametrize("path", SECRETS)
@pytest.mark.parametrize("write", [False, True])
def test_secrets_are_neither_read_nor_written(tree: Path, path: str, write: bool) -> None:
    with pytest.raises(PolicyError, match=r"not for agents|symbolic link"):
        check_path(tree, path, write=write)


@pytest.mark.parametrize(
    "path", [".env.example", "environment.py", "src/keys.py", "env/x.py", "monkey.py", ".gitignore", "git/x", "env"]
)
def test_ordinary_names_are_not_mistaken(path: str) -> None:
    assert not secret_reason(Path(path))
    assert not protected_reason(Path(path))


@pytest.mark.parametrize(
    "name", ["conftest.py", "tests/conftest.py", "setup.py", "package.json", "Makefile", "x.pth", "run.sh", "CLAUDE.md"]
)
def test_files_that_run_are_flagged(name: str) -> None:
    assert flag_reason(Path(name))
    assert not flag_reason(Path("src/a.py"))


@pytest.mark.parametrize(
    ("command", "verdict"),
    [
        ("pytest -q tests", Verdict.ALLOW),
        ("python -m pytest", Verdict.ALLOW),
        ("python3.12 -m unittest", Verdict.ALLOW),
        (".venv/bin/ruff check .", Verdict.ALLOW),
        ("git diff HEAD", Verdict.ALLOW),
        ("rm -rf build", Verdict.ALLOW),
        ("sh -c 'pytest -q | tail -3'", Verdict.ALLOW),
        ("env A=1 timeout 20 pytest", Verdict.ALLOW),
        ("npm test", Verdict.ALLOW),
        ("curl http://x", Verdict.DENY),
        ("/usr/bin/wget x", Verdict.DENY),
        ("git push", Verdict.DENY),
        ("git -c alias.x=!sh x", Verdict.DENY),
        ("git", Verdict.DENY),
        ("sudo pytest", Verdict.DENY),
        ("env sudo pytest", Verdict.DENY),
        ("timeout 5 nice -n 3 curl x", Verdict.DENY),
        ("sh -c 'pytest; curl x'", Verdict.DENY),
        ("bash -ec 'A=1 git push'", Verdict.DENY),
        ("bash -c 'cd x && sudo ls'", Verdict.DENY),
        ("rm -rf /", Verdict.DENY),
        ("rm -rf ~/x", Verdict.DENY),
        ("rm -r ../other", Verdict.DENY),
        ("pip install x", Verdict.DENY),
        ("python -m pip install x", Verdict.DENY),
        ("npm ci", Verdict.DENY),
        ("sh -c 'echo $(curl x)'", Verdict.ASK),
        ("sh -c 'unbalanced \"'", Verdict.DENY),
        ("bash script.sh", Verdict.ASK),
        ("unknown-tool", Verdict.ASK),
        ("env", Verdict.ASK),
    ],
)
def test_commands_are_judged(command: str, verdict: Verdict) -> None:
    assert check_command(shlex.split(command, posix=True)).verdict is verdict


@pytest.mark.parametrize("argv", [[], [""], ["a\0b"]])
def test_empty_commands_are_denied(argv: list[str]) -> None:
    assert check_command(argv).verdict is Verdict.DENY

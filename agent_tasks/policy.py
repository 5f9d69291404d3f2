"""What an agent may touch: a path jail, protected, secret and flagged names, and a verdict on commands.

Names are compared as the most forgiving file system would see them, so look-alikes of a protected name are protected too.
The verdict on commands keeps an agent from wasting turns; what keeps the machine safe is the sandbox.
"""

from __future__ import annotations

import itertools
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path, PurePosixPath

from .errors import TaskError

_PROTECTED_FOLDERS = {".git", ".vscode", ".idea", ".zed", ".cursor", ".claude", ".codex", ".gemini", ".quadjet", ".husky"}
_PROTECTED_FILES = {
    *{".envrc", ".pre-commit-config.yaml", ".pre-commit-config.yml", ".mcp.json", ".gitmodules", ".gitconfig", "quadjet.toml"},
    *{"agents.md", "agents.override.md", "claude.md", "claude.local.md", "gemini.md"},
    *{".cursorrules", ".windsurfrules", ".clinerules", "copilot-instructions.md"},
}
_PROTECTED_PAIRS = {(".github", "workflows"), (".github", "actions"), (".config", "git")}

_SECRET_FOLDERS = {".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store"}
_SECRET_FILES = {
    *{".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc", ".htpasswd", "credentials.json", ".vault-token"},
    *{"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "secrets.yaml", "secrets.yml", "secrets.toml", "secrets.json"},
}
_SECRET_SUFFIXES = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".ppk", ".kdbx", ".tfstate")
_SECRET_SAMPLES = (".example", ".sample", ".template", ".dist")

_FLAGGED = {
    "conftest.py": "pytest runs it before every test",
    "sitecustomize.py": "Python runs it at every start",
    "usercustomize.py": "Python runs it at every start",
    "setup.py": "it runs at installation",
    "setup.cfg": "it configures the build and the tools",
    "pyproject.toml": "it configures the build and the tools",
    "tox.ini": "it names commands to run",
    "noxfile.py": "it names commands to run",
    "pytest.ini": "it configures the tests",
    "package.json": "its scripts run at installation",
    "makefile": "it names commands to run",
    "gnumakefile": "it names commands to run",
    "justfile": "it names commands to run",
    "rakefile": "it names commands to run",
    "cmakelists.txt": "it configures the build",
    "build.rs": "it runs at every build",
    "build.gradle": "it configures the build",
    "build.gradle.kts": "it configures the build",
    "dockerfile": "it names commands to run",
    "docker-compose.yml": "it names commands to run",
    "jenkinsfile": "it names commands to run",
    ".gitlab-ci.yml": "it names commands to run",
    ".gitattributes": "it changes how git treats files",
    ".gitignore": "it hides files from git",
}
_FLAGGED_SUFFIXES = {".pth": "Python runs it at every start", ".sh": "it is a script", ".bat": "it is a script"}


class PolicyError(TaskError):
    """The path or the command is not for agents."""


class Verdict(StrEnum):
    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class CommandVerdict:
    verdict: Verdict
    reason: str = ""


def check_path(worktree: Path, path: str | Path, write: bool) -> Path:
    """The real path below `worktree` that `path` (relative to it, or absolute and inside) leads to.

    PolicyError when it leaves the worktree by "..", an absolute path or a symlink, names a secret, or, for writing, a protected
    file or a symlink itself. The file need not exist.
    """
    text = str(path)
    if not text.strip() or "\0" in text:
        raise PolicyError("the path is empty or holds a NUL character", "give a path relative to the workspace folder")
    root = worktree.resolve()
    try:
        wanted = root / path
        real = wanted.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: characters that no file name can hold
        raise PolicyError(f"{text} cannot be followed: {error}", "give a path relative to the workspace folder") from error
    lexical = Path(*_collapse(wanted))
    if not real.is_relative_to(root) or not lexical.is_relative_to(root):
        raise PolicyError(f"{text} leads outside the workspace folder", "give a path inside it")
    for form in {real.relative_to(root), lexical.relative_to(root)}:
        if reason := secret_reason(form):
            raise PolicyError(f"{text} is not for agents: {reason}", "do this step by hand")
        if write and (reason := protected_reason(form)):
            raise PolicyError(f"{text} may not be changed by agents: {reason}", "change it by hand")
    if write and wanted.is_symlink():
        raise PolicyError(f"{text} is a symbolic link", "change the file it points to")
    return real


def protected_reason(path: Path | PurePosixPath) -> str:
    """Why agents never write the relative `path`, existing or not; empty when they may."""
    names = [_canonical(part) for part in path.parts]
    for name in names:
        if name in _PROTECTED_FOLDERS or name == "git~1":
            return f"{name} steers git, an editor or an agent"
    if any(pair in _PROTECTED_PAIRS for pair in itertools.pairwise(names)):
        return "it steers what runs on servers or in git"
    if names and names[-1] in _PROTECTED_FILES:
        return f"{names[-1]} steers git, an editor or an agent"
    return ""


def secret_reason(path: Path | PurePosixPath) -> str:
    """Why agents neither read nor write the relative `path`; empty when they may."""
    names = [_canonical(part) for part in path.parts]
    if any(name in _SECRET_FOLDERS for name in names):
        return "its folder holds credentials"
    name = names[-1] if names else ""
    if name.endswith(_SECRET_SAMPLES):
        return ""
    if name == ".env" or name.startswith(".env.") or (name.endswith(".env") and name != ".env"):
        return "it usually holds secrets"
    if name in _SECRET_FILES or name.endswith(_SECRET_SUFFIXES):
        return "it usually holds keys or passwords"
    return ""


def flag_reason(path: Path | PurePosixPath) -> str:
    """Why a change to `path` deserves a second look; empty when it does not."""
    name = _canonical(path.name)
    if reason := protected_reason(PurePosixPath(path.name)):
        return reason
    return _FLAGGED.get(name) or _FLAGGED_SUFFIXES.get(PurePosixPath(name).suffix, "")


_NETWORK = {
    *{"curl", "wget", "ssh", "scp", "sftp", "rsync", "nc", "ncat", "netcat", "socat", "telnet", "ftp", "ping", "dig", "gh"},
}
_SYSTEM = {
    *{"sudo", "su", "doas", "pkexec", "mount", "umount", "chroot", "unshare", "nsenter", "bwrap", "docker", "podman"},
    *{"systemctl", "shutdown", "reboot", "halt", "poweroff", "mkfs", "dd", "modprobe", "iptables", "crontab", "kill"},
    *{"killall", "pkill", "apt", "apt-get", "dnf", "yum", "pacman", "brew", "snap"},
}
_INSTALLERS = {
    "pip": {"install", "download", "uninstall"},
    "uv": {"add", "sync", "pip", "tool"},
    "poetry": {"add", "install", "update", "publish"},
    "npm": {"install", "i", "ci", "add", "publish", "update"},
    "yarn": {"add", "install", "publish"},
    "pnpm": {"add", "install", "i", "publish"},
    "cargo": {"install", "add", "publish"},
    "gem": {"install", "push"},
    "go": {"get", "install"},
}
_GIT_READS = {"diff", "status", "log", "show", "blame", "ls-files", "grep", "rev-parse", "describe", "cat-file", "ls-tree"}
_KNOWN = {
    *{"pytest", "ruff", "mypy", "pyright", "black", "isort", "flake8", "pylint", "coverage", "tox", "nox", "python", "pip", "uv"},
    *{"node", "npm", "npx", "yarn", "pnpm", "tsc", "eslint", "prettier", "jest", "vitest", "go", "cargo", "rustc", "make"},
    *{"cmake", "ninja", "ctest", "gcc", "g++", "clang", "javac", "java", "mvn", "gradle"},
    *{
        "ls",
        "cat",
        "head",
        "tail",
        "wc",
        "grep",
        "rg",
        "find",
        "sort",
        "uniq",
        "cut",
        "tr",
        "diff",
        "cmp",
        "file",
        "stat",
        "tree",
    },
    *{"echo", "printf", "true", "false", "test", "sed", "awk", "pwd", "which", "date", "mkdir", "cp", "mv", "touch", "rm", "git"},
}
_WRAPPERS = {"env", "nice", "nohup", "timeout", "time", "command", "exec", "stdbuf", "setsid", "xargs", "busybox", "builtin"}
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", "{", "}", "|&", "do", "then", "else", "!"}


def check_command(argv: Sequence[str]) -> CommandVerdict:
    """Deny before ask before allow. Wrappers (env, timeout, sh -c, ...) are looked into; what cannot be looked into is asked."""
    if not argv or not argv[0] or any("\0" in word for word in argv):
        return CommandVerdict(Verdict.DENY, "the command is empty or holds a NUL character")
    program, rest = Path(argv[0]).name.lower(), list(argv[1:])
    if program in _WRAPPERS:
        return _unwrap(program, rest)
    if program in _SHELLS:
        return _check_shell(program, rest)
    if reason := _denied(program, rest):
        return CommandVerdict(Verdict.DENY, reason)
    if _base_name(program) in _KNOWN:
        return CommandVerdict(Verdict.ALLOW)
    return CommandVerdict(Verdict.ASK, f"{program} is not a known tool")


def _denied(program: str, rest: list[str]) -> str:
    words, base = [word for word in rest if not word.startswith("-")], _base_name(program)
    if base == "python" and rest[:1] == ["-m"] and len(rest) > 1:
        return _denied(rest[1], rest[2:])
    if program in _NETWORK or (words and words[0] in _INSTALLERS.get(base, ())):
        return f"{' '.join([program, *words[:1]])} needs the network, which commands do not have"
    if program in _SYSTEM:
        return f"{program} acts on the system, not on the workspace"
    if program == "git" and not (words and words[0] in _GIT_READS):
        return "git may only read here: " + ", ".join(sorted(_GIT_READS))
    if program == "rm" and any(word in ("*", ".", "..") or word.startswith(("/", "~", "../")) for word in words):
        return "it removes the whole workspace folder, or something outside"
    return ""


def _unwrap(program: str, rest: list[str]) -> CommandVerdict:
    """The verdict on what a wrapper starts: the first word that is no option, number or assignment."""
    for index, word in enumerate(rest):
        if word.startswith("-") or "=" in word.split("/")[0] or word[:1].isdigit():
            continue
        return check_command(rest[index:])
    return CommandVerdict(Verdict.ASK, f"{program} names no command")


def _check_shell(program: str, rest: list[str]) -> CommandVerdict:
    flags = [word for word in rest if word.startswith("-")]
    if not any(flag.lstrip("-").endswith("c") and not flag.startswith("--") for flag in flags):
        return CommandVerdict(Verdict.ASK, f"{program} runs a script that was not looked into")
    script = next((word for word in rest if not word.startswith("-")), "")
    if any(mark in script for mark in ("$(", "`", "<(", ">(", "${", "eval ")):
        return CommandVerdict(Verdict.ASK, "the shell text substitutes commands, so it cannot be judged")
    try:
        lexer = shlex.shlex(script.replace("\n", " ; "), posix=True, punctuation_chars=True)
        words = list(lexer)
    except ValueError as error:
        return CommandVerdict(Verdict.DENY, f"the shell text does not parse: {error}")
    verdicts = [check_command(part) for part in _split(words)]
    for verdict in (Verdict.DENY, Verdict.ASK):
        if found := next((item for item in verdicts if item.verdict is verdict), None):
            return found
    return CommandVerdict(Verdict.ALLOW) if verdicts else CommandVerdict(Verdict.DENY, "the shell text is empty")


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in _SEPARATORS:
            parts.append([])
        elif parts[-1] or "=" not in word:  # leading assignments are not the command
            parts[-1].append(word)
    return [part for part in parts if part]


def _base_name(program: str) -> str:
    """python3.12 -> python, pip3 -> pip."""
    return program.rstrip("0123456789.") or program


def _collapse(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if len(parts) > 1:
                parts.pop()
        else:
            parts.append(part)
    return parts


@lru_cache(maxsize=4096)
def _canonical(name: str) -> str:
    """A name as a file system sees it that folds case, composes accents, and drops invisible characters and trailing dots."""
    if name.isascii():
        visible = name
    else:
        visible = "".join(char for char in unicodedata.normalize("NFKC", name) if unicodedata.category(char) != "Cf")
    return visible.casefold().split(":", 1)[0].rstrip(" .") or name

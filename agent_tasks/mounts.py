"""What a command sees in the sandbox: bubblewrap's options for the system, the worktree, and folders shown read-only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_HOME = "/tmp/home"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_EXTRA = ("/opt", "/nix/store", "/gnu/store")
_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "os-release", "debian_version"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "mime.types", "nsswitch.conf", "fonts", "python3", "magic", "terminfo"),
)
_UID = 1000
MADE_UP = {
    "/etc/passwd": f"agent:x:{_UID}:{_UID}::{_HOME}:/bin/sh\n".encode(),
    "/etc/group": f"agent:x:{_UID}:\n".encode(),
    "/etc/hosts": b"127.0.0.1 localhost\n::1 localhost\n",
}
"""Files of which the system's own would tell too much."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """What a command sees beside the system and its worktree."""

    shown_at: Path | None = None
    """The worktree appears here as well and commands run here: the user's own path, which virtual environments hold."""
    readable: tuple[Path, ...] = ()
    """Absolute paths shown read-only where they are."""
    inside: tuple[tuple[Path, str], ...] = ()
    """(source, relative path): shown read-only inside the worktree."""


def isolation(made_up: Sequence[tuple[int, str]], max_tmp_bytes: int) -> list[str]:
    """Options for everything but the worktree: namespaces, the read-only system, an empty home, a clean environment.

    `made_up`: descriptors of files and where they appear.
    """
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(_UID), "--gid", str(_UID)]
    options += ["--hostname", "quadjet", "--new-session", "--die-with-parent", "--cap-drop", "ALL", "--clearenv"]
    for folder in _SYSTEM:
        path = Path(folder)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), folder]
        elif path.is_dir():
            options += ["--ro-bind", folder, folder]
    for folder in (*_SYSTEM_EXTRA, *(f"/etc/{name}" for name in _ETC)):
        options += ["--ro-bind-try", folder, folder]
    for descriptor, target in made_up:
        options += ["--ro-bind-data", str(descriptor), target]
    # For root the files of /proc/sys stay writable without any capability, and some of them run programs outside.
    options += ["--proc", "/proc", "--remount-ro", "/proc"]
    options += ["--dev", "/dev", "--size", str(max_tmp_bytes), "--tmpfs", "/tmp"]
    options += ["--dir", _HOME, "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp"]
    return options


def view(worktree: Path, mounts: Mounts, readable: Sequence[Path]) -> list[str]:
    """Options for the mounts of the workspace, outer folders before inner ones, and the environment that goes with them."""
    places = [worktree, *([mounts.shown_at] if mounts.shown_at else [])]
    wanted = [("--bind", worktree, place) for place in places]
    wanted += [("--ro-bind", source, place / name) for source, name in mounts.inside for place in places]
    wanted += [("--ro-bind", path, path) for path in (*mounts.readable, *readable) if path.exists()]
    unique = {target: (option, source) for option, source, target in reversed(wanted)}
    options: list[str] = []
    for target in sorted(unique, key=lambda path: len(path.parts)):
        option, source = unique[target]
        options += [option, str(source), str(target)]
    for name, value in _environment(places[-1], mounts).items():
        options += ["--setenv", name, value]
    return options


def shown(folder: Path, worktree: Path, mounts: Mounts) -> Path:
    """Where a command finds `folder` of the host."""
    if mounts.shown_at and folder.is_relative_to(worktree):
        return mounts.shown_at / folder.relative_to(worktree)
    return folder


def holds_packages(root: Path, name: str) -> bool:
    """Whether `root / name`, named like a folder of installed packages, may be shown to commands.

    A link is shown only if it leads to what plainly is such a folder: it belongs to the workspace, which must not open other
    folders this way.
    """
    folder = root / name
    if not folder.is_dir():
        return False
    if not folder.is_symlink():
        return True
    target = folder.resolve()
    is_such = target.name == name if name == "node_modules" else (target / "pyvenv.cfg").is_file()
    return is_such and not any(inside.is_relative_to(target) for inside in (Path.home(), root))


def python_folders(environments: Iterable[Path]) -> tuple[Path, ...]:
    """Where the interpreters behind virtual environments lie, to be shown read-only. Only what looks like a Python installation:
    the file that names it belongs to the workspace, which must not open other folders this way.
    """
    found: list[Path] = []
    for environment in environments:
        config = environment / "pyvenv.cfg"
        if not config.is_file():
            continue
        pairs = (line.partition("=") for line in config.read_text("utf-8", "replace").splitlines())
        homes = [Path(value.strip()) for key, _, value in pairs if key.strip() == "home"]
        for prefix in (folder for home in homes if home.is_absolute() for folder in (home.parent, home.resolve().parent)):
            if any(prefix.glob("lib/python3*/os.py")) and not Path.home().is_relative_to(prefix):
                found.append(prefix)
    return tuple(dict.fromkeys(found))


def _environment(place: Path, mounts: Mounts) -> dict[str, str]:
    names = {name for _, name in mounts.inside}
    own = [place / name / "bin" for name in (".venv", "venv") if name in names]
    own += [place / "node_modules" / ".bin"] if "node_modules" in names else []
    return {
        "PATH": ":".join([*map(str, own), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": _HOME,
        "USER": "agent",
        "SHELL": "/bin/sh",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "CI": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

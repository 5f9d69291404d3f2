"""Commands see only their worktree, and leave nothing behind. Real bubblewrap, as the user who tests and as an ordinary one."""

import asyncio
import contextlib
import inspect
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rapidfuzz
from quadjet.agent_tasks.mounts import python_folders
from quadjet.agent_tasks.sandbox import CommandResult, Sandbox, SandboxLimits, SandboxUnavailable
from quadjet.agent_tasks.worktree import Snapshot, create_snapshot


@pytest.fixture
def sandbox() -> Sandbox:
    status = Sandbox().probe()
    if not status.available:
        missing = f"{status.reason}; {status.fix}"
        if os.environ.get("QUADJET_REQUIRE_MODELS"):
            pytest.fail(f"the sandbox is required here: {missing}")
        pytest.skip(missing)
    return Sandbox()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "home" / "project"
    (root / ".vscode").mkdir(parents=True)
    (root / "a.py").write_text("print('hello')\n")
    (root / ".vscode" / "settings.json").write_text("{}")
    (root / ".env").write_text("TOKEN=hunter2\n")
    (root.parent / "private.txt").write_text("hunter2\n")
    return root


@pytest.fixture
async def snapshot(root: Path, tmp_path: Path) -> Snapshot:
    return await create_snapshot(root, "t1", tmp_path / "state", {})


async def shell(sandbox: Sandbox, snapshot: Snapshot, script: str, timeout_s: float = 20) -> CommandResult:
    return await sandbox.run(["/bin/sh", "-c", script], worktree=snapshot.path, mounts=snapshot.mounts, timeout_s=timeout_s)


async def test_a_command_runs_in_the_worktree_at_the_user_s_own_path(sandbox: Sandbox, snapshot: Snapshot) -> None:
    result = await shell(sandbox, snapshot, "pwd; ls; echo made > made.txt; cat a.py >&2; exit 3")
    assert (result.exit_code, result.timed_out) == (3, False)
    assert result.output == f"{snapshot.root}\na.py\nprint('hello')\n"
    assert (snapshot.path / "made.txt").read_text() == "made\n"
    assert not (snapshot.root / "made.txt").exists()


async def test_the_worktree_is_also_at_its_own_path(sandbox: Sandbox, snapshot: Snapshot) -> None:
    result = await shell(sandbox, snapshot, f"cat {snapshot.path}/a.py")
    assert result.output == "print('hello')\n"
    (snapshot.path / "sub").mkdir()
    inner = await sandbox.run(["pwd"], worktree=snapshot.path, cwd=snapshot.path / "sub", mounts=snapshot.mounts)
    assert inner.output == f"{snapshot.root}/sub\n"


async def test_git_reads_in_the_sandbox_but_cannot_be_redirected(sandbox: Sandbox, snapshot: Snapshot) -> None:
    (snapshot.path / "a.py").write_text("changed\n")
    result = await shell(sandbox, snapshot, "git diff --stat; git status --short")
    assert " a.py | 2 +-" in result.output
    assert " M a.py" in result.output
    for attack in (
        "echo gitdir: /tmp > .git",
        "rm .git",
        "mv .git x",
        "git config core.pager x",
        "git commit -qam x",
        "git init -q",
    ):
        assert (await shell(sandbox, snapshot, attack)).exit_code != 0


ESCAPES = {
    "read the home of the user": "cat ../private.txt",
    "read the original of a secret": "cat {root}/.env",
    "list the parent": "ls ../*.txt",
    "write the system": "touch /usr/x",
    "write the root": "touch /x",
    "write etc": "touch /etc/x",
    "write a sysctl": "echo core > /proc/sys/kernel/core_pattern",
    "write sysrq": "echo h > /proc/sysrq-trigger",
    "read the real root through init": "cat /proc/1/root{root}/../private.txt",
    "read shadow": "cat /etc/shadow",
    "read the daemon's environment": "cat /proc/{pid}/environ",
    "signal the daemon": "kill -0 {pid}",
    "reach the network": "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 2)\"",
    "reach a local port": "python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}), 2)\"",
    "reach an abstract socket": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).connect('\\0quadjet-{port}')\"",
    "reach a socket in the runtime folder": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).connect('{tmp}/s')\"",
    "open the terminal": "echo x > /dev/tty",
    "read input": "read line",
    "become root": "unshare -r true",
    "mount": "mount -t tmpfs none /tmp",
    "trace": "cat /proc/1/mem",
    "open a disk": "ls /dev/sda /dev/vda /dev/nvme0n1 /dev/kmsg",
    "write protected settings": "echo x > .vscode/settings.json",
    "see the state folder": "ls {tmp}/state/t1/snapshot.json",
    "write the store": "touch {store}/x",
}


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[int]:
    """Servers on a local port (its number), an abstract socket and a socket file."""
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        number: int = port.getsockname()[1]
        for server, address in ((abstract, f"\0quadjet-{number}"), (named, str(tmp_path / "s"))):
            server.bind(address)
            server.listen()
        yield number


@pytest.mark.parametrize("attack", ESCAPES.values(), ids=ESCAPES.keys())
async def test_escapes_fail(sandbox: Sandbox, snapshot: Snapshot, tmp_path: Path, listeners: int, attack: str) -> None:
    places = {"root": snapshot.root, "tmp": tmp_path, "pid": os.getpid(), "port": listeners, "store": snapshot.mounts.readable[0]}
    result = await shell(sandbox, snapshot, attack.format(**places))
    assert result.exit_code not in (0, 127)
    assert "hunter2" not in result.output


async def test_the_environment_is_clean(sandbox: Sandbox, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_TOKEN", "SSH_AUTH_SOCK", "LD_PRELOAD", "PYTHONPATH", "GIT_DIR", "BASH_ENV"):
        monkeypatch.setenv(name, "hunter2")
    result = await shell(sandbox, snapshot, "env; ls -a $HOME; ls -a /tmp /run /var; cat /etc/passwd; id -u; hostname")
    assert "hunter2" not in result.output
    names = {line.split("=")[0] for line in result.output.splitlines() if "=" in line}
    assert names == {
        *{"PATH", "HOME", "USER", "SHELL", "TMPDIR", "LANG", "TERM", "NO_COLOR", "PAGER", "GIT_PAGER", "GIT_OPTIONAL_LOCKS"},
        *{"GIT_TERMINAL_PROMPT", "CI", "PYTHONDONTWRITEBYTECODE", "PWD"},
    }


async def test_no_descriptor_of_the_daemon_leaks(sandbox: Sandbox, snapshot: Snapshot, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = await shell(sandbox, snapshot, "ls /proc/self/fd")
    assert result.output.split() == ["0", "1", "2", "3"]


async def test_what_a_command_writes_outside_the_worktree_is_gone_with_it(sandbox: Sandbox, snapshot: Snapshot) -> None:
    assert (await shell(sandbox, snapshot, "echo x > /tmp/x; echo x > $HOME/x; cat /tmp/x")).output == "x\n"
    assert (await shell(sandbox, snapshot, "ls /tmp/x $HOME/x")).exit_code != 0


def _alive(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command:
                found.append(int(process.name))
    return found


async def test_the_time_limit_kills_everything(sandbox: Sandbox, snapshot: Snapshot) -> None:
    script = "trap '' TERM INT HUP; echo started; (setsid sleep 987651 & sleep 987651) & nohup sleep 987651 & wait"
    result = await shell(sandbox, snapshot, script, timeout_s=1)
    assert (result.timed_out, result.exit_code, result.output) == (True, 137, "started\n")
    assert result.elapsed_s < 10
    assert _alive("987651") == []


async def test_processes_left_in_the_background_end_with_the_command(sandbox: Sandbox, snapshot: Snapshot) -> None:
    result = await shell(sandbox, snapshot, "setsid nohup sleep 987652 > /dev/null 2>&1 & (sleep 987652 &) ; echo done")
    assert (result.exit_code, result.output) == (0, "done\n")
    assert result.elapsed_s < 10
    assert _alive("987652") == []


async def test_a_command_that_closes_its_output_is_waited_for(sandbox: Sandbox, snapshot: Snapshot) -> None:
    result = await shell(sandbox, snapshot, "exec > /dev/null 2>&1; sleep 0.3; echo late > late.txt; exit 5")
    assert (result.exit_code, (snapshot.path / "late.txt").exists()) == (5, True)


async def test_cancelling_kills_everything(sandbox: Sandbox, snapshot: Snapshot) -> None:
    started = asyncio.Event()
    run = asyncio.create_task(
        sandbox.run(
            ["/bin/sh", "-c", "sleep 987653 & echo go; sleep 987653"],
            worktree=snapshot.path,
            on_output=lambda _: started.set(),
        )
    )
    await started.wait()
    start = time.monotonic()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - start < 2
    assert _alive("987653") == []


async def test_a_command_killed_from_outside_has_run_and_failed(sandbox: Sandbox, snapshot: Snapshot) -> None:
    """As the kernel does it when memory runs out."""
    started = asyncio.Event()
    command = ["/bin/sh", "-c", "echo started; sleep 60"]
    running = asyncio.create_task(sandbox.run(command, worktree=snapshot.path, on_output=lambda line: started.set()))
    await started.wait()
    find = ["pgrep", "-P", str(os.getpid()), "bwrap"]
    for pid in subprocess.run(find, capture_output=True, text=True, check=True).stdout.split():  # noqa: ASYNC221
        os.kill(int(pid), signal.SIGKILL)
    result = await running
    assert (result.exit_code, result.output, result.timed_out) == (137, "started\n", False)


async def test_the_death_of_the_daemon_ends_the_command(sandbox: Sandbox, snapshot: Snapshot) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from quadjet.agent_tasks.sandbox import Sandbox\n"
        "run = Sandbox().run(['/bin/sh', '-c', 'echo go; sleep 987654'], worktree=pathlib.Path(sys.argv[1]),\n"
        "    on_output=lambda line: print(line, end='', flush=True))\n"
        "asyncio.run(run)\n"
    )
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(snapshot.path), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout
    assert await daemon.stdout.readline() == b"go\n"
    daemon.kill()
    await daemon.wait()
    for process in _alive("987654"):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            assert select.select([descriptor], [], [], 10)[0], "the command outlived the daemon"
            os.close(descriptor)


async def test_long_output_keeps_its_head_and_tail_and_says_so(snapshot: Snapshot, sandbox: Sandbox) -> None:
    small = Sandbox(SandboxLimits(kept_output_bytes=2000))
    result = await shell(small, snapshot, "echo first; seq 100000; echo last")
    assert result.output.startswith("first\n1\n2\n")
    assert result.output.endswith("\n100000\nlast\n")
    assert "bytes left out ...]" in result.output
    assert len(result.output) < 2200


async def test_endless_output_is_stopped(snapshot: Snapshot, sandbox: Sandbox) -> None:
    small = Sandbox(SandboxLimits(max_output_bytes=1_000_000))
    result = await shell(small, snapshot, "yes")
    assert (result.exit_code, result.timed_out) == (137, False)


async def test_output_is_made_harmless(sandbox: Sandbox, snapshot: Snapshot) -> None:
    lines: list[str] = []
    script = r"printf '\033[31mred\033[0m \342\200\256x\n\377\n\033]0;t\007end'"
    result = await sandbox.run(["/bin/sh", "-c", script], worktree=snapshot.path, on_output=lines.append)
    assert result.output == "red <U+202E>x\n\ufffd\nend"
    assert lines == ["red <U+202E>x\n", "\ufffd\n"]


async def test_limits_hold(snapshot: Snapshot, sandbox: Sandbox) -> None:
    small = Sandbox(SandboxLimits(max_file_bytes=1 << 20, max_memory_bytes=256 << 20, max_tmp_bytes=1 << 20))
    assert (await shell(small, snapshot, "head -c 2000000 /dev/zero > big")).exit_code != 0
    assert (snapshot.path / "big").stat().st_size <= 1 << 20
    assert (await shell(small, snapshot, "python3 -c 'bytearray(400 << 20)'")).exit_code != 0
    assert (await shell(small, snapshot, "for n in 1 2 3; do head -c 900000 /dev/zero > /tmp/$n || exit 9; done")).exit_code == 9
    assert (await shell(small, snapshot, "ulimit -H -c; ulimit -f unlimited")).exit_code != 0


async def test_a_missing_program_is_the_command_s_failure(sandbox: Sandbox, snapshot: Snapshot) -> None:
    result = await sandbox.run(["no-such-program"], worktree=snapshot.path)
    assert result.exit_code == 127
    assert "no-such-program" in result.output


async def test_a_sandbox_that_cannot_be_made_is_not_a_result(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="could not be started in the sandbox"):
        await sandbox.run(["true"], worktree=tmp_path / "missing")


async def test_without_bubblewrap_there_are_no_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status = Sandbox().probe()
    assert (status.available, status.reason, status.fix) == (False, "bubblewrap is not installed", "apt-get install bubblewrap")
    with pytest.raises(SandboxUnavailable, match="not installed"):
        await Sandbox().run(["touch", str(tmp_path / "ran")], worktree=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_kernel_that_bars_namespaces_is_explained(sandbox: Sandbox) -> None:
    """Inside a sandbox user namespaces are barred, so a second one cannot be made: the probe is run there."""
    script = (
        "from quadjet.agent_tasks.sandbox import Sandbox; s = Sandbox().probe(); print(s.available, s.reason, s.fix, sep='|')"
    )
    command = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    available, reason, fix = done.stdout.strip().split("|")
    assert available == "False"
    assert reason.startswith("bubblewrap cannot make a sandbox: ")
    assert "namespace" in reason
    assert fix


async def test_the_workspace_s_virtual_environment_is_there_read_only(sandbox: Sandbox, root: Path, tmp_path: Path) -> None:
    subprocess_exec = await asyncio.create_subprocess_exec(sys.executable, "-m", "venv", "--without-pip", str(root / ".venv"))
    assert await subprocess_exec.wait() == 0
    packages = next((root / ".venv").glob("lib/python*/site-packages"))
    (packages / "editable.pth").write_text(f"{root}\n")
    (root / "mine.py").write_text("where = __file__\n")
    snapshot = await create_snapshot(root, "venv", tmp_path / "state", {})
    (snapshot.path / "mine.py").write_text("where = 'the worktree'\n")
    script = f"cd /tmp; python -c 'import mine, sys; print(mine.where, sys.prefix)'; touch {root}/.venv/x"
    result = await shell(sandbox, snapshot, script)
    assert result.output.splitlines()[0] == f"the worktree {root}/.venv"
    assert not (root / ".venv" / "x").exists()
    assert (await snapshot.changes()).files[0].path == Path("mine.py")


def test_a_virtual_environment_cannot_name_any_folder(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    for home in (Path.home() / ".ssh", tmp_path / "bin", Path("/root"), Path("/"), Path("bin")):
        (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"home = {home}\n")
        assert python_folders([tmp_path / ".venv"]) == ()


@pytest.mark.parametrize("name", [".venv", "venv", "node_modules"])
@pytest.mark.parametrize("target", ["..", ".", "../secrets"])
async def test_a_link_named_like_a_package_folder_opens_no_other(
    sandbox: Sandbox, root: Path, tmp_path: Path, name: str, target: str
) -> None:
    (root.parent / "secrets").mkdir()
    (root.parent / "secrets" / "private.txt").write_text("hunter2\n")
    for folder in (root, root.parent):
        (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (root / ".gitignore").write_text(f"{name}\n")
    (root / name).symlink_to(target)
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    result = await shell(sandbox, snapshot, f"ls -A {name}; cat {name}/private.txt {name}/.env {name}/project/.env")
    assert "hunter2" not in result.output


@pytest.mark.parametrize("name", [".venv", "node_modules"])
async def test_a_linked_package_folder_is_there(sandbox: Sandbox, root: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere" / name
    elsewhere.mkdir(parents=True)
    (elsewhere / "pyvenv.cfg").write_text("")
    (root / ".gitignore").write_text(f"{name}\n")
    (root / name).symlink_to(elsewhere)
    snapshot = await create_snapshot(root, "t1", tmp_path / "state", {})
    assert (await shell(sandbox, snapshot, f"ls {name}")).output == "pyvenv.cfg\n"


async def test_state_inside_the_workspace_is_no_obstacle(sandbox: Sandbox, root: Path) -> None:
    snapshot = await create_snapshot(root, "t1", root / ".state", {})
    result = await shell(sandbox, snapshot, "cat a.py; git status --short")
    assert result.output == "print('hello')\n"


async def test_the_overhead_is_small(sandbox: Sandbox, snapshot: Snapshot) -> None:
    """In processor time, ours and that of all we started: the clock would measure what else the machine does."""
    start, runs = sum(os.times()[:4]), 10
    for _ in range(runs):
        await sandbox.run(["true"], worktree=snapshot.path, mounts=snapshot.mounts)
    assert (sum(os.times()[:4]) - start) / runs < 0.03


async def test_commands_side_by_side(sandbox: Sandbox, snapshot: Snapshot) -> None:
    results = await asyncio.gather(*(shell(sandbox, snapshot, f"echo {n}") for n in range(8)))
    assert [result.output for result in results] == [f"{n}\n" for n in range(8)]


ORDINARY = """
import asyncio, os, pathlib, sys
sys.path[:0] = sys.argv[2:]
from quadjet.agent_tasks.sandbox import Sandbox, SandboxLimits
tree = pathlib.Path(sys.argv[1])
async def main():
    assert os.getuid() == 65534
    sandbox = Sandbox(SandboxLimits(max_processes=40))
    assert sandbox.probe().available, sandbox.probe()
    made = await sandbox.run(["/bin/sh", "-c", "id -u; echo x > made"], worktree=tree)
    assert (made.exit_code, made.output) == (0, "1000\\n"), made
    attack = "cat /etc/shadow; echo x > /proc/sys/kernel/core_pattern"
    read = await sandbox.run(["/bin/sh", "-c", attack], worktree=tree)
    assert read.exit_code != 0, read
    bomb = await sandbox.run(["/bin/sh", "-c", "for n in $(seq 200); do sleep 987655 & done; wait"], worktree=tree, timeout_s=5)
    assert "fork" in bomb.output, bomb
    print("passed")
asyncio.run(main())
"""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; without root every test here runs as one")
def test_it_works_as_an_ordinary_user(sandbox: Sandbox, public_folder: Path) -> None:
    python = Path("/usr/bin/python3")
    if not python.exists() or b"3.1" not in subprocess.run([python, "-V"], capture_output=True, check=True).stdout:
        pytest.skip("there is no Python 3.11 that every user can run")
    for package, name in ((Path(inspect.getfile(Sandbox)), "quadjet/agent_tasks"), (Path(rapidfuzz.__file__), "rapidfuzz")):
        shutil.copytree(package.resolve().parent, public_folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    tree = public_folder / "tree"
    tree.mkdir()
    os.chown(tree, 65534, 65534)
    done = subprocess.run(
        [python, "-c", ORDINARY, str(tree), str(public_folder)],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("passed\n", "")

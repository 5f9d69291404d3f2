"""The command line as a person or a script meets it: a real process, its own folders, exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from header_model import write_header_model

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Folders of this test alone; the socket's path must be short, which pytest's folders are."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUADJET_", "XDG_"))}
    places = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    (tmp_path / "run").mkdir(mode=0o700)
    return kept | places | {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    def call(*arguments: str, env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path = tmp_path) -> Result:
        command = [sys.executable, "-m", "quadjet.daemon.cli", *arguments]
        return subprocess.run(
            command,
            env=environment | dict(env or {}),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=120,
        )

    return call


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one untidy file that a linter can mend alone."""
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "untidy.py").write_text("import os\nimport sys\n\nprint(sys.argv)\n")
    return folder


@pytest.fixture
def daemon(cli: Cli) -> Iterator[Cli]:
    """The command line, whose daemon is ended afterwards."""
    yield cli
    assert cli("stop").returncode == 0


def test_help_lists_every_verb(cli: Cli) -> None:
    result = cli("--help")
    assert result.returncode == 0
    verbs = "accept cancel config demo diff doctor generate logits logs lsp model pause reject resume run serve show"
    listed = [line.split()[0] for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert sorted({*verbs.split(), "status", "stop", "tasks"} - set(listed)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("run",),
        ("run", "nosuch", "."),
        ("run", "cleanup", "missing.py"),
        ("run", "cleanup", ".:3"),
        ("run", "cleanup", ".:0"),
        ("run", "cleanup", ""),
        ("run", "cleanup", "x" * 300),
        ("generate", "x", "text", "--tokens", "1"),
        ("generate", "x", "--tokens", "1,b"),
        ("generate", "x", "--tokens", "-1"),
        ("generate", "x", "text", "--temperature", "nan"),
        ("logits", "x"),
        ("--set", "engine.model", "status"),
        ("--set", "engine.nosuch=1", "config", "show"),
        ("--set", "engine.context=big", "config", "show"),
        ("model", "pull"),
    ],
)
def test_bad_use_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("model", "show", "nosuch"),
        ("model", "verify", "/nosuch.gguf"),
        ("model", "add", "/nosuch.gguf"),
        ("model", "remove", "nosuch"),
        ("model", "pull", "nosuch"),
        ("model", "pull", "hf:../..:x.gguf"),
        ("generate", "nosuch", "text"),
        ("logits", "nosuch", "--tokens", "1", "--out", "x.npy"),
    ],
)
def test_a_failure_is_exit_code_1_with_a_fix(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert "fix: " in result.stderr
    assert "Traceback" not in result.stderr


def test_config_show_tells_the_origin(cli: Cli, environment: dict[str, str]) -> None:
    file = Path(environment["XDG_CONFIG_HOME"]) / "quadjet" / "quadjet.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[tasks]\nmax_turns = 5\n")
    result = cli("--set", "engine.context=4096", "config", "show", "--origin", env={"QUADJET_MODELS_ALLOW_MIRROR": "true"})
    lines = dict(line.split(" = ", 1) for line in result.stdout.splitlines())
    assert lines["engine.context"] == "4096    (flag)"
    assert lines["tasks.max_turns"] == f"5    (file {file})"
    assert lines["models.allow_mirror"] == "true    (environment QUADJET_MODELS_ALLOW_MIRROR)"
    assert lines["engine.backend"] == "auto    (default)"


def test_a_model_is_added_listed_shown_verified_and_removed(cli: Cli, tmp_path: Path) -> None:
    path = write_header_model(tmp_path / "my model.gguf", name="evil \x1b[31m\u202ename")
    assert cli("model", "add", str(path)).returncode == 1  # its name has a space
    assert cli("model", "add", str(path), "--name", "mine").returncode == 0
    assert [entry["name"] for entry in json.loads(cli("model", "list", "--json").stdout)] == ["mine"]
    assert cli("model", "list").stdout.splitlines()[0].split("\t")[0] == "mine"
    shown = json.loads(cli("model", "show", "mine", "--json").stdout)
    assert (shown["family"], shown["layers"], shown["path"]) == ("llama", 1, str(path))
    assert cli("model", "verify", "mine").stdout.rstrip().endswith("as recorded, opens")
    path.write_bytes(path.read_bytes()[:-1])
    assert cli("model", "verify", "mine").returncode == 1
    assert cli("model", "remove", "mine").returncode == 0
    assert path.is_file()


def test_a_model_without_a_vocabulary_cannot_generate(cli: Cli, tmp_path: Path) -> None:
    path = write_header_model(tmp_path / "small.gguf")
    result = cli("generate", str(path), "text")
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr


def test_without_a_daemon(cli: Cli) -> None:
    assert (cli("status").returncode, json.loads(cli("status", "--json").stdout)) == (1, {"running": False})
    assert cli("stop").returncode == 0
    assert cli("logs").returncode == 1


def test_the_demo_without_its_model_prints_the_command(cli: Cli) -> None:
    result = cli("demo")
    assert result.returncode == 2
    assert "model pull qwen2.5-coder-0.5b --mirror" in result.stderr


def test_a_reader_that_leaves_ends_it_quietly(environment: dict[str, str], tmp_path: Path) -> None:
    command = f"{sys.executable} -m quadjet.daemon.cli model list | true"
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("", "")


def test_interrupt_is_clean(environment: dict[str, str], tmp_path: Path) -> None:
    log = Path(environment["XDG_STATE_HOME"]) / "quadjet" / "logs" / "daemon.log"
    log.parent.mkdir(parents=True)
    log.write_text("one line\n")
    # A shell's background job, which the tests may be, ignores SIGINT and hands that on.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "quadjet.daemon.cli", "logs", "-f"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "one line\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err.strip()) == (130, "", "interrupted")


def test_a_task_from_run_to_accepted(daemon: Cli, project: Path) -> None:
    before = (project / "untidy.py").read_text()
    sent = daemon("run", "cleanup", "untidy.py", "--json", cwd=project)
    assert sent.returncode == 0, sent.stderr
    answer = json.loads(sent.stdout)
    task_id = answer["task"]["taskId"]
    assert answer["task"]["state"] == "proposed"
    assert "-import os" in answer["files"][0]["diff"]
    assert (project / "untidy.py").read_text() == before

    assert [task["taskId"] for task in json.loads(daemon("tasks", "--json").stdout)] == [task_id]
    assert daemon("diff", task_id[:4]).stdout.splitlines()[:2] == ["--- a/untidy.py", "+++ b/untidy.py"]
    assert "linter" in daemon("show", task_id).stdout
    assert json.loads(daemon("status", "--json").stdout)["tasks"] == {"proposed": 1}

    assert daemon("accept", task_id).returncode == 0
    assert (project / "untidy.py").read_text() == "import sys\n\nprint(sys.argv)\n"
    again = daemon("accept", task_id)
    assert (again.returncode, "nothing to review" in again.stderr) == (1, True)
    assert json.loads(daemon("show", task_id, "--json").stdout)["state"] == "accepted"
    assert daemon("show", "nosuch").returncode == 1


def test_run_with_apply_changes_the_file(daemon: Cli, project: Path) -> None:
    assert daemon("run", "cleanup", str(project / "untidy.py"), "--apply").returncode == 0
    assert (project / "untidy.py").read_text() == "import sys\n\nprint(sys.argv)\n"


def test_flags_do_not_reach_a_daemon_that_runs_already(daemon: Cli, project: Path) -> None:
    assert daemon("tasks").returncode == 0
    result = daemon("--set", "tasks.max_turns=3", "tasks")
    assert (result.returncode, "--set counts after" in result.stderr) == (0, True)


def test_a_relative_model_path_reaches_the_daemon(daemon: Cli, tmp_path: Path) -> None:
    write_header_model(tmp_path / "small.gguf")
    assert daemon("--set", "engine.model=./small.gguf", "tasks").returncode == 0
    assert json.loads(daemon("status", "--json").stdout)["model"]["name"] == str(tmp_path / "small.gguf")


def test_run_without_a_proposal_is_exit_code_1(daemon: Cli, project: Path) -> None:
    (project / "tidy.py").write_text("print(1)\n")
    result = daemon("run", "cleanup", "tidy.py:1", cwd=project)
    assert result.returncode == 1
    assert "cleanup" in result.stdout


def test_doctor_names_what_is_missing(cli: Cli) -> None:
    result = cli("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 1
    assert findings["model"]["level"] == "broken"
    assert findings["model"]["fix"] == "quadjet model pull qwen2.5-coder-0.5b"
    assert findings["git"]["level"] == "ok"
    assert findings["edit"]["level"] == "ok"

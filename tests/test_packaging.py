"""The wheel holds every module and every data file, and works where only the wheel is installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import tomli
from tiny_models import tiny_model

ROOT = Path(__file__).parent.parent
FOLDERS = ("daemon", "lsp", "engine", "kernels", "agent_tasks")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files, so that nothing is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked_files():
        copy = source / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True)
    return next(target.glob("quadjet-*.whl"))


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for path in listing.split("\0") if path and (ROOT / path).is_file()]


def test_every_folder_is_listed_as_a_package() -> None:
    tools = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(tools["packages"]) == sorted(f"quadjet.{folder}" for folder in FOLDERS)
    assert tools["package-dir"] == {f"quadjet.{folder}": folder for folder in FOLDERS}


def test_no_module_is_in_an_unlisted_subfolder() -> None:
    """An editable install would find it and the wheel would not. The sample project is data, whatever its names."""
    modules = [path for path in tracked_files() if path.startswith(FOLDERS) and path.endswith(".py")]
    assert [path for path in modules if path.count("/") > 1 and not path.startswith("agent_tasks/sample/")] == []


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    expected = {f"quadjet/{p}" for p in tracked_files() if p.split("/")[0] in FOLDERS and Path(p).name != "README.md"}
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


@pytest.mark.slow
def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies come from this environment; its own editable quadjet does not, as .pth files in there are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    modules = [name.removesuffix(".py").replace("/", ".") for name in zipfile.ZipFile(wheel).namelist() if is_module(name)]
    program = f"import importlib; [print(importlib.import_module(m).__file__) for m in {modules!r}]"
    python = tmp_path / "venv" / "bin" / "python"
    run = subprocess.run([python, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(Path(line).is_relative_to(site) for line in run.stdout.splitlines())
    version = subprocess.run([python, "-I", "-m", "quadjet.daemon.cli", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("quadjet ")
    program = CHILDREN.format(model=str(tiny_model(tmp_path)))
    children = subprocess.run([python, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert children.stdout.splitlines() == ["a prompt", "a reply", "True"], children.stderr


CHILDREN = """
import asyncio
from importlib.resources import files
from pathlib import Path
from quadjet.engine.chat import Message, SamplingParams
from quadjet.engine.client import EngineSettings
from quadjet.engine.local_model import LocalChatModel
from quadjet.engine.template_process import TemplateProcess
template = TemplateProcess("{{{{ text }}}}")
print(template.render({{"text": "a prompt"}}))
template.close()
async def main():
    model = await LocalChatModel.load(EngineSettings(Path({model!r})))
    reply = await model.complete([Message("user", "x")], params=SamplingParams(max_tokens=1))
    print("a reply" if reply.usage.completion_tokens else "none")
    await model.close()
asyncio.run(main())
print((files("quadjet.agent_tasks") / "sample" / "shop" / "report.py").is_file())
"""


def is_module(name: str) -> bool:
    return name.startswith("quadjet/") and name.endswith(".py") and name.count("/") == 2

"""Each fault that doctor looks for, put there, gives a finding with what mends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from header_model import write_header_model
from quadjet.daemon.config import Places
from quadjet.daemon.doctor import Finding, Level, examine
from quadjet.daemon.model_check import add
from quadjet.daemon.models import ModelStore


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places.below(tmp_path)


def findings(places: Places, **flags: str) -> dict[str, Finding]:
    settings = {key.replace("__", "."): value for key, value in flags.items()}
    return {finding.what: finding for finding in examine(settings, places, lambda *_: None)}


@pytest.mark.slow
def test_all_is_well_with_a_real_model(places: Places, model_path: Callable[[str], Path]) -> None:
    found = findings(places, engine__model=str(model_path("smollm2-135m")))
    checked = {"python", "git", "sandbox", "places", "settings", "model", "memory", "template", "grammar", "gpu", "edit"}
    assert found.keys() == checked
    assert [finding for finding in found.values() if finding.level is Level.BROKEN] == []


def test_a_missing_model(places: Places) -> None:
    model = findings(places)["model"]
    assert (model.level, model.fix) == (Level.BROKEN, "quadjet model pull qwen2.5-coder-0.5b")


def test_a_model_that_was_changed(places: Places, tmp_path: Path) -> None:
    path = write_header_model(tmp_path / "small.gguf")
    add(path, ModelStore(places.models), lambda *_: None)
    path.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1")
    model = findings(places, engine__model="small")["model"]
    assert (model.level, "was recorded" in model.why) == (Level.BROKEN, True)


def test_a_model_without_vocabulary_and_template(places: Places, tmp_path: Path) -> None:
    found = findings(places, engine__model=str(write_header_model(tmp_path / "small.gguf")))
    assert (found["model"].level, found["memory"].level, found["template"].level) == (Level.OK, Level.OK, Level.BROKEN)
    assert "grammar" not in found


def test_a_wrong_setting_ends_the_checks_that_need_settings(places: Places) -> None:
    found = findings(places, engine__modle="x")
    assert found["settings"].level is Level.BROKEN
    assert "engine.model" in found["settings"].fix
    assert "model" not in found


def test_without_bubblewrap_and_git(places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings(places)
    assert found["git"].level is Level.BROKEN
    assert (found["sandbox"].level, "bubblewrap" in found["sandbox"].fix) == (Level.NOTE, True)
    assert found["edit"].level is Level.BROKEN


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    found = findings(Places.below(tmp_path / ("x" * 100)))
    assert (found["places"].level, "XDG_RUNTIME_DIR" in found["places"].fix) == (Level.BROKEN, True)


def test_both_cuda_extras_at_once(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        info = tmp_path / "site" / f"{name}-14.0.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 14.0.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    gpu = findings(places)["gpu"]
    assert (gpu.level, gpu.fix) == (Level.BROKEN, "pip uninstall cupy-cuda12x")


def test_the_check_of_edits_leaves_nothing(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert findings(places)["edit"].level is Level.OK
    assert [path for path in tmp_path.iterdir() if path.name.startswith("quadjet-doctor-")] == []

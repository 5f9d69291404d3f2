"""The parts of a model that is split over several files, as llama-gguf-split names and numbers them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import ModelFileError

MAX_PARTS = 1024
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def count_parts(path: Path, metadata: Mapping[str, Any]) -> int:
    """Files that the model at `path` consists of; 1 if it is whole."""
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        _refuse(path, f"split.count is {str(count)[:40]}, not a number up to {MAX_PARTS}")
    return max(1, count)


def other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The parts after the first one, which `path` must be."""
    count = count_parts(path, metadata)
    if count == 1:
        return []
    name = _NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        _refuse(path, f"it is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf")
    names = [f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    check_part(path, metadata, 0, count)
    if path.name != names[0]:
        _refuse(path, f"it says that it is the first part, but its name is not {names[0]}")
    return [path.with_name(part) for part in names[1:]]


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Refuse a file that is not part `number`, from 0, of `count`."""
    said = (metadata.get("split.no"), metadata.get("split.count"))
    if said == (number, count):
        return
    if number == 0:
        _refuse(path, f"it is not the first of {count} parts", "name the file that ends in -00001-of-...; it finds the others")
    _refuse(path, f"it should be part {number + 1} of {count}, but its metadata says otherwise")


def _refuse(path: Path, reason: str, fix: str = "fetch all parts again, into one folder, under their own names") -> NoReturn:
    raise ModelFileError(f"model file {path} cannot be read as part of a split model: {reason}", fix)

"""What a model file is: opened, bounds-checked and described, without loading its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGMLQuantizationType

from ..engine.gguf_file import GgufFile
from ..engine.model import load_config
from .models import Entry, ModelStore, ModelStoreError, Progress, file_sha256


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a file says of itself. `tensor_types` counts tensors by block type; `parameters` counts stored weights."""

    title: str
    family: str
    layers: int
    hidden: int
    vocab: int
    context: int
    parameters: int
    tensor_types: dict[str, int]
    has_chat_template: bool


def inspect(path: Path) -> ModelFacts:
    """Open a file as the engine would. ModelFileError says what is wrong with it."""
    file = GgufFile.open(path)
    try:
        config = load_config(file)
        types = Counter(GGMLQuantizationType(tensor.ggml_type).name for tensor in file.tensors.values())
        return ModelFacts(
            title=str(file.metadata.get("general.name", "")),
            family=config.family,
            layers=config.num_layers,
            hidden=config.hidden,
            vocab=config.vocab_size,
            context=config.context,
            parameters=sum(prod(tensor.shape) for tensor in file.tensors.values()),
            tensor_types=dict(types.most_common()),
            has_chat_template="tokenizer.chat_template" in file.metadata,
        )
    finally:
        file.close()


def add(path: Path, store: ModelStore, on_progress: Progress, name: str = "") -> Entry:
    """Register a file where it lies. Its name is the file's own unless one is given."""
    path = path.expanduser().absolute()
    name = name or path.name.removesuffix(".gguf")
    existing = store.find(name)
    if existing is not None and existing.path != path:
        raise ModelStoreError(f"there is a model {name} already, at {existing.path}", f"quadjet model add {path} --name ANOTHER")
    store.home(name)
    if not path.is_file():
        raise ModelStoreError(f"there is no file {path}", "give the path of a .gguf file")
    inspect(path)
    entry = Entry(name, path, path.stat().st_size, file_sha256(path, on_progress), f"added from {path}", "as its publisher says")
    store.register(entry)
    return entry


def verify(name_or_path: str, store: ModelStore, on_progress: Progress) -> Entry:
    """Read the whole file again. ModelStoreError when it is not what was recorded, ModelFileError when it does not open."""
    path = store.resolve(name_or_path)
    found = file_sha256(path, on_progress)
    entry = store.find(name_or_path)
    if entry is not None and found != entry.sha256:
        raise ModelStoreError(
            f"{path} has sha256 {found}, and {entry.sha256} was recorded: it was changed or is damaged",
            f"quadjet model remove {entry.name}, then add or pull it again",
        )
    inspect(path)
    return entry or Entry("", path, path.stat().st_size, found, "not registered", "")

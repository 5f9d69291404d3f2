"""Typed, range-checked access to a model file's metadata: each value that cannot be is refused by its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from .errors import ModelFileError
from .gguf_file import GgufFile

MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22


class Metadata:
    """The keys of the file's own family, named without the family's prefix."""

    def __init__(self, file: GgufFile, families: Iterable[str]) -> None:
        """Raises ModelFileError for a family that is not among `families`."""
        self.file = file
        self.values: Mapping[str, Any] = file.metadata
        family = self.values.get("general.architecture")
        supported = sorted(families)
        if not isinstance(family, str) or family not in supported:
            raise ModelFileError(
                f"{file.path} holds a model of family {_short(family)}; supported: {', '.join(supported)}",
                "choose a model of a supported family: `quadjet model list` names some",
            )
        self.family: str = family

    def refuse(self, reason: str) -> NoReturn:
        raise ModelFileError(
            f"model file {self.file.path} cannot be run: {reason}",
            "fetch the file again, or choose another: `quadjet model list`",
        )

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self._scalar(name, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"{self.family}.{name} is {_short(value)}, not a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        value = self._scalar(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.refuse(f"{self.family}.{name} is {_short(value)}, not a number from {least:g} to {most:g}")
        return float(value)

    def whole_where_used(self, name: str, least: int, most: int, default: int) -> int:
        """As `whole`, but a value per layer may be 0 for the layers that have no use for it."""
        value = self.values.get(f"{self.family}.{name}")
        if not isinstance(value, np.ndarray) or not (value != 0).any():
            return self.whole(name, least, most, default)
        used = value[value != 0]
        if (used != used[0]).any():
            self.refuse(f"{self.family}.{name} differs from layer to layer, which this family does not allow")
        number = used[0].item()
        if type(number) is not int or not least <= number <= most:
            self.refuse(f"{self.family}.{name} is {_short(number)}, not a whole number from {least} to {most}")
        return number

    def flags(self, name: str, count: int) -> tuple[bool, ...] | None:
        """One boolean per layer, None where the key is absent."""
        value = self.values.get(f"{self.family}.{name}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_ or len(value) != count:
            self.refuse(f"{self.family}.{name} is {_short(value)}, not {count} booleans")
        return tuple(value.tolist())

    def text(self, name: str, default: str) -> str:
        value = self.values.get(f"{self.family}.{name}", default)
        if not isinstance(value, str):
            self.refuse(f"{self.family}.{name} is {_short(value)}, not a text")
        return value

    def _scalar(self, name: str, default: float | None) -> object:
        """Some converters write one value per layer; they must agree, since every layer has the same shape here."""
        value = self.values.get(f"{self.family}.{name}", default)
        if value is None:
            self.refuse(f"the metadata key {self.family}.{name} is missing")
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                self.refuse(f"{self.family}.{name} differs from layer to layer, which this family does not allow")
            return value[0].item()
        return value

    def head_dim(self, hidden: int, heads: int) -> int:
        implied = hidden // heads if hidden % heads == 0 else None
        head_dim = self.whole("attention.key_length", 2, MAX_HEAD_DIM, default=implied)
        if head_dim % 2:
            self.refuse(f"its head dimension {head_dim} is odd")
        self.must_equal("attention.value_length", head_dim, "the head dimension")
        return head_dim

    def must_equal(self, name: str, expected: int, what: str) -> None:
        """Refuse a value that is there and other than the only one that is supported."""
        value = self.whole(name, 0, MAX_WIDTH, default=expected)
        if value != expected:
            self.refuse(f"{self.family}.{name} is {value}, but must equal {what} {expected}")

    def vocab_size(self) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            self.refuse("the tensor token_embd.weight is missing")
        rows = embedding.shape[0]
        if len(embedding.shape) != 2 or rows > MAX_VOCAB:
            self.refuse(f"token_embd.weight has the shape {embedding.shape}")
        tokens = self.values.get("tokenizer.ggml.tokens", ())
        claims = {f"{self.family}.vocab_size": self.values.get(f"{self.family}.vocab_size", rows)}
        if "tokenizer.ggml.tokens" in self.values:
            claims["tokenizer.ggml.tokens"] = len(tokens) if isinstance(tokens, list) else None
        for key, claim in claims.items():
            if type(claim) is not int or claim != rows:
                self.refuse(f"{key} says {_short(claim)} tokens, but token_embd.weight has {rows} rows")
        return rows

    def refuse_used(self, *names: str) -> None:
        """Refuse keys that would change the results if they were ignored."""
        for name in names:
            value = self.values.get(f"{self.family}.{name}", 0)
            if not isinstance(value, int) or value != 0:
                self.refuse(f"it uses {self.family}.{name}, which is not supported")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""What a model file holds: the family, its hyperparameters and the tensors they imply, each checked against the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import numpy as np

from .errors import ModelFileError
from .gguf_file import GgufFile, TensorInfo
from .records import DECODABLE

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 22


class RopeStyle(StrEnum):
    ADJACENT = "adjacent"  # pairs (2i, 2i + 1): the llama converter interleaves the rows of q and k
    HALVES = "halves"  # pairs (i, i + head_dim / 2), also called NEOX


ROPE_STYLES = {"llama": RopeStyle.ADJACENT, "qwen2": RopeStyle.HALVES}
"""The supported families."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_style: RopeStyle
    rms_eps: float
    context: int
    """Positions that the model was trained for."""
    vocab_size: int
    is_tied: bool
    """The output head is token_embd."""
    has_qkv_bias: bool
    has_rope_freqs: bool
    """The file divides the angle of each rope pair by a factor of its own (Llama 3.1)."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def load_config(file: GgufFile) -> ModelConfig:
    """Read and check the model. Raises ModelFileError for other families, values out of range, tensors amiss."""
    config = _config(_Metadata(file))
    _check_tensors(file, tensor_shapes(config))
    return config


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model by name, shapes in NumPy order."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, config.hidden),
        "output_norm.weight": (config.hidden,),
    }
    if not config.is_tied:
        shapes["output.weight"] = (config.vocab_size, config.hidden)
    if config.has_rope_freqs:
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    for layer in range(config.num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (config.hidden,),
        "attn_q.weight": (config.q_width, config.hidden),
        "attn_k.weight": (config.kv_width, config.hidden),
        "attn_v.weight": (config.kv_width, config.hidden),
        "attn_output.weight": (config.hidden, config.q_width),
        "ffn_norm.weight": (config.hidden,),
        "ffn_gate.weight": (config.ffn, config.hidden),
        "ffn_up.weight": (config.ffn, config.hidden),
        "ffn_down.weight": (config.hidden, config.ffn),
    }
    if config.has_qkv_bias:
        shapes |= {"attn_q.bias": (config.q_width,), "attn_k.bias": (config.kv_width,), "attn_v.bias": (config.kv_width,)}
    return shapes


def _config(meta: _Metadata) -> ModelConfig:
    meta.refuse_unsupported()
    hidden = meta.whole("embedding_length", 1, MAX_WIDTH)
    heads = meta.whole("attention.head_count", 1, MAX_WIDTH)
    kv_heads = meta.whole("attention.head_count_kv", 1, MAX_WIDTH, default=heads)
    if heads % kv_heads:
        meta.refuse(f"its {heads} attention heads cannot be shared out over {kv_heads} KV heads")
    tensors = meta.file.tensors
    vocab_size = meta.vocab_size()
    return ModelConfig(
        family=meta.family,
        num_layers=meta.whole("block_count", 1, MAX_LAYERS),
        hidden=hidden,
        ffn=meta.whole("feed_forward_length", 1, MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=meta.head_dim(hidden, heads),
        rope_theta=meta.number("rope.freq_base", 1.0, 1e12, default=10_000.0),
        rope_style=ROPE_STYLES[meta.family],
        rms_eps=meta.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        context=meta.whole("context_length", 1, MAX_CONTEXT),
        vocab_size=vocab_size,
        is_tied="output.weight" not in tensors,
        has_qkv_bias=meta.family == "qwen2" or "blk.0.attn_q.bias" in tensors,
        has_rope_freqs="rope_freqs.weight" in tensors,
    )


class _Metadata:
    """Typed, range-checked access to the keys of the file's own family."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.values: Mapping[str, Any] = file.metadata
        family = self.values.get("general.architecture")
        if not isinstance(family, str) or family not in ROPE_STYLES:
            supported = ", ".join(sorted(ROPE_STYLES))
            raise ModelFileError(
                f"{file.path} holds a model of family {_short(family)}; supported: {supported}",
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
        for name in ("attention.value_length", "rope.dimension_count"):
            other = self.whole(name, 1, MAX_HEAD_DIM, default=head_dim)
            if other != head_dim:
                self.refuse(f"{self.family}.{name} is {other}, but must equal the head dimension {head_dim}")
        return head_dim

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

    def refuse_unsupported(self) -> None:
        """Refuse what would change the results if it were ignored."""
        if not _is_number(self.values.get("split.count", 0), 0, 1):
            self.refuse("it is one part of a model split over several files; join them with `llama-gguf-split --merge`")
        scaling = self.values.get(f"{self.family}.rope.scaling.type", "none")
        if not isinstance(scaling, str) or scaling != "none":
            self.refuse(f"{self.family}.rope.scaling.type is {_short(scaling)}, which is not supported")
        for name in ("expert_count", "attention.sliding_window"):
            if not _is_number(self.values.get(f"{self.family}.{name}", 0), 0, 0):
                self.refuse(f"it uses {self.family}.{name}, which is not supported")


def _check_tensors(file: GgufFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            _refuse_tensor(file, f"tensor {name} is missing")
        _check_tensor(file, info, shape)
    extra = [name for name in file.tensors if name not in shapes]
    if extra:
        _refuse_tensor(file, f"it has {len(extra)} tensors that this family does not use, such as {extra[0]!r}")


def _check_tensor(file: GgufFile, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        _refuse_tensor(file, f"tensor {info.name} has the shape {info.shape}, but the metadata implies {shape}")
    if info.ggml_type not in DECODABLE:
        _refuse_tensor(file, f"tensor {info.name} has the block type {info.ggml_type.name}, which is not supported")


def _refuse_tensor(file: GgufFile, reason: str) -> NoReturn:
    raise ModelFileError(
        f"model file {file.path} cannot be run: {reason}", "choose another model: `quadjet model list` names some"
    )


def _is_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

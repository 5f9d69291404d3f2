"""A model as a list of ops: plain data that the reference executor and the device kernel both run.

Buffers and tensors are referred to by name. A buffer has so many features per row; the number of rows is that of the step, or
of its sampled rows. A program is checked when it is made, so executors need not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..kernels.abi import OpKind
from .model import ModelConfig, RopeStyle, tensor_shapes


class Rows(StrEnum):
    STEP = "step"  # every row of the step
    SAMPLED = "sampled"  # the rows whose logits are wanted


@dataclass(frozen=True, slots=True)
class Buffer:
    features: int
    rows: Rows = Rows.STEP


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer. A qkv buffer holds heads * head_dim features of q, then kv_heads * head_dim of k, then as many of v."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    style: RopeStyle
    factors: str | None = None
    """Tensor [head_dim / 2] that divides the angles."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op; OpKind gives its formula. Fields that its kind does not use keep their defaults."""

    kind: OpKind
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    """Matrices [n, in], stacked by rows into one; or the one table or vector of the op."""
    biases: tuple[str, ...] = ()
    layer: int = 0
    """Index into Program.kv_layers."""
    eps: float = 0.0
    rope: Rope | None = None


@dataclass(frozen=True, slots=True)
class Program:
    ops: tuple[Op, ...]
    buffers: Mapping[str, Buffer]
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes, NumPy order, of the tensors that the ops name."""
    kv_layers: tuple[AttentionShape, ...]
    """One per layer that keeps keys and values."""
    vocab_size: int

    def __post_init__(self) -> None:
        _Checker(self).check()


TOKENS = "tokens"
LOGITS = "logits"


def lower(config: ModelConfig) -> Program:
    """The program of a dense pre-norm transformer with grouped-query attention and SwiGLU (families llama and qwen2)."""
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim)
    buffers = {
        TOKENS: Buffer(1),
        "x": Buffer(config.hidden),
        "normed": Buffer(config.hidden),
        "qkv": Buffer(shape.qkv_width),
        "attended": Buffer(shape.q_width),
        "gate_up": Buffer(2 * config.ffn),
        "act": Buffer(config.ffn),
        "last": Buffer(config.hidden, Rows.SAMPLED),
        "last_normed": Buffer(config.hidden, Rows.SAMPLED),
        LOGITS: Buffer(config.vocab_size, Rows.SAMPLED),
    }
    head = "token_embd.weight" if config.is_tied else "output.weight"
    ops = [Op(OpKind.EMBED, (TOKENS,), "x", ("token_embd.weight",))]
    for layer in range(config.num_layers):
        ops += _attention_ops(config, layer)
        ops += _ffn_ops(config, layer)
    ops += [
        Op(OpKind.SELECT, ("x",), "last"),
        Op(OpKind.RMS_NORM, ("last",), "last_normed", ("output_norm.weight",), eps=config.rms_eps),
        Op(OpKind.MATMUL, ("last_normed",), LOGITS, (head,)),
    ]
    return Program(tuple(ops), buffers, tensor_shapes(config), (shape,) * config.num_layers, config.vocab_size)


def _attention_ops(config: ModelConfig, layer: int) -> list[Op]:
    prefix = f"blk.{layer}."
    names = [f"{prefix}attn_{part}" for part in "qkv"]
    biases = tuple(f"{name}.bias" for name in names) if config.has_qkv_bias else ()
    rope = Rope(config.rope_theta, config.rope_style, "rope_freqs.weight" if config.has_rope_freqs else None)
    return [
        Op(OpKind.RMS_NORM, ("x",), "normed", (f"{prefix}attn_norm.weight",), eps=config.rms_eps),
        Op(OpKind.MATMUL, ("normed",), "qkv", tuple(f"{name}.weight" for name in names), biases),
        Op(OpKind.ROPE, ("qkv",), "qkv", layer=layer, rope=rope),
        Op(OpKind.KV_APPEND, ("qkv",), "qkv", layer=layer),
        Op(OpKind.ATTENTION, ("qkv",), "attended", layer=layer),
        Op(OpKind.MATMUL_ADD, ("attended",), "x", (f"{prefix}attn_output.weight",)),
    ]


def _ffn_ops(config: ModelConfig, layer: int) -> list[Op]:
    prefix = f"blk.{layer}."
    return [
        Op(OpKind.RMS_NORM, ("x",), "normed", (f"{prefix}ffn_norm.weight",), eps=config.rms_eps),
        Op(OpKind.MATMUL, ("normed",), "gate_up", (f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight")),
        Op(OpKind.SWIGLU, ("gate_up",), "act"),
        Op(OpKind.MATMUL_ADD, ("act",), "x", (f"{prefix}ffn_down.weight",)),
    ]


class InvalidProgramError(ValueError):
    """A program that no executor could run: a fault of the lowering, not of the model file."""


class _Checker:
    """Every name exists, every buffer is written before it is read, every shape fits its neighbours."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._written = {TOKENS}
        self._appended: set[int] = set()

    def check(self) -> None:
        for index, op in enumerate(self._program.ops):
            try:
                self._check_op(op)
            except InvalidProgramError as error:
                raise InvalidProgramError(f"op {index} {op.kind.name}: {error}") from None
        _require(LOGITS in self._written, "no op writes the logits")
        _require(self._buffer(LOGITS) == Buffer(self._program.vocab_size, Rows.SAMPLED), "the logits have the wrong shape")

    def _check_op(self, op: Op) -> None:
        _require(len(op.inputs) == 1, f"{len(op.inputs)} inputs, not 1")
        (source,) = op.inputs
        _require(source in self._written, f"reads {source!r}, which no op has written")
        reads_output = op.kind is OpKind.MATMUL_ADD
        _require(not reads_output or op.output in self._written, f"adds to {op.output!r}, which no op has written")
        x, y = self._buffer(source), self._buffer(op.output)
        rows = (Rows.STEP, Rows.SAMPLED) if op.kind is OpKind.SELECT else (x.rows, x.rows)
        _require((x.rows, y.rows) == rows, f"rows go from {x.rows} to {y.rows}")
        self._check_features(op, x.features, y.features)
        self._written.add(op.output)

    def _check_features(self, op: Op, x: int, y: int) -> None:
        match op.kind:
            case OpKind.EMBED:
                _require(
                    len(op.weights) == 1 and self._shape(op.weights[0]) == (self._program.vocab_size, y), "table of another shape"
                )
            case OpKind.RMS_NORM:
                _require(x == y and [self._shape(name) for name in op.weights] == [(x,)], "weights of another width")
                _require(op.eps > 0, "no eps")
            case OpKind.MATMUL | OpKind.MATMUL_ADD:
                self._check_matmul(op, x, y)
            case OpKind.SELECT:
                _require(x == y, "width changes")
            case OpKind.SWIGLU:
                _require(x == 2 * y, "input is not twice as wide as the output")
            case OpKind.ROPE | OpKind.KV_APPEND | OpKind.ATTENTION:
                self._check_attention(op, x, y)

    def _check_matmul(self, op: Op, x: int, y: int) -> None:
        shapes = [self._shape(name) for name in op.weights]
        _require(all(len(shape) == 2 and shape[1] == x for shape in shapes), f"weights do not take {x} features")
        _require(sum(shape[0] for shape in shapes) == y, f"weights do not make {y} features")
        if op.biases:
            _require(
                [self._shape(name) for name in op.biases] == [shape[:1] for shape in shapes], "biases do not match the weights"
            )

    def _check_attention(self, op: Op, x: int, y: int) -> None:
        _require(0 <= op.layer < len(self._program.kv_layers), f"layer {op.layer} keeps no keys and values")
        shape = self._program.kv_layers[op.layer]
        _require(shape.heads % shape.kv_heads == 0 and shape.head_dim % 2 == 0, "heads cannot be shared out")
        _require(x == shape.qkv_width, f"input is not q, k and v of layer {op.layer}")
        if op.kind is OpKind.ATTENTION:
            _require(y == shape.q_width, "output is not as wide as q")
            _require(op.layer in self._appended, "attends before its keys are appended")
            return
        _require(op.output == op.inputs[0], "works in place only")
        if op.kind is OpKind.KV_APPEND:
            _require(op.layer not in self._appended, "appends twice")
            self._appended.add(op.layer)
            return
        _require(op.rope is not None, "no rope")
        if op.rope is not None and op.rope.factors is not None:
            _require(self._shape(op.rope.factors) == (shape.head_dim // 2,), "factors of another width")

    def _buffer(self, name: str) -> Buffer:
        _require(name in self._program.buffers, f"no buffer {name!r}")
        return self._program.buffers[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        _require(name in self._program.tensors, f"no tensor {name!r}")
        return self._program.tensors[name]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise InvalidProgramError(reason)

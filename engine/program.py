"""A model as a list of ops: plain data that the reference executor and the device kernel both run.

Buffers and tensors are referred to by name. A buffer has so many features per row; the number of rows is that of the step, or
of its sampled rows. A program is checked when it is made, so executors need not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from ..kernels.abi import OpKind
from .model import DeltaShape, RopeStyle, Yarn

_TWO_INPUTS = frozenset({OpKind.GATE, OpKind.EXPERTS, OpKind.SHARED_EXPERT})
_READ_OUTPUT = frozenset({OpKind.MATMUL_ADD, OpKind.GATE, OpKind.EXPERTS, OpKind.SHARED_EXPERT, OpKind.GATED_NORM})


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
    dim: int
    """Leading features of a head that are rotated."""
    factors: str | None = None
    """Tensor [dim / 2] that divides the angles."""
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One op; OpKind gives its formula. Fields that its kind does not use keep their defaults."""

    kind: OpKind
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    """Matrices [n, in], stacked by rows into one; or the one table or vector of the op."""
    biases: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    """Tensors that the op uses one by one."""
    layer: int = 0
    """Index into Program.kv_layers, or Program.delta_layers for DELTA_NET and GATED_NORM."""
    eps: float = 0.0
    rope: Rope | None = None
    count: int = 0
    """Experts that ROUTE chooses."""
    joins: bool = False
    """Runs beside the op before it: there is no barrier between them."""

    @property
    def reads(self) -> frozenset[str]:
        """The buffers, and what is kept of a layer, that it looks at."""
        names = {*self.inputs}
        if self.kind in _READ_OUTPUT:
            names.add(self.output)
        if self.kind is OpKind.ATTENTION:
            names.add(f"keys and values of layer {self.layer}")
        return frozenset(names)

    @property
    def writes(self) -> frozenset[str]:
        names = {self.output}
        if self.kind is OpKind.KV_APPEND:
            names.add(f"keys and values of layer {self.layer}")
        elif self.kind is OpKind.DELTA_NET:
            names.add(f"state of layer {self.layer}")
        return frozenset(names)


@dataclass(frozen=True, slots=True)
class Program:
    ops: tuple[Op, ...]
    buffers: Mapping[str, Buffer]
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes, NumPy order, of the tensors that the ops name."""
    kv_layers: tuple[AttentionShape, ...]
    """One per layer that keeps keys and values."""
    delta_layers: tuple[DeltaShape, ...]
    """One per layer that keeps a recurrent state."""
    vocab_size: int

    def __post_init__(self) -> None:
        _Checker(self).check()

    @property
    def stages(self) -> list[list[int]]:
        """Indices of the ops between two barriers: those of one stage may run at once, in any order."""
        stages: list[list[int]] = []
        for index, op in enumerate(self.ops):
            if op.joins and stages:
                stages[-1].append(index)
            else:
                stages.append([index])
        return stages


TOKENS = "tokens"
LOGITS = "logits"


class InvalidProgramError(ValueError):
    """A program that no executor could run: a fault of the lowering, not of the model file."""


class _Checker:
    """Every name exists, every buffer is written before it is read, every shape fits its neighbours."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._written = {TOKENS}
        self._appended: set[int] = set()
        self._advanced: set[int] = set()

    def check(self) -> None:
        for index, op in enumerate(self._program.ops):
            try:
                self._check_op(op)
            except InvalidProgramError as error:
                raise InvalidProgramError(f"op {index} {op.kind.name}: {error}") from None
        self._check_races()
        _require(LOGITS in self._written, "no op writes the logits")
        _require(self._buffer(LOGITS) == Buffer(self._program.vocab_size, Rows.SAMPLED), "the logits have the wrong shape")

    def _check_races(self) -> None:
        """What an op of a stage writes, no other op of the stage may read or write."""
        for stage in self._program.stages:
            for first, second in combinations(stage, 2):
                a, b = self._program.ops[first], self._program.ops[second]
                shared = a.writes & (b.reads | b.writes) | a.reads & b.writes
                reason = (
                    f"op {second} {b.kind.name} runs beside op {first} {a.kind.name}, but both use {min(shared, default='')!r}"
                )
                _require(not shared, reason)

    def _check_op(self, op: Op) -> None:
        num_inputs = 2 if op.kind in _TWO_INPUTS else 1
        _require(len(op.inputs) == num_inputs, f"{len(op.inputs)} inputs, not {num_inputs}")
        for name in op.inputs:
            _require(name in self._written, f"reads {name!r}, which no op has written")
            _require(self._buffer(name).rows is self._buffer(op.inputs[0]).rows, "inputs of different rows")
        source = op.inputs[0]
        reads_output = op.kind in _READ_OUTPUT
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
            case OpKind.ROPE | OpKind.KV_APPEND | OpKind.ATTENTION | OpKind.QK_NORM | OpKind.DROP_GATE | OpKind.GATE:
                self._check_attention(op, x, y)
            case OpKind.ROUTE | OpKind.EXPERTS | OpKind.SHARED_EXPERT:
                self._check_experts(op, x, y)
            case OpKind.DELTA_NET | OpKind.GATED_NORM:
                self._check_delta(op, x, y)

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
        gated_width = shape.q_width + shape.qkv_width
        match op.kind:
            case OpKind.DROP_GATE:
                _require((x, y) == (gated_width, shape.qkv_width), f"not q, k and v of layer {op.layer} with and without gates")
            case OpKind.GATE:
                _require(op.output == op.inputs[0] and x == shape.q_width, "does not gate what was attended in place")
                _require(self._buffer(op.inputs[1]).features == gated_width, f"no gates of layer {op.layer}")
            case OpKind.ATTENTION:
                _require(x == shape.qkv_width, f"input is not q, k and v of layer {op.layer}")
                _require(y == shape.q_width, "output is not as wide as q")
                _require(op.layer in self._appended, "attends before its keys are appended")
            case _:
                _require(x == shape.qkv_width, f"input is not q, k and v of layer {op.layer}")
                _require(op.output == op.inputs[0], "works in place only")
                self._check_in_place(op, shape)

    def _check_in_place(self, op: Op, shape: AttentionShape) -> None:
        if op.kind is OpKind.KV_APPEND:
            _require(op.layer not in self._appended, "appends twice")
            self._appended.add(op.layer)
        elif op.kind is OpKind.QK_NORM:
            _require(self._params(op) == [(shape.head_dim,)] * 2, "weights of another width than a head")
            _require(op.eps > 0, "no eps")
        else:
            _require(op.rope is not None, "no rope")
            assert op.rope is not None
            _require(0 < op.rope.dim <= shape.head_dim and op.rope.dim % 2 == 0, "rotates more or less than a head")
            if op.rope.factors is not None:
                _require(self._shape(op.rope.factors) == (op.rope.dim // 2,), "factors of another width")

    def _check_experts(self, op: Op, x: int, y: int) -> None:
        if op.kind is OpKind.ROUTE:
            _require(op.output == op.inputs[0], "works in place only")
            _require(1 <= op.count <= x, f"chooses {op.count} of {x} experts")
            return
        x2 = self._buffer(op.inputs[1]).features
        if op.kind is OpKind.SHARED_EXPERT:
            _require(x == y and self._params(op) == [(x2,)], "gate of another width")
            return
        shapes = self._params(op)
        _require(len(shapes) == 3 and len(shapes[0]) == 3, "not gate, up and down of experts")
        count, ffn, _ = shapes[0]
        _require(x == y and count == x2 and shapes == [(count, ffn, x), (count, ffn, x), (count, x, ffn)], "experts do not fit")

    def _check_delta(self, op: Op, x: int, y: int) -> None:
        _require(0 <= op.layer < len(self._program.delta_layers), f"layer {op.layer} keeps no recurrent state")
        shape = self._program.delta_layers[op.layer]
        _require((x, y) == (shape.input_width, shape.v_width), f"not the widths of layer {op.layer}")
        _require(shape.v_heads % shape.k_heads == 0 and shape.conv_taps > 1, "heads cannot be shared out, or no taps")
        _require(op.eps > 0, "no eps")
        if op.kind is OpKind.GATED_NORM:
            _require(self._params(op) == [(shape.head_dim,)], "weights of another width than a head")
            return
        _require(op.layer not in self._advanced, "goes over the same positions twice")
        self._advanced.add(op.layer)
        per_head = (shape.v_heads,)
        _require(self._params(op) == [(shape.conv_width, shape.conv_taps), per_head, per_head], "tensors do not fit the heads")

    def _params(self, op: Op) -> list[tuple[int, ...]]:
        return [self._shape(name) for name in op.params]

    def _buffer(self, name: str) -> Buffer:
        _require(name in self._program.buffers, f"no buffer {name!r}")
        return self._program.buffers[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        _require(name in self._program.tensors, f"no tensor {name!r}")
        return self._program.tensors[name]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise InvalidProgramError(reason)

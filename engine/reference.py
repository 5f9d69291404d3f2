"""The reference executor: a program run with NumPy. It defines what each op computes, and runs models where there is no GPU.

Rows of all sequences are columns of one matrix per buffer, [features, columns], padded with zero columns (products.py). Every
op treats columns alike and in a fixed order of summation, so the logits of a row are the same bits alone, in a batch, in any
chunk and in any pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from ..kernels.abi import OpKind
from .backend import PAGE_TOKENS, SequenceRows, StepPlan, StepResult
from .budget import memory_budget
from .gguf_file import GgufFile
from .lowering import lower
from .model import DeltaShape, load_config
from .products import Products
from .program import LOGITS, AttentionShape, Op, Program, Rope, Rows
from .reference_attention import KvLayer, RowsView, rows_views
from .reference_deltanet import DeltaLayer, DeltaWeights
from .reference_experts import add_experts, route
from .reference_ops import RopeTable, add_gated, norm_heads, rms_norm, rotate, sigmoid, swiglu
from .sampling import choose
from .weights import Progress, Weights, load_weights
from .workers import Workers

Array = NDArray[np.float32]


class ReferenceBackend:
    """Backend on NumPy. Reads the file whole when made; it may be closed then."""

    def __init__(
        self,
        file: GgufFile,
        *,
        num_pages: int,
        max_rows: int = 64,
        num_slots: int = 4,
        num_checkpoints: int = 0,
        on_progress: Progress | None = None,
        is_padded: bool = True,
    ) -> None:
        """`is_padded` False gives up bit identity, to measure what it costs.

        Raises ModelFileError for a file that cannot be run, EngineError if the memory does not suffice.
        """
        config = load_config(file)
        memory_budget(
            file, config, num_pages=num_pages, max_rows=max_rows, num_slots=num_slots, num_checkpoints=num_checkpoints
        ).check()
        program = lower(config)
        self._num_pages = num_pages
        self._max_rows = max_rows
        self._num_slots = num_slots
        self._num_checkpoints = num_checkpoints
        weights = load_weights(file, program, on_progress)
        self._executor = Executor(program, weights, num_pages, is_padded)
        self._executor.make_states(num_slots, num_checkpoints)

    @property
    def vocab_size(self) -> int:
        return self._executor.program.vocab_size

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def has_recurrent_state(self) -> bool:
        return bool(self._executor.program.delta_layers)

    @property
    def num_checkpoints(self) -> int:
        return self._num_checkpoints

    def save_checkpoint(self, slot: int, position: int, checkpoint: int) -> None:
        """Raises ValueError if the slot does not hold the state at `position`."""
        self._check_state(slot, position)
        self._executor.save_checkpoint(slot, position, checkpoint)

    def load_checkpoint(self, slot: int, checkpoint: int) -> None:
        self._executor.load_checkpoint(slot, checkpoint)

    def step(self, plan: StepPlan) -> StepResult:
        """Raises ValueError for a plan that is not well formed, EngineError for sampling that is impossible."""
        self._check(plan)
        logits = self._executor.run(plan)
        tokens: list[NDArray[np.int32]] = []
        kept: list[Array | None] = []
        done = 0
        for sequence in plan.sequences:
            rows = logits[done : done + sequence.num_sampled]
            done += sequence.num_sampled
            tokens.append(choose(rows, sequence))
            kept.append(rows[: len(tokens[-1])].copy() if sequence.return_logits else None)
        return StepResult(tuple(tokens), tuple(kept))

    def _check(self, plan: StepPlan) -> None:
        total = sum(len(sequence.tokens) for sequence in plan.sequences)
        if not 1 <= total <= self._max_rows:
            raise ValueError(f"a step of {total} rows, not 1 to {self._max_rows}")
        for sequence in plan.sequences:
            count, pages = len(sequence.tokens), sequence.page_ids
            if not 0 <= sequence.num_sampled <= count or count == 0:
                raise ValueError(f"{sequence.num_sampled} sampled rows of {count}")
            if sequence.num_drafts and sequence.num_sampled != sequence.num_drafts + 1:
                raise ValueError(f"{sequence.num_drafts} drafts, but {sequence.num_sampled} sampled rows")
            if sequence.tokens.min() < 0 or sequence.tokens.max() >= self.vocab_size:
                raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}")
            if sequence.start < 0 or len(pages) != -(-(sequence.start + count) // PAGE_TOKENS):
                raise ValueError(f"{len(pages)} pages for positions up to {sequence.start + count}")
            if pages.min() < 0 or pages.max() >= self._num_pages:
                raise ValueError(f"page ids must be 0 to {self._num_pages - 1}")
        if self.has_recurrent_state:
            self._check_slots(plan)

    def _check_slots(self, plan: StepPlan) -> None:
        slots = [sequence.slot for sequence in plan.sequences]
        if min(slots) < 0 or max(slots) >= self._num_slots or len(set(slots)) < len(slots):
            raise ValueError(f"slots must be 0 to {self._num_slots - 1}, each once: {slots}")
        for sequence in plan.sequences:
            self._check_state(sequence.slot, sequence.start)

    def _check_state(self, slot: int, position: int) -> None:
        if not self._executor.can_start(slot, position):
            raise ValueError(f"slot {slot} does not hold the state at position {position}")


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence's columns of the step."""

    rows: SequenceRows
    columns: slice


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: NDArray[np.int32]
    """[rows]"""
    positions: NDArray[np.int64]
    """[columns], 0 where padded"""
    spans: tuple[_Span, ...]
    sampled: NDArray[np.int64]
    """Columns whose logits are wanted."""
    buffers: dict[str, Array]
    """[features, columns], but the logits [sampled rows, vocab]."""
    angles: dict[Rope, tuple[Array, Array]]
    """Cosines and sines of the positions."""
    views: dict[AttentionShape, list[RowsView]]
    """What the rows see of the cache, by the shape of the layer."""


class Executor:
    """Runs a program op by op. Holds its weights, its KV cache and its recurrent states."""

    def __init__(self, program: Program, weights: Weights, num_pages: int, is_padded: bool = True) -> None:
        self.program = program
        self._weights = weights
        self._layers = [KvLayer(shape, num_pages) for shape in program.kv_layers]
        self._delta_layers: list[DeltaLayer] = []
        self._blas = ThreadpoolController().select(user_api="blas")
        self._workers = Workers(max((library["num_threads"] for library in self._blas.info()), default=1))
        with self._blas.limit(limits=1):
            self._products, self._page_products = self._make_products() if is_padded else (Products.unpadded(self._workers),) * 2
        self._ropes: dict[Rope, RopeTable] = {}
        self._run_op: dict[OpKind, Callable[[_Step, Op], None]] = {
            OpKind.EMBED: self._embed,
            OpKind.RMS_NORM: self._rms_norm,
            OpKind.MATMUL: self._matmul,
            OpKind.MATMUL_ADD: self._matmul_add,
            OpKind.ROPE: self._rope,
            OpKind.KV_APPEND: self._kv_append,
            OpKind.ATTENTION: self._attention,
            OpKind.SWIGLU: self._swiglu,
            OpKind.SELECT: self._select,
            OpKind.QK_NORM: self._qk_norm,
            OpKind.DROP_GATE: self._drop_gate,
            OpKind.GATE: self._gate,
            OpKind.ROUTE: self._route,
            OpKind.EXPERTS: self._experts,
            OpKind.SHARED_EXPERT: self._shared_expert,
            OpKind.DELTA_NET: self._delta_net,
            OpKind.GATED_NORM: self._gated_norm,
        }

    def make_states(self, num_slots: int, num_checkpoints: int) -> None:
        """Allocate the recurrent states, if the program has any."""
        ops = {op.layer: op for op in self.program.ops if op.kind is OpKind.DELTA_NET}
        for layer, shape in enumerate(self.program.delta_layers):
            self._delta_layers.append(DeltaLayer(shape, self._delta_weights(ops[layer]), num_slots, num_checkpoints))

    def can_start(self, slot: int, position: int) -> bool:
        return all(layer.can_start(slot, position) for layer in self._delta_layers)

    def save_checkpoint(self, slot: int, position: int, checkpoint: int) -> None:
        with np.errstate(all="ignore"), self._blas.limit(limits=1):
            for layer in self._delta_layers:
                layer.save(slot, position, checkpoint)

    def load_checkpoint(self, slot: int, checkpoint: int) -> None:
        for layer in self._delta_layers:
            layer.load(slot, checkpoint)

    def run(self, plan: StepPlan) -> Array:
        """Logits [sampled rows, vocab] in the plan's order."""
        return self.run_ops(plan, range(len(self.program.ops)))[LOGITS]

    def run_ops(self, plan: StepPlan, order: Iterable[int]) -> dict[str, Array]:
        """The buffers after the ops of these indices: fewer than all to look inside a step, or those of a stage in another order.

        Buffers are [features, columns], the columns in the plan's order of rows; the logits [sampled rows, vocab]. What no op
        has written holds anything.
        """
        step = self._begin(plan)
        # Weights of a damaged file may overflow; sampling refuses logits that are not finite.
        with np.errstate(all="ignore"), self._blas.limit(limits=1):
            for op in map(self.program.ops.__getitem__, order):
                if len(step.sampled) or self.program.buffers[op.output].rows is Rows.STEP:
                    self._run_op[op.kind](step, op)
        return step.buffers

    def _begin(self, plan: StepPlan) -> _Step:
        spans: list[_Span] = []
        done = 0
        for sequence in plan.sequences:
            spans.append(_Span(sequence, slice(done, done + len(sequence.tokens))))
            done += len(sequence.tokens)
        positions = np.zeros(self._products.padded(done), np.int64)
        for span in spans:
            positions[span.columns] = np.arange(span.rows.start, span.rows.start + len(span.rows.tokens))
        sampled = [np.arange(span.columns.stop - span.rows.num_sampled, span.columns.stop) for span in spans]
        tokens = np.concatenate([sequence.tokens for sequence in plan.sequences])
        step = _Step(tokens, positions, tuple(spans), np.concatenate(sampled), {}, {}, {})
        self._allocate(step)
        return step

    def _allocate(self, step: _Step) -> None:
        columns = {Rows.STEP: len(step.positions), Rows.SAMPLED: self._products.padded(len(step.sampled))}
        for name, buffer in self.program.buffers.items():
            shape = (buffer.features, columns[buffer.rows])
            step.buffers[name] = np.empty((len(step.sampled), buffer.features) if name == LOGITS else shape, np.float32)

    def _embed(self, step: _Step, op: Op) -> None:
        table = self._weights.embedding
        rows = table[step.tokens] if isinstance(table, np.ndarray) else table.rows(step.tokens)
        out = step.buffers[op.output]
        out[:, : len(rows)] = rows.T
        out[:, len(rows) :] = 0

    def _rms_norm(self, step: _Step, op: Op) -> None:
        rms_norm(step.buffers[op.inputs[0]], self._weights.matrices[op.weights], op.eps, step.buffers[op.output])

    def _matmul(self, step: _Step, op: Op) -> None:
        weights, x, out = self._weights.matrices[op.weights], step.buffers[op.inputs[0]], step.buffers[op.output]
        if op.output == LOGITS:
            self._products.multiply_rows(weights, x, out)
            return
        self._products.multiply(weights, x, out)
        if op.biases:
            out += self._weights.matrices[op.biases][:, np.newaxis]

    def _matmul_add(self, step: _Step, op: Op) -> None:
        x, total = step.buffers[op.inputs[0]], step.buffers[op.output]
        product = np.empty_like(total)
        self._products.multiply(self._weights.matrices[op.weights], x, product)
        total += product
        if op.biases:
            total += self._weights.matrices[op.biases][:, np.newaxis]

    def _rope(self, step: _Step, op: Op) -> None:
        assert op.rope is not None
        shape = self.program.kv_layers[op.layer]
        rope = op.rope
        if rope not in self._ropes:
            factors = self._weights.matrices[(rope.factors,)] if rope.factors is not None else None
            self._ropes[rope] = RopeTable(rope.theta, rope.dim, factors, rope.yarn)
        if rope not in step.angles:
            step.angles[rope] = self._ropes[rope].at(step.positions)
        heads = step.buffers[op.output][: shape.q_width + shape.kv_width].reshape(-1, shape.head_dim, len(step.positions))
        rotate(heads, *step.angles[rope], rope.style)

    def _kv_append(self, step: _Step, op: Op) -> None:
        shape = self.program.kv_layers[op.layer]
        kv = step.buffers[op.inputs[0]][shape.q_width :].reshape(2, shape.kv_heads, shape.head_dim, -1)
        for span in step.spans:
            k, v = kv[:, :, :, span.columns]
            self._layers[op.layer].append(k, v, span.rows.start, span.rows.page_ids)

    def _attention(self, step: _Step, op: Op) -> None:
        shape = self.program.kv_layers[op.layer]
        q = step.buffers[op.inputs[0]][: shape.q_width].reshape(shape.heads, shape.head_dim, -1)
        out = step.buffers[op.output]
        out[:, len(step.tokens) :] = 0
        heads = out.reshape(shape.heads, shape.head_dim, -1)
        layer, products = self._layers[op.layer], self._page_products

        def attend(view: RowsView) -> None:
            heads[:, :, view.columns] = layer.attend(q[:, :, view.columns], view, products)

        if shape not in step.views:
            step.views[shape] = [
                view
                for span in step.spans
                for view in rows_views(shape, span.rows.start, span.columns, span.rows.page_ids, products)
            ]
        self._workers.run(attend, step.views[shape])

    def _swiglu(self, step: _Step, op: Op) -> None:
        swiglu(step.buffers[op.inputs[0]], step.buffers[op.output])

    def _select(self, step: _Step, op: Op) -> None:
        out = step.buffers[op.output]
        out[:, : len(step.sampled)] = step.buffers[op.inputs[0]][:, step.sampled]
        out[:, len(step.sampled) :] = 0

    def _qk_norm(self, step: _Step, op: Op) -> None:
        shape = self.program.kv_layers[op.layer]
        heads = step.buffers[op.output].reshape(-1, shape.head_dim, len(step.positions))
        q_weight, k_weight = self._params(op)
        norm_heads(heads[: shape.heads], q_weight, op.eps)
        norm_heads(heads[shape.heads : shape.heads + shape.kv_heads], k_weight, op.eps)

    def _drop_gate(self, step: _Step, op: Op) -> None:
        shape = self.program.kv_layers[op.layer]
        x, out = step.buffers[op.inputs[0]], step.buffers[op.output]
        out[: shape.q_width].reshape(shape.heads, shape.head_dim, -1)[:] = _gated_heads(x, shape)[:, 0]
        out[shape.q_width :] = x[2 * shape.q_width :]

    def _gate(self, step: _Step, op: Op) -> None:
        shape = self.program.kv_layers[op.layer]
        gates = _gated_heads(step.buffers[op.inputs[1]], shape)[:, 1]
        step.buffers[op.output][:] *= sigmoid(gates).reshape(shape.q_width, -1)

    def _route(self, step: _Step, op: Op) -> None:
        route(step.buffers[op.output], op.count)

    def _experts(self, step: _Step, op: Op) -> None:
        x, weights = (step.buffers[name] for name in op.inputs)
        gate, up, down = self._params(op)
        add_experts(step.buffers[op.output], x, weights[:, : len(step.tokens)], (gate, up, down), self._products)

    def _shared_expert(self, step: _Step, op: Op) -> None:
        x, gate_input = (step.buffers[name] for name in op.inputs)
        (gate,) = self._params(op)
        add_gated(step.buffers[op.output], x, gate_input, gate)

    def _delta_net(self, step: _Step, op: Op) -> None:
        layer = self._delta_layers[op.layer]
        channels, _, heads = _delta_parts(step.buffers[op.inputs[0]], self.program.delta_layers[op.layer])
        out = step.buffers[op.output]
        out[:, len(step.tokens) :] = 0

        def advance(span: _Span) -> None:
            rows = np.concatenate([channels[:, span.columns].T, heads[:, span.columns].T], axis=1)
            out[:, span.columns] = layer.run(span.rows.slot, span.rows.start, rows).T

        self._workers.run(advance, step.spans)

    def _gated_norm(self, step: _Step, op: Op) -> None:
        shape = self.program.delta_layers[op.layer]
        _, z, _ = _delta_parts(step.buffers[op.inputs[0]], shape)
        out = step.buffers[op.output]
        (weight,) = self._params(op)
        norm_heads(out.reshape(shape.v_heads, shape.head_dim, -1), weight, op.eps)
        out *= z * sigmoid(z)

    def _params(self, op: Op) -> list[Array]:
        return [self._weights.matrices[(name,)] for name in op.params]

    def _delta_weights(self, op: Op) -> DeltaWeights:
        conv, decay, time_bias = self._params(op)
        return DeltaWeights(np.ascontiguousarray(conv.T), decay.astype(np.float64), time_bias.astype(np.float64), op.eps)

    def _make_products(self) -> tuple[Products, Products]:
        """Products with the weights, and products of one page of keys or values."""
        shapes: set[tuple[int, int]] = set()
        for op in self.program.ops:
            if op.kind in (OpKind.MATMUL, OpKind.MATMUL_ADD):
                rows, inner = self._weights.matrices[op.weights].shape
                shapes.add((rows, inner))
            elif op.kind is OpKind.EXPERTS:
                shapes |= {(expert.shape[1], expert.shape[2]) for expert in self._params(op)}
        head_dims = {shape.head_dim for shape in self.program.kv_layers}
        pages = [pair for head_dim in head_dims for pair in ((PAGE_TOKENS, head_dim), (head_dim, PAGE_TOKENS))]
        return Products.for_shapes(shapes, self._workers), Products.for_shapes(pages)


def _gated_heads(x: Array, shape: AttentionShape) -> Array:
    """[heads, (q, gate), head_dim, columns] of x = q and gate head by head, then k and v."""
    return x[: 2 * shape.q_width].reshape(shape.heads, 2, shape.head_dim, -1)


def _delta_parts(x: Array, shape: DeltaShape) -> tuple[Array, Array, Array]:
    """(conv channels, z, alphas and betas) of x, each [features, columns]."""
    channels, z, heads = np.split(x, [shape.conv_width, shape.conv_width + shape.v_width])
    return channels, z, heads

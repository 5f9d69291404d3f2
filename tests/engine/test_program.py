"""Lowering, and programs that the checker must reject."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.lowering import lower
from quadjet.engine.model import ModelConfig, load_config
from quadjet.engine.program import Buffer, InvalidProgramError, Op, Program, Rows
from quadjet.kernels.abi import OpKind
from tiny_models import FAMILIES, tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    with GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch="qwen2")) as file:
        return load_config(file)


@pytest.fixture(scope="module")
def program(config: ModelConfig) -> Program:
    return lower(config)


def test_a_layer_is_ten_ops(program: Program) -> None:
    layer = ["RMS_NORM", "MATMUL", "ROPE", "KV_APPEND", "ATTENTION", "MATMUL_ADD", "RMS_NORM", "MATMUL", "SWIGLU", "MATMUL_ADD"]
    expected = ["EMBED", *3 * layer, "SELECT", "RMS_NORM", "MATMUL"]
    assert [op.kind.name for op in program.ops] == expected


def test_every_tensor_of_the_file_is_used(tmp_path: Path) -> None:
    for arch in FAMILIES:
        with GgufFile.open(tiny_model(tmp_path, arch=arch)) as file:
            config = load_config(file)
            used = {name for op in lower(config).ops for name in (*op.weights, *op.biases, *op.params)}
            assert used == {name for name in file.tensors if not name.startswith(f"blk.{config.num_layers}.")}


def test_an_untied_head_and_rope_factors_are_used(config: ModelConfig) -> None:
    ops = lower(replace(config, is_tied=False, has_rope_freqs=True)).ops
    assert ops[-1].weights == ("output.weight",)
    assert {op.rope.factors for op in ops if op.rope} == {"rope_freqs.weight"}


def with_op(program: Program, kind: OpKind, **changes: object) -> tuple[Op, ...]:
    """The ops with the first of its kind changed."""
    index = next(i for i, op in enumerate(program.ops) if op.kind is kind)
    changed = replace(program.ops[index], **changes)  # type: ignore[arg-type]
    return (*program.ops[:index], changed, *program.ops[index + 1 :])


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (OpKind.EMBED, {"weights": ("output_norm.weight",)}, "table of another shape"),
        (OpKind.EMBED, {"inputs": ("nowhere",)}, "'nowhere', which no op has written"),
        (OpKind.EMBED, {"output": "nowhere"}, "no buffer 'nowhere'"),
        (OpKind.RMS_NORM, {"weights": ("blk.0.attn_q.bias", "blk.0.attn_k.bias")}, "weights of another width"),
        (OpKind.RMS_NORM, {"weights": ("nothing",)}, "no tensor 'nothing'"),
        (OpKind.RMS_NORM, {"eps": 0.0}, "no eps"),
        (OpKind.RMS_NORM, {"inputs": ("attended",)}, "'attended', which no op has written"),
        (OpKind.RMS_NORM, {"output": "last"}, "rows go from step to sampled"),
        (OpKind.MATMUL, {"weights": ("blk.0.attn_q.weight",)}, "do not make 512 features"),
        (OpKind.MATMUL, {"weights": ("blk.0.ffn_down.weight",)}, "do not take 256 features"),
        (OpKind.MATMUL, {"biases": ("blk.0.attn_q.bias",)}, "biases do not match"),
        (OpKind.MATMUL, {"inputs": ("x", "normed")}, "2 inputs"),
        (OpKind.ROPE, {"rope": None}, "no rope"),
        (OpKind.ROPE, {"layer": 3}, "layer 3 keeps no keys"),
        (OpKind.ROPE, {"inputs": ("x",)}, "input is not q, k and v"),
        (OpKind.KV_APPEND, {"layer": -1}, "layer -1 keeps no keys"),
        (OpKind.KV_APPEND, {"layer": 1}, "attends before its keys are appended"),
        (OpKind.ATTENTION, {"output": "act"}, "output is not as wide as q"),
        (OpKind.SWIGLU, {"output": "gate_up"}, "not twice as wide"),
        (OpKind.MATMUL_ADD, {"output": "gate_up"}, "adds to 'gate_up', which no op has written"),
        (OpKind.SELECT, {"output": "normed"}, "rows go from step to step"),
    ],
)
def test_a_program_that_cannot_run_is_rejected(program: Program, kind: OpKind, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidProgramError, match=reason):
        replace(program, ops=with_op(program, kind, **changes))


def test_logits_are_required(program: Program) -> None:
    with pytest.raises(InvalidProgramError, match="no op writes the logits"):
        replace(program, ops=program.ops[:-1])


def test_logits_have_the_width_of_the_vocabulary(program: Program) -> None:
    ops = (*program.ops[:-1], replace(program.ops[-1], weights=("blk.0.ffn_gate.weight",)))
    with pytest.raises(InvalidProgramError, match="the logits have the wrong shape"):
        replace(program, ops=ops, buffers={**program.buffers, "logits": Buffer(512, Rows.SAMPLED)})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Program:
    with GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch="qwen35moe")) as file:
        return lower(load_config(file))


def test_the_layers_of_a_hybrid(hybrid: Program) -> None:
    kinds = [op.kind.name for op in hybrid.ops]
    experts = ["RMS_NORM", "MATMUL", "MATMUL", "ROUTE", "SWIGLU", "EXPERTS", "MATMUL", "SHARED_EXPERT"]
    delta = ["RMS_NORM", "MATMUL", "DELTA_NET", "GATED_NORM", "MATMUL_ADD", *experts]
    attention = ["RMS_NORM", "MATMUL", "DROP_GATE", "QK_NORM", "ROPE", "KV_APPEND", "ATTENTION", "GATE", "MATMUL_ADD", *experts]
    assert kinds == ["EMBED", *3 * delta, *attention, "SELECT", "RMS_NORM", "MATMUL"]
    assert (len(hybrid.delta_layers), len(hybrid.kv_layers)) == (3, 1)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (OpKind.DELTA_NET, {"layer": 1}, "goes over the same positions twice"),
        (OpKind.DELTA_NET, {"layer": 3}, "layer 3 keeps no recurrent state"),
        (OpKind.DELTA_NET, {"inputs": ("normed",)}, "not the widths of layer 0"),
        (OpKind.DELTA_NET, {"params": ("blk.0.ssm_a",) * 3}, "tensors do not fit the heads"),
        (OpKind.DELTA_NET, {"eps": 0.0}, "no eps"),
        (OpKind.GATED_NORM, {"params": ()}, "weights of another width than a head"),
        (OpKind.GATED_NORM, {"output": "attended"}, "adds to 'attended', which no op has written"),
        (OpKind.DROP_GATE, {"inputs": ("normed",)}, "with and without gates"),
        (OpKind.GATE, {"inputs": ("attended",)}, "1 inputs, not 2"),
        (OpKind.GATE, {"inputs": ("attended", "qkv")}, "no gates of layer 0"),
        (OpKind.GATE, {"output": "x"}, "does not gate what was attended in place"),
        (OpKind.QK_NORM, {"params": ("blk.3.attn_q_norm.weight",)}, "weights of another width than a head"),
        (OpKind.QK_NORM, {"output": "gated_qkv"}, "works in place only"),
        (OpKind.ROUTE, {"count": 9}, "chooses 9 of 8 experts"),
        (OpKind.ROUTE, {"count": 0}, "chooses 0 of 8 experts"),
        (OpKind.ROUTE, {"output": "normed"}, "works in place only"),
        (OpKind.EXPERTS, {"params": ("blk.0.ffn_gate_exps.weight",) * 2}, "not gate, up and down"),
        (OpKind.EXPERTS, {"params": ("blk.0.ffn_gate_exps.weight",) * 3, "inputs": ("normed", "x")}, "experts do not fit"),
        (OpKind.SHARED_EXPERT, {"params": ("blk.0.ssm_a",)}, "gate of another width"),
        (OpKind.SHARED_EXPERT, {"inputs": ("shared", "last")}, "'last', which no op has written"),
    ],
)
def test_a_hybrid_that_cannot_run_is_rejected(hybrid: Program, kind: OpKind, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidProgramError, match=reason):
        replace(hybrid, ops=with_op(hybrid, kind, **changes))


def test_a_shared_expert_is_computed_beside_the_routed_ones(hybrid: Program) -> None:
    together = [[hybrid.ops[index].kind.name for index in stage] for stage in hybrid.stages if len(stage) > 1]
    assert together == 4 * [["MATMUL", "MATMUL"], ["ROUTE", "SWIGLU"], ["EXPERTS", "MATMUL"]]


def test_an_op_that_misses_its_barrier_is_rejected(hybrid: Program) -> None:
    for index in (stage[0] for stage in hybrid.stages[1:]):
        ops = (*hybrid.ops[:index], replace(hybrid.ops[index], joins=True), *hybrid.ops[index + 1 :])
        with pytest.raises(InvalidProgramError, match=r"op \d+ \w+ runs beside op \d+ \w+, but both use"):
            replace(hybrid, ops=ops)


def test_ops_that_write_the_same_buffer_need_a_barrier(hybrid: Program) -> None:
    last = max(i for i, op in enumerate(hybrid.ops) if op.kind is OpKind.SHARED_EXPERT)
    ops = (*hybrid.ops[:last], replace(hybrid.ops[last], joins=True), *hybrid.ops[last + 1 :])
    with pytest.raises(InvalidProgramError, match="both use 'x'"):
        replace(hybrid, ops=ops)

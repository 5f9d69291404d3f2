"""Looking inside a step: ops of one stage in any order, and a step that stops after any op."""

from __future__ import annotations

import numpy as np
import pytest
from quadjet.engine.backend import SequenceRows, StepPlan
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.lowering import lower
from quadjet.engine.model import load_config
from quadjet.engine.program import LOGITS, Rows
from quadjet.engine.reference import Executor
from quadjet.engine.weights import load_weights
from reference_runs import GREEDY, some_tokens
from tiny_models import FAMILIES, VOCAB, tiny_model

TOKENS = some_tokens(9, VOCAB, seed=5)
PLAN = StepPlan((SequenceRows(0, TOKENS, np.zeros(1, np.int32), 2, GREEDY),))


@pytest.fixture(scope="module", params=FAMILIES)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    with GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch=request.param)) as file:
        program = lower(load_config(file))
        executor = Executor(program, load_weights(file, program), num_pages=1)
    executor.make_states(1, 0)
    return executor


def test_the_order_within_a_stage_does_not_matter(executor: Executor) -> None:
    expected = executor.run(PLAN)
    random = np.random.default_rng(3)
    for _ in range(3):
        order = [int(index) for stage in executor.program.stages for index in random.permutation(stage)]
        assert np.array_equal(executor.run_ops(PLAN, order)[LOGITS], expected)
    backwards = [index for stage in executor.program.stages for index in reversed(stage)]
    assert np.array_equal(executor.run_ops(PLAN, backwards)[LOGITS], expected)


def test_a_step_can_stop_after_any_op(executor: Executor) -> None:
    """What an op left is what the next op finds: every buffer is that of a longer run which did not write it again."""
    ops = executor.program.ops
    for stop in range(1, len(ops)):
        before, after = executor.run_ops(PLAN, range(stop)), executor.run_ops(PLAN, range(stop + 1))
        for name in {op.output for op in ops[:stop]} - {ops[stop].output}:
            count = len(TOKENS) if executor.program.buffers[name].rows is Rows.STEP else 2
            assert np.array_equal(before[name][:, :count], after[name][:, :count])

"""Synthetic models against llama.cpp: log-probabilities of its most likely tokens, and the real models' greedy text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import PAGE_TOKENS, SequenceRows, StepPlan
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.reference import ReferenceBackend
from quadjet.engine.tokenizer import Tokenizer
from reference_runs import GREEDY, log_softmax, run
from tiny_models import FAMILIES
from tools.synth_gguf import SHAPES, write

ORACLE = Path(__file__).parent.parent / "oracle"
FLOAT = [*(f"{family}-F32" for family in FAMILIES), "qwen3-yarn-F32"]
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'


def answers(name: str, folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """([steps, top] the reference's log-probabilities, ours of the same tokens, [steps, 2] the reference's and our first)."""
    oracle: dict[str, Any] = json.loads((ORACLE / f"{name}.json").read_text())
    made = oracle["generator"]
    path = folder / f"{name}.gguf"
    write(str(path), made["arch"], SHAPES[made["arch"], made["size"]], made["quant"], made["seed"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == oracle["sha256"], (
        "the generator makes other files than the oracle saw"
    )
    with GgufFile.open(path) as file:
        more = GgufFile(path, {**file.metadata, **made.get("metadata", {})}, file.tensors, np.memmap(path, np.uint8, mode="r"))
        backend = ReferenceBackend(more, num_pages=32)
    theirs, ours, firsts = [], [], []
    for case in oracle["cases"]:
        logprobs = log_softmax(run(backend, np.array(case["prompt"], np.int32), 64))
        for step in case["steps"]:
            row = logprobs[step["after"] - 1]
            theirs.append([logprob for _, logprob in step["top"]])
            ours.append([row[token] for token, _ in step["top"]])
            firsts.append((step["top"][0][0], int(row.argmax())))
    return np.array(theirs), np.array(ours), np.array(firsts)


@pytest.mark.parametrize("name", FLOAT)
def test_float_models_agree_with_llama_cpp(name: str, tmp_path: Path) -> None:
    theirs, ours, firsts = answers(name, tmp_path)
    assert np.abs(theirs - ours).max() < 2e-3
    assert (firsts[:, 0] == firsts[:, 1]).all()


@pytest.mark.parametrize("name", sorted({path.stem for path in ORACLE.glob("*.json")} - set(FLOAT)))
def test_quantised_models_agree_with_llama_cpp_up_to_its_rounding(name: str, tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits before it multiplies quantised weights; this executor does not."""
    theirs, ours, firsts = answers(name, tmp_path)
    differences = np.abs(theirs - ours)
    assert np.median(differences[:, :10]) < 0.05
    assert differences.max() < 0.5
    is_clear = theirs[:, 0] - theirs[:, 1] > 0.2
    assert (firsts[is_clear, 0] == firsts[is_clear, 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135m", "3725 198 198 1348 6230 2925 253 35881 2424 288 7529 260"),
        (
            "qwen2.5-coder-0.5b",
            "262 421 308 2651 220 15 510 286 470 220 15 198 262 4409 308 621 220 16 510 286 470 220 16 198 262 770 510 286",
        ),
    ],
)
def test_real_models_write_what_llama_cpp_writes(name: str, expected: str, model_path: Callable[[str], Path]) -> None:
    """As far as two builds of llama.cpp agree with each other."""
    with GgufFile.open(model_path(name)) as file:
        prompt = Tokenizer.from_gguf(file.metadata).encode(PROMPT)
        backend = ReferenceBackend(file, num_pages=2)
    tokens, done = list(prompt), 0
    for _ in expected.split():
        chunk = np.array(tokens[done:], np.int32)
        pages = np.arange(-(-len(tokens) // PAGE_TOKENS), dtype=np.int32)
        result = backend.step(StepPlan((SequenceRows(done, chunk, pages, 1, GREEDY),)))
        done = len(tokens)
        tokens.append(int(result.tokens[0][0]))
    assert tokens[len(prompt) :] == [int(token) for token in expected.split()]

"""The reference executor: the same bits however rows are grouped, and plans that are not well formed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import SequenceRows, StepPlan, TokenSampling
from quadjet.engine.budget import memory_budget
from quadjet.engine.errors import EngineError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.model import load_config
from quadjet.engine.reference import ReferenceBackend
from quadjet.engine.sampling import sample
from reference_runs import GREEDY, rows, run, run_side_by_side, some_tokens
from tiny_models import FAMILIES, VOCAB, tiny_model
from tools.synth_gguf import SHAPES, write

LENGTH = 210
PAGES = 24


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), arch=request.param)


@pytest.fixture(scope="module")
def backend(path: Path) -> ReferenceBackend:
    with GgufFile.open(path) as file:
        return ReferenceBackend(file, num_pages=PAGES, max_rows=256, num_checkpoints=3)


@pytest.fixture(scope="module")
def tokens() -> NDArray[np.int32]:
    return some_tokens(LENGTH, VOCAB, seed=1)


@pytest.fixture(scope="module")
def alone(backend: ReferenceBackend, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits [n, vocab], one row a step."""
    return run(backend, tokens, 1)


@pytest.mark.parametrize("chunk", [7, 16, 64, 200])
def test_chunks_do_not_change_a_bit(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32], chunk: int
) -> None:
    assert np.array_equal(run(backend, tokens, chunk), alone)


def test_sequences_beside_it_do_not_change_a_bit(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32]
) -> None:
    others = [some_tokens(count, VOCAB, seed=count) for count in (9, 133, 190)]
    pages = [np.arange(start, start + 4, dtype=np.int32) for start in (0, 4, 8, 12)]
    chunks = (5, 1, 33, 16)
    for place in range(4):
        beside = [*others[:place], tokens, *others[place:]]
        results = run_side_by_side(backend, list(zip(beside, pages, chunks, strict=True)))
        assert np.array_equal(results[place], alone)


@pytest.mark.parametrize("page_ids", [[5, 6, 7, 8], [9, 3, 4, 0], [20, 15, 10, 5]])
def test_pages_do_not_change_a_bit(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32], page_ids: list[int]
) -> None:
    run(backend, some_tokens(PAGES * 64, VOCAB, seed=2), 64)  # leaves every page full of another sequence
    assert np.array_equal(run(backend, tokens, 50, np.array(page_ids, np.int32)), alone)


def test_a_sequence_computed_again_from_the_middle_gives_the_same_bits(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32]
) -> None:
    pages = np.arange(4, dtype=np.int32)
    run(backend, tokens, 64, pages)
    if backend.has_recurrent_state:
        with pytest.raises(ValueError, match="slot 0 does not hold the state at position 150"):
            backend.step(StepPlan((rows(tokens, 150, 10, pages),)))
        return
    for start in (190, 150, 64, 30):
        (again,) = backend.step(StepPlan((rows(tokens, start, 10, pages),))).logits
        assert again is not None
        assert np.array_equal(again, alone[start : start + 10])


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_that_are_taken_back_leave_no_trace(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32], seed: int
) -> None:
    """As after refused drafts: a step may begin anywhere in or right after the last one."""
    random = np.random.default_rng(seed)
    pages = np.arange(4, dtype=np.int32)
    start = 0
    while start < LENGTH:
        count, wrong = int(random.integers(1, min(20, LENGTH - start) + 1)), int(random.integers(0, 5))
        tried = np.concatenate([tokens[: start + count], random.integers(0, VOCAB, wrong, dtype=np.int32)])
        (logits,) = backend.step(StepPlan((rows(tried, start, count + wrong, pages, slot=2),))).logits
        assert logits is not None
        assert np.array_equal(logits[:count], alone[start : start + count])
        start += int(random.integers(0, count + 1))


def test_a_slot_holds_one_sequence_of_a_step(backend: ReferenceBackend, tokens: NDArray[np.int32]) -> None:
    if not backend.has_recurrent_state:
        pytest.skip("attention alone keeps nothing in slots")
    for slots in ((0, 0), (0, 4), (-1, 0)):
        plan = StepPlan(tuple(rows(tokens, 0, 3, pages(slot + 1), slot=slot) for slot in slots))
        with pytest.raises(ValueError, match="each once"):
            backend.step(plan)


@pytest.mark.parametrize("core", ["", "Haswell"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_every_kernel_of_the_blas_gives_the_same_bits_in_any_chunk(path: Path, core: str, threads: str) -> None:
    """OpenBLAS chooses its kernel by the machine; Haswell's treats the columns of a wide product unlike each other."""
    cpu = Path("/proc/cpuinfo")
    if core and not (cpu.is_file() and "avx2" in cpu.read_text()):
        pytest.skip("this processor has no AVX2")
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
    environment |= {"OPENBLAS_NUM_THREADS": threads, "OPENBLAS_THREAD_TIMEOUT": "4"}
    environment |= {"OPENBLAS_CORETYPE": core} if core else {}
    command = [sys.executable, str(Path(__file__).with_name("digest_chunks.py")), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    digests = done.stdout.split()
    assert len(digests) == 5
    assert len(set(digests)) == 1


def test_only_sampled_rows_have_logits(backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32]) -> None:
    pages = np.arange(4, dtype=np.int32)
    silent = backend.step(StepPlan((rows(tokens, 0, 30, pages, num_sampled=0),)))
    last = backend.step(StepPlan((rows(tokens, 30, 30, pages, num_sampled=2),)))
    assert silent.tokens[0].shape == (0,)
    assert last.logits[0] is not None
    assert np.array_equal(last.logits[0], alone[58:60])


def test_tokens_are_sampled_from_the_logits_at_their_positions(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32]
) -> None:
    sampling = TokenSampling(temperature=1.5, seed=7)
    mask = np.full((3, VOCAB // 32), 0x0F0F0F0F, np.int32)
    plan = replace(rows(tokens, 0, 40, np.arange(1, dtype=np.int32), num_sampled=3), sampling=sampling, mask=mask)
    (chosen,) = backend.step(StepPlan((plan,))).tokens
    assert chosen.tolist() == sample(alone[37:40], np.arange(37, 40), sampling, mask).tolist()


def pages(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def bad_rows() -> Iterator[tuple[str, SequenceRows]]:
    good = SequenceRows(0, np.array([1, 2], np.int32), pages(0), 1, GREEDY)
    yield "page id", replace(good, page_ids=pages(PAGES))
    yield "page id", replace(good, page_ids=pages(-1))
    yield "pages", replace(good, page_ids=pages(0, 1))
    yield "pages", replace(good, start=63)
    yield "pages", replace(good, start=-1)
    yield "token ids", replace(good, tokens=np.array([0, VOCAB], np.int32))
    yield "token ids", replace(good, tokens=np.array([-1, 0], np.int32))
    yield "sampled", replace(good, num_sampled=3)
    yield "rows", replace(good, tokens=np.zeros(257, np.int32), page_ids=pages(0, 1, 2, 3, 4))


@pytest.mark.parametrize(("reason", "bad"), list(bad_rows()))
def test_a_plan_that_is_not_well_formed_is_refused(backend: ReferenceBackend, reason: str, bad: SequenceRows) -> None:
    with pytest.raises(ValueError, match=reason):
        backend.step(StepPlan((bad,)))


def test_values_that_are_not_finite_stay_in_their_sequence(tmp_path: Path) -> None:
    """What a sequence leaves in a page must not reach the sequence that gets the page next."""
    source = tmp_path / "untied.gguf"
    write(str(source), "qwen2", replace(SHAPES["qwen2", "tiny"], tied=False), "F32", 1)
    with GgufFile.open(source) as file:
        embedding = file.tensors["token_embd.weight"]
    data = bytearray(source.read_bytes())
    row = embedding.offset + 5 * embedding.nbytes // VOCAB
    data[row : row + 4] = np.float32(np.inf).tobytes()
    source.write_bytes(data)
    with GgufFile.open(source) as file:
        backend = ReferenceBackend(file, num_pages=1)
    clean, broken = np.array([1, 2, 3], np.int32), np.full(60, 5, np.int32)
    before = run(backend, clean, 3)
    with pytest.raises(EngineError, match="not finite"):
        run(backend, broken, 60)
    assert np.array_equal(run(backend, clean, 3), before)


def test_progress_reaches_the_whole(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with GgufFile.open(path) as file:
        ReferenceBackend(file, num_pages=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1]
    assert all(before[0] < after[0] for before, after in pairwise(seen))


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(path: Path) -> None:
    with GgufFile.open(path) as file:
        config = load_config(file)
        small = memory_budget(file, config, num_pages=4, free_bytes=10**6)
        large = memory_budget(file, config, num_pages=10**6, free_bytes=10**9)
        with pytest.raises(EngineError, match=r"(?s)GB .*70%.*engine\.model"):
            small.check()
        with pytest.raises(EngineError, match=r"(?s)KV cache.*engine\.context.*engine\.max_sequences"):
            large.check()


def test_the_cache_is_budgeted_before_it_is_made(path: Path) -> None:
    with GgufFile.open(path) as file, pytest.raises(EngineError, match="KV cache"):
        ReferenceBackend(file, num_pages=1 << 40)


def test_a_saved_state_is_the_state_bit_for_bit(
    backend: ReferenceBackend, tokens: NDArray[np.int32], alone: NDArray[np.float32]
) -> None:
    """Saved right after a step, in the middle of one and at its start; loaded into another slot."""
    if not backend.has_recurrent_state:
        pytest.skip("pages are all there is")
    pages = np.arange(4, dtype=np.int32)
    for checkpoint, position in enumerate((64, 75, 100)):
        for start, count in ((0, 64), (64, 36)):
            backend.step(StepPlan((rows(tokens, start, count, pages, slot=1),)))
        backend.save_checkpoint(1, position, checkpoint)
    with pytest.raises(ValueError, match="slot 1 does not hold the state at position 63"):
        backend.save_checkpoint(1, 63, 0)
    for checkpoint, position in enumerate((64, 75, 100)):
        backend.load_checkpoint(3, checkpoint)
        (logits,) = backend.step(StepPlan((rows(tokens, position, 50, pages, slot=3),))).logits
        assert logits is not None
        assert np.array_equal(logits, alone[position : position + 50])

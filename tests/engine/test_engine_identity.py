"""The same bits whatever runs beside a sequence, however its prompt is cut, whatever the cache holds. On the real executor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import TokenSampling
from quadjet.engine.channel import Done, LogitsRows, Token
from quadjet.engine.engine import Engine, Event, Vocabulary
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.reference import ReferenceBackend
from quadjet.engine.sequence import Sequence
from tiny_models import FAMILIES, VOCAB, tiny_model

CONTEXT = 1024
NO_END = Vocabulary(VOCAB, frozenset(), frozenset())
Outcome = tuple[list[int], NDArray[np.float32]]


@pytest.fixture(scope="module", params=[*((family, "F32") for family in FAMILIES), ("qwen2", "Q4_K_M")], ids="-".join)
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    arch, quant = request.param
    with GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch=arch, quant=quant)) as file:
        yield file


def make(file: GgufFile, max_rows: int = 64, max_sequences: int = 4) -> Engine:
    backend = ReferenceBackend(file, num_pages=4 * CONTEXT // 64, max_rows=max_rows, num_checkpoints=16)
    return Engine(backend, NO_END, context=CONTEXT, max_sequences=max_sequences)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, length)]


def sequence(seq_id: int, tokens: list[int], max_tokens: int = 8) -> Sequence:
    sampling = TokenSampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
    return Sequence(seq_id, list(tokens), len(tokens), max_tokens, sampling=sampling, key=f"key {seq_id}", return_logits=True)


def drain(engine: Engine, *sequences: Sequence) -> list[Event]:
    events = [event for s in sequences for event in engine.submit(s)]
    while engine.has_work:
        events += engine.step()
    return events


def outcome(events: list[Event], seq_id: int) -> Outcome:
    tokens = [e for e in events if isinstance(e, Token) and e.id == seq_id]
    assert tokens
    return [e.token for e in tokens], np.concatenate([e.logits for e in tokens if e.logits is not None])


def prompt_logits(engine: Engine, tokens: list[int]) -> NDArray[np.float32]:
    events = drain(engine, Sequence(99, list(tokens), len(tokens), 0))
    return np.concatenate([e.logits for e in events if isinstance(e, LogitsRows)])


def cached(events: list[Event], seq_id: int) -> int:
    return next(e.cached_tokens for e in events if isinstance(e, Done) and e.id == seq_id)


def assert_same(a: Outcome, b: Outcome) -> None:
    assert a[0] == b[0]
    assert a[1].tobytes() == b[1].tobytes()


def test_chunks_of_any_size_give_the_same_bits(model_file: GgufFile) -> None:
    tokens = prompt(213)
    generated = outcome(drain(make(model_file), sequence(1, tokens)), 1)
    whole = prompt_logits(make(model_file), tokens)
    assert whole.shape == (213, VOCAB)
    for rows, length in ((1, 70), (7, 213), (16, 213), (200, 213)):
        engine = make(model_file, max_rows=rows, max_sequences=1)
        assert prompt_logits(engine, tokens[:length]).tobytes() == whole[:length].tobytes(), f"chunks of {rows}"
    for rows in (7, 16, 200):
        engine = make(model_file, max_rows=rows, max_sequences=1)
        assert_same(outcome(drain(engine, sequence(1, tokens)), 1), generated)


def test_four_together_are_four_alone(model_file: GgufFile) -> None:
    prompts = {i: prompt(40 * i + 3, seed=i) for i in range(1, 5)}
    together = drain(make(model_file), *[sequence(i, tokens) for i, tokens in prompts.items()])
    for i, tokens in prompts.items():
        assert_same(outcome(together, i), outcome(drain(make(model_file), sequence(i, tokens)), i))


def test_a_cache_hit_gives_the_same_bits(model_file: GgufFile) -> None:
    engine = make(model_file)
    first = outcome(drain(engine, sequence(1, prompt(150))), 1)
    following = prompt(150) + first[0] + prompt(30, seed=7)
    fresh = outcome(drain(make(model_file), sequence(1, following)), 1)
    by_key = drain(engine, sequence(1, following))
    assert cached(by_key, 1) == 157  # all that was computed: the last page went over to the same key
    assert_same(outcome(by_key, 1), fresh)
    by_content = drain(engine, sequence(2, following))
    assert cached(by_content, 2) == 128  # another key shares full pages only
    assert_same(outcome(by_content, 2), fresh)


def test_one_prompt_computed_twice_at_once_ends_up_in_one_place(model_file: GgufFile) -> None:
    alone = outcome(drain(make(model_file), sequence(1, prompt(200))), 1)
    engine = make(model_file)
    together = drain(engine, *[sequence(i, prompt(200)) for i in range(1, 5)])
    for i in range(1, 5):
        assert_same(outcome(together, i), alone)
    assert engine.stats()["pages_idle"] == 3 + 4


def test_company_that_comes_and_goes_changes_nothing(model_file: GgufFile) -> None:
    alone = outcome(drain(make(model_file), sequence(1, prompt(30), max_tokens=20)), 1)
    engine = make(model_file)
    events = engine.submit(sequence(1, prompt(30), max_tokens=20))
    for i in range(2, 8):
        events += engine.submit(sequence(i, prompt(90, seed=i), max_tokens=4))
        events += engine.step()
        events += engine.step()
        events += engine.cancel(i) if i % 2 else []
    assert_same(outcome(events + drain(engine), 1), alone)

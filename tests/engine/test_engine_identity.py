"""The same bits whatever runs beside a sequence, however its prompt is cut, whatever the cache holds. On the real executor."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import TokenSampling
from quadjet.engine.channel import Done, LogitsRows, Token
from quadjet.engine.draft import DraftSource
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


class HalfRight:
    """Drafts that follow what is known to come for a random number of tokens, then something else."""

    def __init__(self, seed: int) -> None:
        self.known: dict[int, list[int]] = {}
        self._random = np.random.default_rng(seed)
        self.num_drafted = self.num_accepted = 0

    def propose(self, sequences: Items[Sequence], room: int) -> list[list[int]]:
        return [self._drafts(s, room // max(1, len(sequences))) for s in sequences]

    def _drafts(self, sequence: Sequence, room: int) -> list[int]:
        right = self.known[sequence.id][sequence.num_generated :][: int(self._random.integers(0, 6))]
        return [*right, *prompt(int(self._random.integers(0, 3)), int(self._random.integers(100)))][:room]

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def forget(self, sequence: Sequence) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


def make(file: GgufFile, max_rows: int = 64, max_sequences: int = 4, drafts: DraftSource | None = None) -> Engine:
    backend = ReferenceBackend(file, num_pages=4 * CONTEXT // 64, max_rows=max_rows, num_checkpoints=16)
    return Engine(backend, NO_END, context=CONTEXT, max_sequences=max_sequences, drafts=drafts)


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


@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_chunks_company_and_the_cache_change_nothing_together(model_file: GgufFile, seed: int) -> None:
    """Two turns of four agents, some with a common beginning, against each of them cold and alone."""
    random = np.random.default_rng(seed)
    prompts = {i: prompt(70) * (i % 2) + prompt(int(random.integers(1, 90)), seed=i) for i in range(4)}
    drafts, num_new = HalfRight(seed), dict[int, int]()
    engine = make(model_file, int(random.integers(4, 40)), drafts=drafts)
    for turn in range(2):
        alone = {i: outcome(drain(make(model_file), sequence(i, tokens, 12)), i) for i, tokens in prompts.items()}
        drafts.known = {i: tokens for i, (tokens, _) in alone.items()}
        together = drain(engine, *[sequence(i, tokens, 12) for i, tokens in prompts.items()])
        for i, expected in alone.items():
            assert_same(outcome(together, i), expected)
            # All that was computed before: the last token of an answer was not.
            assert turn == 0 or cached(together, i) == len(prompts[i]) - num_new[i] - 1
        num_new = {i: int(random.integers(1, 30)) for i in prompts}
        prompts = {i: [*prompts[i], *drafts.known[i], *prompt(num_new[i], seed=i + 10)] for i in prompts}
    assert 0 < drafts.num_accepted < drafts.num_drafted

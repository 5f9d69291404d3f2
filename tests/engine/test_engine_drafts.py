"""Drafts change how many steps a generation takes, and no token and no bit of its logits, however good or bad they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import Backend, TokenSampling
from quadjet.engine.channel import Done, Token, UpdateSource
from quadjet.engine.draft import DraftSource, PromptLookup
from quadjet.engine.engine import Engine, Event, Vocabulary
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.grammar import GrammarCompiler
from quadjet.engine.reference import ReferenceBackend
from quadjet.engine.sequence import Sequence, TokenMatcher
from quadjet.engine.tokenizer import Tokenizer
from tiny_models import tiny_model
from toy_backend import POISON, ToyBackend, ToyHybrid

PAGES = 64
SAMPLINGS = (TokenSampling(), TokenSampling(0.8, 40, 0.95, 0.0, 3), TokenSampling(1.5, seed=9))
GRAMMARS = (None, 'start: "{\\"name\\": \\"" /[a-z ]+/ "\\", \\"count\\": " /[0-9]{1,3}/ "}"', "start: /(yes|no|never)+/")
Outcome = tuple[list[int], list[NDArray[np.float32] | None], str]


@dataclass
class GuessingSource:
    """Drafts that follow the true continuation for a while, then go wrong, at random; some are no tokens at all."""

    vocab: int
    truth: Mapping[int, Items[int]]
    seed: int
    share_right: float = 0.9
    observed: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def propose(self, sequences: Items[Sequence], room: int) -> list[list[int]]:
        widths = self._random.multinomial(room, np.full(len(sequences), 1 / len(sequences)))
        return [self._guess(sequence, int(width)) for sequence, width in zip(sequences, widths, strict=True)]

    def _guess(self, sequence: Sequence, width: int) -> list[int]:
        true = list(self.truth.get(sequence.id, ()))[sequence.num_generated :]
        noise = self._random.integers(-1, self.vocab + 1, width).tolist()
        is_right = self._random.random(width) < self.share_right
        return [true[i] if i < len(true) and is_right[i] else noise[i] for i in range(width)]

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.observed.append((num_drafted, num_accepted))

    def forget(self, sequence: Sequence) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {"draft_guess_drafted": sum(drafted for drafted, _ in self.observed)}


@dataclass(frozen=True)
class Bench:
    """A model, made anew for each run, and four different things to generate."""

    model: GgufFile | None
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    is_hybrid: bool

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    def backend(self, max_rows: int) -> Backend:
        if self.model is None:
            toy = ToyHybrid if self.is_hybrid else ToyBackend
            return toy(num_pages=PAGES, max_rows=max_rows, vocab_size=self.vocab)
        return ReferenceBackend(self.model, num_pages=PAGES, max_rows=max_rows, num_checkpoints=16)

    def matcher(self, seq_id: int) -> TokenMatcher | None:
        grammar = GRAMMARS[seq_id % len(GRAMMARS)]
        return None if grammar is None else self.compiler.compile(grammar)

    def sequences(self, seed: int, max_tokens: int) -> list[Sequence]:
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 100, 4).tolist()
        return [
            Sequence(
                i,
                prompt := random.integers(POISON + 1, 256, lengths[i]).tolist(),
                len(prompt),
                max_tokens,
                sampling=SAMPLINGS[(seed + i) % len(SAMPLINGS)],
                matcher=self.matcher(i),
                key=f"key {i}",
                return_logits=True,
            )
            for i in range(4)
        ]

    def run(self, sequences: list[Sequence], source: DraftSource | None, max_rows: int) -> tuple[dict[int, Outcome], int]:
        """What came of each sequence, and the steps it took."""
        vocabulary = Vocabulary(self.vocab, self.tokenizer.eog_ids, self.tokenizer.unused_ids | {POISON})
        engine = Engine(self.backend(max_rows), vocabulary, context=512, drafts=source)
        events = drain(engine, *sequences)
        stats = engine.stats()
        assert stats["pages_used"] == 0
        return {sequence.id: outcome(events, sequence.id) for sequence in sequences}, int(stats["steps"])


def drain(engine: Engine, *sequences: Sequence) -> list[Event]:
    events: list[Event] = [event for sequence in sequences for event in engine.submit(sequence)]
    while engine.has_work:
        events += engine.step()
    return events


def outcome(events: list[Event], seq_id: int) -> Outcome:
    tokens = [event for event in events if isinstance(event, Token) and event.id == seq_id]
    (done,) = [event for event in events if isinstance(event, Done) and event.id == seq_id]
    return [event.token for event in tokens], [event.logits for event in tokens], done.reason


def assert_same(got: Outcome, wanted: Outcome) -> None:
    assert got[0] == wanted[0]
    assert got[2] == wanted[2]
    bits = [[None if rows is None else rows.tobytes() for rows in outcome[1]] for outcome in (got, wanted)]
    assert bits[0] == bits[1]


@pytest.fixture(scope="module", params=["toy", "toy hybrid", "llama", "qwen2", "qwen3moe", "qwen35", "qwen35moe"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    is_toy = request.param.startswith("toy")
    arch = "qwen2" if is_toy else request.param
    with GgufFile.open(tiny_model(tmp_path_factory.mktemp("models"), arch=arch)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        yield Bench(None if is_toy else file, tokenizer, GrammarCompiler(tokenizer), request.param == "toy hybrid")


@pytest.mark.parametrize("seed", range(2))
def test_drafts_change_no_token_and_no_bit(bench: Bench, seed: int) -> None:
    max_tokens = 30 + 40 * seed
    plain, plain_steps = bench.run(bench.sequences(seed, max_tokens), None, 64)
    truth = {seq_id: outcome[0] for seq_id, outcome in plain.items()}
    for share_right, max_rows in ((1.0, 64), (0.9, 20), (0.7, 64), (0.0, 7)):
        source = GuessingSource(bench.vocab, truth, seed, share_right)
        drafted, steps = bench.run(bench.sequences(seed, max_tokens), source, max_rows)
        for seq_id in plain:
            assert_same(drafted[seq_id], plain[seq_id])
        assert source.observed
        if share_right == 1.0:
            assert sum(right for _, right in source.observed) > 0.9 * sum(drafted for drafted, _ in source.observed)
            assert steps < plain_steps / 2


def test_looked_up_drafts_change_no_token_and_no_bit(bench: Bench) -> None:
    """Greedy replies of random weights soon go round in circles, which are drafted well; sampled ones are drafted badly."""
    plain, plain_steps = bench.run(bench.sequences(4, 80), None, 64)
    lookup = PromptLookup()
    for seq_id, (tokens, _, _) in plain.items():  # and a source holds half of what will be said
        lookup.update(UpdateSource(str(seq_id), "document", 0, 0, 0, np.array(tokens[:40], np.int32)))
    drafted, steps = bench.run(bench.sequences(4, 80), lookup, 64)
    for seq_id in plain:
        assert_same(drafted[seq_id], plain[seq_id])
    assert lookup.stats()["draft_document_accepted"] > 0
    assert steps < plain_steps


def test_a_following_turn_finds_the_cache_as_without_drafts(bench: Bench) -> None:
    """Rows of rejected drafts leave nothing behind that a later sequence could pick up."""
    vocabulary = Vocabulary(bench.vocab, frozenset(), bench.tokenizer.unused_ids | {POISON})
    outcomes: list[tuple[list[int], Outcome]] = []
    for share_right in (-1.0, 1.0, 0.5):
        truth = {1: outcomes[0][0]} if outcomes else {}
        source = GuessingSource(bench.vocab, truth, 5, share_right) if share_right >= 0 else None
        engine = Engine(bench.backend(64), vocabulary, context=512, drafts=source)
        prompt = list(range(60, 110))
        first = outcome(drain(engine, Sequence(1, list(prompt), 50, 90, key="a", return_logits=True)), 1)
        following = [*prompt, *first[0], 7, 8, 9]
        events = drain(engine, Sequence(2, following, len(following), 20, key="a", return_logits=True))
        (done,) = [event for event in events if isinstance(event, Done)]
        assert done.cached_tokens == 139
        second = outcome(events, 2)
        outcomes.append((first[0], second))
        assert first[0] == outcomes[0][0]
        assert_same(second, outcomes[0][1])


def test_drafts_leave_prompts_room() -> None:
    """Whatever is drafted, a waiting prompt gets at least half of the rows that the decoding ones leave."""
    backend = ToyBackend(num_pages=PAGES, max_rows=8, vocab_size=50)
    engine = Engine(backend, Vocabulary(50, frozenset(), frozenset()), context=512, drafts=GuessingSource(50, {}, 1))
    engine.submit(Sequence(1, [1, 2], 2, 100))
    engine.step()
    engine.submit(Sequence(2, [3] * 40, 40, 5))
    engine.step()
    assert [len(rows.tokens) for rows in backend.plans[-1].sequences] == [1 + 3, 4]

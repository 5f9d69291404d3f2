"""The step loop on a toy executor: what a sequence gets does not depend on its company, and its faults are its own."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quadjet.engine.backend import TokenSampling
from quadjet.engine.channel import Done, Failed, LogitsRows, Token
from quadjet.engine.engine import Engine, Event, Vocabulary, sequence_of_prompt_logits
from quadjet.engine.errors import EngineError
from quadjet.engine.sequence import Sequence
from toy_backend import POISON, ToyBackend, toy_logits

VOCAB = 50
EOG = 49
PADDING = POISON  # never generated, or the executor would fail


class FixedMatcher:
    """A grammar of one sentence. `num_forced` of its tokens at a time are announced beforehand."""

    def __init__(self, sentence: Items[int], num_forced: int = 0) -> None:
        self.left = list(sentence)
        self.num_forced = num_forced
        self.consumed: list[int] = []

    @property
    def is_done(self) -> bool:
        return not self.left

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        out[self.left[0] // 32] |= np.int32(1) << np.int32(self.left[0] % 32)

    def forced(self) -> list[int]:
        return self.left[: self.num_forced]

    def consume(self, token: int) -> None:
        if token != self.left[0]:
            raise EngineError("not the sentence")
        self.consumed.append(self.left.pop(0))

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.left.insert(0, self.consumed.pop())


def make(max_rows: int = 64, num_pages: int = 64, eog: Items[int] = (), max_sequences: int = 4) -> tuple[Engine, ToyBackend]:
    backend = ToyBackend(max_rows=max_rows, num_pages=num_pages, vocab_size=VOCAB)
    vocabulary = Vocabulary(VOCAB, frozenset(eog), frozenset([PADDING]))
    return Engine(backend, vocabulary, context=num_pages * 64, max_sequences=max_sequences), backend


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, PADDING, length)]


def sequence(seq_id: int, tokens: list[int], max_tokens: int = 12, **more: object) -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), max_tokens, **more)  # type: ignore[arg-type]


def drain(engine: Engine, *sequences: Sequence) -> list[Event]:
    events = [event for s in sequences for event in engine.submit(s)]
    for _ in range(2000):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: list[Event], seq_id: int) -> list[int]:
    return [e.token for e in events if isinstance(e, Token) and e.id == seq_id]


def done_of(events: list[Event], seq_id: int) -> Done:
    (done,) = [e for e in events if isinstance(e, Done) and e.id == seq_id]
    return done


def greedy(tokens: list[int], count: int) -> list[int]:
    """What the toy model says, by itself."""
    stream = list(tokens)
    for _ in range(count):
        logits = toy_logits(stream, VOCAB)
        logits[PADDING] = -np.inf
        stream.append(int(logits.argmax()))
    return stream[len(tokens) :]


def test_greedy_tokens_are_the_models() -> None:
    events = drain(make()[0], sequence(1, prompt(100)))
    assert tokens_of(events, 1) == greedy(prompt(100), 12)
    assert done_of(events, 1).reason == "length"


@pytest.mark.parametrize("max_rows", [4, 7, 16, 64, 200])
def test_company_and_chunks_change_nothing(max_rows: int) -> None:
    sampling = TokenSampling(temperature=1.0, top_p=0.9, seed=5)
    prompts = {i: prompt(50 * i, seed=i) for i in range(1, 7)}
    alone = {i: tokens_of(drain(make()[0], sequence(i, p, sampling=sampling)), i) for i, p in prompts.items()}
    together = drain(make(max_rows)[0], *[sequence(i, p, sampling=sampling) for i, p in prompts.items()])
    assert {i: tokens_of(together, i) for i in prompts} == alone


def test_a_reused_prefix_changes_nothing_and_is_counted() -> None:
    engine, _ = make()
    first = drain(engine, sequence(1, prompt(150), key="task"))
    following = prompt(150) + tokens_of(first, 1) + prompt(20, seed=9)
    second = drain(engine, sequence(2, following, key="task"))
    assert tokens_of(second, 2) == greedy(following, 12)
    assert done_of(second, 2).cached_tokens == 150 + 11  # the last generated token was never computed
    assert engine.stats()["cached_tokens"] == 161


def test_four_prompts_with_one_beginning_compute_it_once() -> None:
    engine, backend = make()
    shared = prompt(640)
    drain(engine, *[sequence(i, shared + prompt(10, seed=i), max_tokens=1) for i in range(4)])
    assert sum(len(s.tokens) for plan in backend.plans for s in plan.sequences) < 640 + 3 * 64 + 4 * 10


def test_end_of_generation_is_a_stop_and_no_token() -> None:
    sentence = greedy(prompt(20), 12)
    events = drain(make(eog=[sentence[5]])[0], sequence(1, prompt(20)))
    assert tokens_of(events, 1) == sentence[: sentence.index(sentence[5])]
    assert done_of(events, 1).reason == "stop"


def test_a_grammar_holds_every_token_and_its_end_is_a_stop() -> None:
    events = drain(make()[0], sequence(1, prompt(20), matcher=FixedMatcher([3, 40, 7])), sequence(2, prompt(20)))
    assert tokens_of(events, 1) == [3, 40, 7]
    assert (done_of(events, 1).reason, done_of(events, 1).completion_tokens) == ("stop", 3)
    assert tokens_of(events, 2) == greedy(prompt(20), 12)


@pytest.mark.parametrize(("num_forced", "num_steps"), [(0, 10), (1, 5), (4, 2), (9, 1), (10, 0)])
def test_forced_tokens_are_computed_in_one_step_with_the_next_choice(num_forced: int, num_steps: int) -> None:
    sentence = [3, 40, 7, 9, 12, 30, 31, 2, 5, 6]
    engine, backend = make()
    events = drain(engine, sequence(1, prompt(20), matcher=FixedMatcher(sentence, num_forced)))
    assert tokens_of(events, 1) == sentence
    assert (done_of(events, 1).reason, done_of(events, 1).completion_tokens) == ("stop", 10)
    assert len(backend.plans) == num_steps


def test_forced_tokens_end_at_the_limit_and_change_nothing_around_them() -> None:
    sentence = [3, 40, 7, 9, 12, 30, 31, 2, 5, 6] * 3
    engine, _ = make(max_rows=16)
    held = sequence(1, prompt(20), matcher=FixedMatcher(sentence, 20), max_tokens=25)
    events = drain(engine, held, *[sequence(i, prompt(30, seed=i)) for i in (2, 3, 4)])
    assert tokens_of(events, 1) == sentence[:25]
    assert done_of(events, 1).reason == "length"
    for i in (2, 3, 4):
        assert tokens_of(events, i) == greedy(prompt(30, seed=i), 12)


def test_a_grammar_that_wants_a_padding_token_ends_its_sequence_only() -> None:
    events = drain(make()[0], sequence(1, prompt(20), matcher=FixedMatcher([PADDING])), sequence(2, prompt(20)))
    assert [e.message for e in events if isinstance(e, Failed)] == ["the grammar allows no token that the model has"]
    assert tokens_of(events, 2) == greedy(prompt(20), 12)


def test_a_fault_of_the_executor_ends_the_sequence_that_caused_it() -> None:
    engine, _ = make()
    events = drain(engine, sequence(1, prompt(90)), sequence(2, [4, POISON, 6]), sequence(3, prompt(70)))
    assert [(e.id, e.message) for e in events if isinstance(e, Failed)] == [(2, "a poisoned row")]
    assert tokens_of(events, 1) == greedy(prompt(90), 12)
    assert tokens_of(events, 3) == greedy(prompt(70), 12)
    assert engine.stats()["pages_used"] == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sequence(9, []), "the prompt is empty"),
        (sequence(9, [1, VOCAB]), "not in 0"),
        (sequence(9, [-1]), "not in 0"),
        (sequence(9, [1], max_tokens=64 * 64), "do not fit the context"),
        (sequence(9, [1], max_tokens=-1), "do not fit the context"),
        (sequence(9, [1], sampling=TokenSampling(temperature=float("nan"))), "temperature must be"),
        (sequence(9, [1], key="k" * 257), "over the limit"),
        (sequence(1, [1]), "exists already"),
    ],
)
def test_a_bad_request_is_refused_before_computing_and_harms_nobody(bad: Sequence, message: str) -> None:
    engine, backend = make()
    assert engine.submit(sequence(1, prompt(20))) == []
    (refusal,) = engine.submit(bad)
    assert isinstance(refusal, Failed)
    assert message in refusal.message
    assert backend.plans == []
    assert tokens_of(drain(engine), 1) == greedy(prompt(20), 12)


def test_cancel_frees_everything_before_the_next_step() -> None:
    engine, backend = make()
    engine.submit(sequence(1, prompt(300), max_tokens=100))
    engine.submit(sequence(2, prompt(20), max_tokens=3))
    engine.step()
    (done,) = engine.cancel(1)
    assert isinstance(done, Done)
    assert done.reason == "cancelled"
    steps = len(backend.plans)
    drain(engine)
    assert all(len(plan.sequences) == 1 for plan in backend.plans[steps:])
    assert engine.stats()["pages_used"] == 0
    assert engine.cancel(1) == []


@given(
    st.lists(st.tuples(st.sampled_from("snnnc"), st.integers(1, 6)), min_size=10, max_size=60),
    st.integers(4, 64),
    st.integers(4, 16),
)
@settings(max_examples=40, deadline=None)
def test_any_mix_of_comings_and_goings_leaves_everyone_their_own_tokens(
    commands: list[tuple[str, int]], max_rows: int, num_pages: int
) -> None:
    engine, _ = make(max_rows, num_pages)
    events: list[Event] = []
    for number, (verb, which) in enumerate(commands):
        if verb == "s":
            events += engine.submit(sequence(number, prompt(37 * which)[: num_pages * 64 - 12], key=str(which % 3)))
        elif verb == "c":
            events += engine.cancel(number - which)
        else:
            events += engine.step()
    events += drain(engine)
    for number, (verb, which) in enumerate(commands):
        if verb == "s":
            alone = greedy(prompt(37 * which)[: num_pages * 64 - 12], 12)
            got = tokens_of(events, number)
            assert got == (alone if done_of(events, number).reason == "length" else alone[: len(got)])
    assert engine.stats()["pages_used"] == 0


def test_a_long_prompt_costs_the_others_no_step() -> None:
    engine, _ = make()
    engine.submit(sequence(1, prompt(20), max_tokens=100))
    engine.step()
    engine.submit(sequence(2, prompt(2000)))
    steps = [engine.step() for _ in range(32)]  # 63 rows of the prompt each: the last one ends it
    assert [[e.id for e in events if isinstance(e, Token)] for events in steps] == [[1]] * 31 + [[1, 2]]


def test_prompt_logits_are_those_of_every_position() -> None:
    tokens = prompt(150)
    engine, _ = make(max_rows=40)
    drain(engine, sequence(1, tokens))
    events = drain(engine, sequence_of_prompt_logits(2, tokens))
    rows = [e for e in events if isinstance(e, LogitsRows)]
    assert [r.start for r in rows] == [0, 40, 80, 120]
    got = np.concatenate([r.logits for r in rows])
    assert (got == np.array([toy_logits(tokens[: i + 1], VOCAB) for i in range(150)])).all()


def test_logits_come_with_tokens_where_asked() -> None:
    events = drain(make()[0], sequence(1, prompt(20), max_tokens=2, return_logits=True))
    token = next(e for e in events if isinstance(e, Token))
    assert token.logits is not None
    assert (token.logits == toy_logits(prompt(20), VOCAB)).all()


def test_stats_count() -> None:
    engine, _ = make()
    drain(engine, *[sequence(i, prompt(100, seed=i)) for i in range(3)])
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["running"], stats["waiting"]) == (300, 36, 0, 0)
    assert stats["tokens_per_s"] > 0
    assert stats["pages"] == 64

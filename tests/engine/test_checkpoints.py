"""Saved recurrent states: where they are taken, what is resumed from them, and that a wrong one is never used."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.backend import PAGE_TOKENS, TokenSampling
from quadjet.engine.channel import Done, Token
from quadjet.engine.checkpoints import Checkpoints
from quadjet.engine.draft import PromptLookup
from quadjet.engine.engine import Engine, Event, Vocabulary
from quadjet.engine.sequence import Sequence
from toy_backend import ToyHybrid

VOCAB = 47  # less than the token that makes the toy fail


def make(
    *, num_checkpoints: int = 16, num_pages: int = 200, max_rows: int = 64, drafts: bool = False
) -> tuple[Engine, ToyHybrid]:
    backend = ToyHybrid(num_checkpoints=num_checkpoints, num_pages=num_pages, max_rows=max_rows, vocab_size=VOCAB)
    engine = Engine(
        backend,
        Vocabulary(VOCAB, frozenset(), frozenset()),
        context=num_pages * PAGE_TOKENS,
        drafts=PromptLookup() if drafts else None,
    )
    return engine, backend


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, length)]


def sequence(seq_id: int, tokens: list[int], max_tokens: int = 4, key: str = "") -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), max_tokens, sampling=TokenSampling(1.0, seed=seq_id), key=key)


def drain(engine: Engine, *sequences: Sequence) -> list[Event]:
    events = [event for s in sequences for event in engine.submit(s)]
    while engine.has_work:
        events += engine.step()
    return events


def cached(events: list[Event]) -> list[int]:
    return [event.cached_tokens for event in events if isinstance(event, Done)]


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Token)]


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    engine, backend = make()
    first = drain(engine, sequence(1, prompt(150), key="agent"))
    assert backend.saved_at == [128, 153]  # the last page of the prompt; the end, of which the last token is not computed
    transcript = prompt(150) + tokens_of(first) + prompt(40, seed=2)
    second = drain(engine, sequence(2, transcript, key="agent"))
    assert cached(second) == [153]
    assert sum(len(s.tokens) for plan in backend.plans for s in plan.sequences) == 153 + 41 + 3


def test_a_turn_that_rewrites_the_last_answer_goes_on_from_the_prompt() -> None:
    engine, _ = make()
    drain(engine, sequence(1, prompt(150), max_tokens=30, key="agent"))
    assert cached(drain(engine, sequence(2, prompt(150) + prompt(40, seed=2), key="agent"))) == [128]


def test_another_owner_shares_what_full_pages_hold() -> None:
    engine, _ = make()
    drain(engine, sequence(1, prompt(150), key="agent"))
    assert cached(drain(engine, sequence(2, prompt(150), key="other"))) == [128]


def test_where_two_prompts_part_a_third_goes_on() -> None:
    engine, backend = make()
    system = prompt(200)
    drain(engine, sequence(1, system + prompt(300, seed=2)))
    backend.saved_at.clear()
    assert cached(drain(engine, sequence(2, system + prompt(300, seed=3)))) == [0]
    assert backend.saved_at == [192, 448]
    assert cached(drain(engine, sequence(3, system + prompt(300, seed=4)))) == [192]


def test_long_prompts_are_saved_on_the_way() -> None:
    engine, backend = make()
    drain(engine, sequence(1, prompt(9000)))
    assert backend.saved_at == [4096, 8192, 8960]
    assert cached(drain(engine, sequence(2, prompt(9000)[:8500]))) == [8192]


def test_the_least_recently_used_makes_room() -> None:
    engine, _ = make(num_checkpoints=2)
    for seed in (1, 2, 1, 3):
        drain(engine, sequence(seed, prompt(100, seed)))
    assert [cached(drain(engine, sequence(9, prompt(100, seed)))) for seed in (1, 3, 2)] == [[64], [64], [0]]


def test_without_room_for_any_everything_is_cold() -> None:
    engine, _ = make(num_checkpoints=0)
    drain(engine, sequence(1, prompt(100), key="agent"))
    assert cached(drain(engine, sequence(2, prompt(100), key="agent"))) == [0]


def test_a_page_that_goes_takes_its_checkpoint_with_it() -> None:
    engine, _ = make(num_pages=4)
    drain(engine, sequence(1, prompt(100)))
    drain(engine, sequence(2, prompt(250, seed=2)))
    assert cached(drain(engine, sequence(3, prompt(100)))) == [0]


def test_a_page_has_one_checkpoint() -> None:
    checkpoints = Checkpoints(2)
    first = checkpoints.keep(7)
    assert checkpoints.keep(7) == first
    assert checkpoints.num_kept == 1
    checkpoints.forget(7)
    checkpoints.forget(7)
    assert {checkpoints.keep(1), checkpoints.keep(2)} == {0, 1}
    assert 7 not in checkpoints


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_comes_and_goes_every_sequence_says_what_it_says_alone(data: st.DataObject) -> None:
    """Agents that go on, branch off, copy from each other, are cancelled; few pages, fewer checkpoints, drafts."""
    engine, _ = make(
        num_checkpoints=data.draw(st.integers(0, 5)), num_pages=14, max_rows=data.draw(st.sampled_from([5, 33, 64])), drafts=True
    )
    transcripts = [prompt(data.draw(st.integers(1, 150)), seed) for seed in range(3)]
    for round_ in range(4):
        sequences = []
        for agent in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            source = transcripts[data.draw(st.integers(0, 2))]
            tokens = source[: data.draw(st.integers(1, len(source)))] + prompt(data.draw(st.integers(0, 40)), seed=round_)
            sequences.append(sequence(10 * round_ + agent, tokens, data.draw(st.integers(1, 30)), key=f"agent {agent}"))
        events = [event for s in sequences for event in engine.submit(s)]
        if data.draw(st.booleans()):
            events += engine.step()
            engine.cancel(sequences.pop().id)
        events += drain(engine)
        for s in sequences:
            generated = [e.token for e in events if isinstance(e, Token) and e.id == s.id]
            alone = sequence(s.id, s.tokens[: s.num_prompt], s.max_tokens)
            assert generated == tokens_of(drain(make(num_pages=14)[0], alone))
            transcripts[s.id % 10] = s.tokens[:350]

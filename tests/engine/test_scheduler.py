"""Which rows go into a step: everyone decodes, prompts share what is left, nobody overtakes or starves."""

from __future__ import annotations

import pytest
from quadjet.engine.cache import PageCache
from quadjet.engine.errors import EngineError
from quadjet.engine.scheduler import ScheduledRows, Scheduler
from quadjet.engine.sequence import Sequence


def make(num_pages: int = 200, max_sequences: int = 4, max_rows: int = 64, max_waiting: int = 8) -> tuple[Scheduler, PageCache]:
    cache = PageCache(num_pages)
    return Scheduler(cache, max_sequences=max_sequences, max_rows=max_rows, max_waiting=max_waiting), cache


def prompt(seq_id: int, length: int, max_tokens: int = 8) -> Sequence:
    """Prompts of different ids share nothing."""
    return Sequence(seq_id, [seq_id] * length, length, max_tokens)


def step(scheduler: Scheduler, cache: PageCache) -> list[ScheduledRows]:
    """One step in which every sampled token is 99."""
    rows = scheduler.schedule()
    for scheduled in rows:
        cache.commit(scheduled.sequence, scheduled.num_rows)
        if scheduled.num_sampled and not scheduled.sequence.wants_prompt_logits:
            scheduled.sequence.tokens.append(99)
    return rows


def shape(rows: list[ScheduledRows]) -> list[tuple[int, int, int]]:
    return [(r.sequence.id, r.num_rows, r.num_sampled) for r in rows]


def test_a_prompt_is_cut_into_chunks_and_only_the_last_row_is_sampled() -> None:
    scheduler, cache = make()
    scheduler.submit(prompt(1, 150))
    assert [shape(step(scheduler, cache)) for _ in range(4)] == [[(1, 64, 0)], [(1, 64, 0)], [(1, 22, 1)], [(1, 1, 1)]]


def test_decoding_sequences_get_a_row_in_every_step_beside_a_long_prompt() -> None:
    scheduler, cache = make()
    for seq_id in (1, 2):
        scheduler.submit(prompt(seq_id, 3))
    step(scheduler, cache)
    scheduler.submit(prompt(3, 500))
    for _ in range(8):
        assert shape(step(scheduler, cache))[:3] == [(1, 1, 1), (2, 1, 1), (3, 62, 0)]


def test_the_shortest_prompt_comes_first_and_room_left_over_is_used() -> None:
    scheduler, cache = make()
    for seq_id, length in ((1, 300), (2, 40), (3, 30)):
        scheduler.submit(prompt(seq_id, length))
    assert shape(step(scheduler, cache)) == [(3, 30, 1), (2, 34, 0)]
    assert shape(step(scheduler, cache)) == [(3, 1, 1), (2, 6, 1), (1, 57, 0)]


def test_short_prompts_do_not_starve_a_long_one() -> None:
    scheduler, cache = make(num_pages=2000)
    scheduler.submit(prompt(1, 300))
    served = 0
    for seq_id in range(2, 22):
        scheduler.submit(prompt(seq_id, 64, max_tokens=1))
        for scheduled in step(scheduler, cache):
            served += scheduled.num_rows if scheduled.sequence.id == 1 else 0
            if scheduled.sequence.id > 1 and scheduled.num_sampled:
                scheduler.remove(scheduled.sequence)
    assert served >= 300


def test_more_than_max_sequences_wait_in_order() -> None:
    scheduler, cache = make()
    for seq_id in range(1, 7):
        scheduler.submit(prompt(seq_id, 2))
    assert [r.sequence.id for r in step(scheduler, cache)] == [1, 2, 3, 4]
    scheduler.remove(scheduler.running[1])
    assert [r.sequence.id for r in step(scheduler, cache)] == [1, 3, 4, 5]
    assert [s.id for s in scheduler.waiting] == [6]


def test_a_sequence_waits_for_pages_and_is_not_overtaken() -> None:
    scheduler, cache = make(num_pages=4)
    scheduler.submit(prompt(1, 100, max_tokens=28))
    scheduler.submit(prompt(2, 100, max_tokens=100))
    scheduler.submit(prompt(3, 10))
    assert [r.sequence.id for r in step(scheduler, cache)] == [1]
    scheduler.remove(scheduler.running[0])
    assert [r.sequence.id for r in step(scheduler, cache)] == [2]


def test_what_can_never_run_is_refused_at_once() -> None:
    scheduler, _ = make(num_pages=4)
    with pytest.raises(EngineError, match="needs 5 pages"):
        scheduler.submit(prompt(1, 250, max_tokens=8))


def test_the_queue_is_bounded() -> None:
    scheduler, _ = make(max_waiting=2)
    scheduler.submit(prompt(1, 2))
    scheduler.submit(prompt(2, 2))
    with pytest.raises(EngineError, match="wait already"):
        scheduler.submit(prompt(3, 2))


def test_a_waiting_sequence_can_be_removed() -> None:
    scheduler, cache = make(max_sequences=1)
    first, second = prompt(1, 2), prompt(2, 2)
    scheduler.submit(first)
    scheduler.submit(second)
    step(scheduler, cache)
    scheduler.remove(second)
    assert not scheduler.waiting
    scheduler.remove(first)
    assert scheduler.schedule() == []
    assert cache.num_used == 0


def test_every_row_of_a_prompt_logits_sequence_is_sampled() -> None:
    scheduler, cache = make()
    scheduler.submit(prompt(1, 100, max_tokens=0))
    assert [shape(scheduled) for scheduled in (step(scheduler, cache), step(scheduler, cache))] == [[(1, 64, 64)], [(1, 36, 36)]]


def test_a_step_must_hold_a_row_of_every_sequence() -> None:
    with pytest.raises(EngineError, match=r"lower engine\.max_sequences"):
        make(max_sequences=5, max_rows=4)

"""Work shared out over threads: every item once, in several threads, errors not lost."""

from __future__ import annotations

import threading

import pytest
from quadjet.engine.workers import Workers


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_item_is_worked_on_once(count: int) -> None:
    workers = Workers(count)
    for size in (0, 1, 2, 3, 50):
        done: list[int] = []
        workers.run(done.append, list(range(size)))
        assert sorted(done) == list(range(size))


def test_items_are_worked_on_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)
    Workers(2).run(lambda _: both.wait(), [0, 1])


@pytest.mark.parametrize("bad", [0, 1, 7])
def test_an_error_reaches_the_caller_and_later_runs_work(bad: int) -> None:
    workers = Workers(3)

    def work(item: int) -> None:
        if item == bad:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        workers.run(work, list(range(8)))
    done: list[int] = []
    workers.run(done.append, [1, 2, 3])
    assert sorted(done) == [1, 2, 3]

"""What PromptLookup proposes: copies of what followed the same tokens elsewhere, as wide as they have been right."""

from __future__ import annotations

import numpy as np
from quadjet.engine.channel import UpdateSource
from quadjet.engine.draft import PromptLookup
from quadjet.engine.sequence import Sequence

TEXT = [int(t) for t in np.random.default_rng(1).integers(0, 5000, 400)]


def sequence(seq_id: int, tokens: list[int]) -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), 1000)


def whole(name: str, tokens: list[int], kind: str = "document") -> UpdateSource:
    return UpdateSource(name, kind, 0, 0, 0, np.array(tokens, np.int32))


def play(lookup: PromptLookup, stream: Sequence, truth: list[int], room: int = 15) -> list[tuple[int, int]]:
    """Generate `truth` with drafts; how many were proposed and right in each step."""
    steps = []
    left = list(truth)
    while left:
        (drafts,) = lookup.propose([stream], room)
        right = next((n for n, (a, b) in enumerate(zip(drafts, left, strict=False)) if a != b), min(len(drafts), len(left) - 1))
        if drafts:
            lookup.observe(stream, len(drafts), right)
        steps.append((len(drafts), right))
        stream.tokens += left[: right + 1]
        left = left[right + 1 :]
    return steps


def test_it_copies_from_the_prompt() -> None:
    steps = play(PromptLookup(), sequence(1, [*TEXT, 7, *TEXT[:3]]), TEXT[3:200])
    assert sum(right + 1 for _, right in steps) == 197
    assert len(steps) < 20


def test_it_copies_from_a_document_as_it_is_after_an_edit() -> None:
    lookup = PromptLookup()
    assert lookup.update(whole("a", TEXT)) == []
    assert lookup.update(UpdateSource("a", "document", 400, 110, 1, np.array([1, 2, 3], np.int32))) == []
    steps = play(lookup, sequence(1, TEXT[90:100]), [*TEXT[100:110], 1, 2, 3, *TEXT[111:150]])
    assert len(steps) < 8
    assert lookup.stats()["draft_document_accepted"] == 52 - len(steps)


def test_it_goes_on_behind_tokens_that_the_model_changes() -> None:
    lookup = PromptLookup()
    changed = list(TEXT)
    changed[20::20] = [9000] * len(changed[20::20])  # one name in twenty tokens is another: no n-gram holds it
    steps = play(lookup, sequence(1, [*TEXT, *changed[:10]]), changed[10:300])
    assert 290 / len(steps) > 8


def test_a_repetition_goes_on() -> None:
    (drafts,) = PromptLookup().propose([sequence(1, [5, 6, 1, 2, 3, 1, 2, 3, 1, 2])], 8)
    assert drafts[:3] == [3, 1, 2]


def test_drafts_that_fail_become_few_and_come_back_when_they_are_right() -> None:
    lookup = PromptLookup()
    stream = sequence(1, TEXT)
    for i in range(40):  # the same two tokens, each time with another continuation
        play(lookup, stream, [*range(10_000 + 4 * i, 10_004 + 4 * i), 9, 8])
    (narrow,) = lookup.propose([stream], 15)
    assert len(narrow) <= 2
    steps = play(lookup, stream, TEXT[:300])
    assert max(drafted for drafted, _ in steps) == 15


def test_rows_go_where_they_are_likeliest_to_count() -> None:
    lookup = PromptLookup()
    sure = sequence(1, [*TEXT, *TEXT[:40]])
    vague = sequence(2, [1, 2, 3, 4, 5, 1])
    nothing = sequence(3, [1, 2, 3])
    drafts = lookup.propose([sure, vague, nothing], 12)
    assert sum(map(len, drafts)) == 12
    assert len(drafts[0]) > 9
    assert drafts[2] == []


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    lookup = PromptLookup(max_sources=3)
    for name, tokens in (("a", TEXT[:100]), ("b", TEXT[100:200]), ("c", TEXT[200:300])):
        assert lookup.update(whole(name, tokens)) == []
    play(lookup, sequence(1, TEXT[:10]), TEXT[10:60])
    assert lookup.update(whole("d", TEXT[300:])) == ["b"]
    size = lookup.stats()["draft_bytes"]
    small = PromptLookup(max_bytes=int(size))
    gone = [name for i in range(100) for name in small.update(whole(str(i), TEXT))]
    assert gone == [str(i) for i in range(len(gone))]
    assert small.stats()["draft_bytes"] <= size


def test_a_change_to_another_text_than_there_is_drops_it() -> None:
    lookup = PromptLookup()
    none = np.zeros(0, np.int32)
    assert lookup.update(UpdateSource("a", "document", 5, 0, 0, none)) == ["a"]
    for change in (UpdateSource("a", "document", 399, 0, 0, none), UpdateSource("a", "document", 400, 390, 11, none)):
        lookup.update(whole("a", TEXT))
        assert lookup.update(change) == ["a"]
        assert lookup.stats()["draft_sources"] == 0
    lookup.remove("a")


def test_an_ended_sequence_is_forgotten() -> None:
    lookup = PromptLookup()
    play(lookup, ended := sequence(1, TEXT), TEXT[:10])
    lookup.forget(ended)
    assert lookup.propose([sequence(1, [1, 2, 3])], 8) == [[]]

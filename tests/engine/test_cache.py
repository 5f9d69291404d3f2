"""Pages: shared by content, kept for reuse, never taken from a running sequence."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from quadjet.engine.backend import PAGE_TOKENS
from quadjet.engine.cache import PageCache
from quadjet.engine.sequence import Sequence

NUMBERS = list(range(1000))


def sequence(tokens: list[int], max_tokens: int = 1, key: str = "") -> Sequence:
    return Sequence(0, list(tokens), len(tokens), max_tokens, key=key)


def run(cache: PageCache, seq: Sequence) -> None:
    """Compute the whole prompt."""
    rows = seq.num_remaining
    cache.grow(seq, len(seq.tokens))
    cache.commit(seq, rows)


def test_full_pages_are_shared_and_the_last_token_is_always_computed() -> None:
    cache = PageCache(20)
    first = sequence(NUMBERS[:200])
    assert cache.admit(first)
    assert first.num_cached == 0
    run(cache, first)
    longer, same, aligned = sequence(NUMBERS[:300]), sequence(NUMBERS[:200]), sequence(NUMBERS[:128])
    assert cache.admit(longer)
    assert cache.admit(same)
    assert cache.admit(aligned)
    assert [s.num_cached for s in (longer, same, aligned)] == [192, 192, 64]
    assert longer.page_ids == first.page_ids[:3]


def test_a_different_start_shares_nothing() -> None:
    cache = PageCache(20)
    first = sequence(NUMBERS[:200])
    cache.admit(first)
    run(cache, first)
    other = sequence([5, *NUMBERS[1:200]])
    cache.admit(other)
    assert other.num_cached == 0


def test_released_pages_stay_findable_until_their_room_is_needed() -> None:
    cache = PageCache(8)
    first = sequence(NUMBERS[:200])
    cache.admit(first)
    run(cache, first)
    cache.release(first)
    assert (cache.num_used, cache.num_idle) == (0, 3)
    filler = sequence(NUMBERS[500:870])  # fills 6 of 8 pages: one of the three idle ones goes, the deepest
    cache.admit(filler)
    run(cache, filler)
    cache.release(filler)
    again = sequence(NUMBERS[:200])
    assert cache.admit(again)
    assert again.num_cached == 128


def test_pages_of_a_running_sequence_are_set_aside() -> None:
    cache = PageCache(4)
    running = sequence(NUMBERS[:10], max_tokens=118)
    assert cache.admit(running)  # 2 pages, though none is computed
    assert not cache.admit(sequence(NUMBERS[:10], max_tokens=183))
    assert cache.admit(sequence(NUMBERS[:10], max_tokens=118))
    assert not cache.admit(sequence([1]))
    cache.release(running)
    assert cache.admit(sequence([1]))


def test_a_refused_sequence_changes_nothing() -> None:
    cache = PageCache(4)
    first = sequence(NUMBERS[:70], key="a")
    cache.admit(first)
    run(cache, first)
    cache.release(first)
    assert not cache.admit(sequence(NUMBERS[:100], max_tokens=300, key="a"))
    assert (cache.num_used, cache.num_idle) == (0, 2)
    fits = sequence(NUMBERS[:100], key="a")
    assert cache.admit(fits)
    assert fits.num_cached == 70


def test_the_same_key_takes_over_the_partial_page() -> None:
    cache = PageCache(20)
    for key, expected in (("task", 100), ("other", 64), ("", 64)):
        first = sequence(NUMBERS[:100], key="task")
        cache.admit(first)
        run(cache, first)
        cache.release(first)
        following = sequence(NUMBERS[:150], key=key)
        cache.admit(following)
        assert following.num_cached == expected
        cache.release(following)


def test_a_partial_page_is_used_as_far_as_its_tokens_agree() -> None:
    cache = PageCache(20)
    first = sequence(NUMBERS[:100], key="task")
    cache.admit(first)
    run(cache, first)
    cache.release(first)
    following = sequence([*NUMBERS[:80], 7, 7, 7], key="task")
    cache.admit(following)
    assert following.num_cached == 80
    third = sequence(NUMBERS[:100], key="task")  # the page is in use: only the full one is left
    cache.admit(third)
    assert third.num_cached == 64


def test_sequences_that_computed_the_same_page_end_up_sharing_it() -> None:
    cache = PageCache(20)
    a, b = sequence(NUMBERS[:200]), sequence(NUMBERS[:200])
    cache.admit(a)
    cache.admit(b)
    run(cache, a)
    run(cache, b)
    assert a.page_ids[:3] == b.page_ids[:3]
    assert a.page_ids[3] != b.page_ids[3]
    assert cache.num_used == 5


def test_pages_computed_meanwhile_are_taken_at_a_page_boundary() -> None:
    cache = PageCache(20)
    a, b = sequence(NUMBERS[:200]), sequence(NUMBERS[:300])
    cache.admit(a)
    cache.admit(b)
    run(cache, a)
    cache.share_more(b)
    assert b.num_cached == b.num_computed == 192


def test_prompt_logits_take_nothing_from_the_cache() -> None:
    cache = PageCache(20)
    first = sequence(NUMBERS[:200])
    cache.admit(first)
    run(cache, first)
    logits = sequence(NUMBERS[:200], max_tokens=0)
    cache.admit(logits)
    cache.share_more(logits)
    assert logits.num_cached == 0


class CacheMachine(RuleBasedStateMachine):
    """Random lives of sequences over two tokens, so that prefixes meet all the time. Pages remember what was written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PageCache(12)
        self.content: dict[int, list[int]] = {}
        self.running: list[Sequence] = []

    @rule(
        pattern=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        length=st.integers(1, 300),
        max_tokens=st.integers(0, 100),
        key=st.sampled_from(["", "a", "b"]),
    )
    def admit(self, pattern: list[int], length: int, max_tokens: int, key: str) -> None:
        tokens = [pattern[i // 60 % len(pattern)] for i in range(length)]
        seq = sequence(tokens, max_tokens, key)
        if self.cache.admit(seq):
            self.check_prefix(seq)
            self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.booleans())
    def compute(self, data: st.DataObject, share: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if share:
            self.cache.share_more(seq)
        if seq.num_remaining == 0:
            if seq.num_generated >= seq.max_tokens:
                return
            seq.tokens.append(data.draw(st.integers(0, 1)))
        rows = data.draw(st.integers(1, seq.num_remaining))
        start = seq.num_computed
        self.cache.grow(seq, start + rows)
        for position in range(start, start + rows):
            page = seq.page_ids[position // PAGE_TOKENS]
            assert [page in s.page_ids for s in self.running].count(True) == 1, "a shared page is written"
            kept = self.content.get(page, [])[: position % PAGE_TOKENS]
            self.content[page] = [*kept, seq.tokens[position]]
        self.cache.commit(seq, rows)
        self.check_prefix(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.cache.release(seq)

    def check_prefix(self, seq: Sequence) -> None:
        for index in range(-(-seq.num_computed // PAGE_TOKENS)):
            expected = list(seq.page_tokens(index))[: seq.num_computed - index * PAGE_TOKENS]
            assert self.content[seq.page_ids[index]][: len(expected)] == expected

    @invariant()
    def pages_add_up(self) -> None:
        held = {page for seq in self.running for page in seq.page_ids}
        assert self.cache.num_used == len(held)
        if not self.running:
            whole = sequence([2], max_tokens=12 * PAGE_TOKENS - 1)
            assert self.cache.admit(whole)  # nothing leaked: all pages can be had
            self.cache.release(whole)

    @invariant()
    def running_sequences_keep_their_content(self) -> None:
        for seq in self.running:
            self.check_prefix(seq)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Guesses at the tokens that come next. A step computes them along with the row before them and keeps those that were right.

PromptLookup guesses that what followed the same tokens elsewhere follows here too: in the sequence itself, in open documents, in
what agents read and wrote. Of the places that match, the one whose kind of match was right most often is taken, and the rows to
spare go one by one to the sequence whose next draft is most likely to count.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .channel import UpdateSource
from .sequence import Sequence
from .token_index import MAX_MATCH, NGRAMS, TokenIndex, ngram_keys

OWN = "sequence"
"""The kind of drafts that come from the sequence itself; other kinds are named by who adds the text."""
MAX_SOURCE_BYTES = 64 * 2**20
"""Of the indexes of all sources, about 30 bytes a token. The least recently used go first."""
MAX_SOURCES = 128
"""Each costs some 4 us for each sequence in every step."""

_MIN_CHANCE = 0.05
"""A draft that is less likely to count is not computed: its column is free, its attention is not."""
_MAX_CHANCE = 0.98
_NEAR = 64
"""After a wrong draft the text is expected to go on within so many tokens of where the drafts came from."""
_MAX_MISSES = 12
_LEARN_HERE, _LEARN_ALL = 0.15, 0.03
_FIRST_CHANCES = {0: 0.3, 1: 0.3, 2: 0.4, 4: 0.6, 8: 0.8, 16: 0.9, 32: 0.95}
"""Before anything is measured, by length of match."""


class DraftSource(Protocol):
    """Where drafts come from. Whatever it says, the generated tokens are the same: bad drafts cost rows only."""

    def propose(self, sequences: Items[Sequence], room: int) -> list[list[int]]:
        """For each sequence what may follow its tokens, possibly nothing; `room` tokens at most, all together."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """How many of the sequence's last drafts were computed, and how many leading ones were right."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

    def stats(self) -> dict[str, float]:
        """Counts since the start, named draft_*."""
        ...


class _Match(NamedTuple):
    kind: str
    length: int
    """Tokens before the place that are the sequence's last ones, rounded down to a power of two."""


class _Place(NamedTuple):
    match: _Match
    chance: float
    """Of one token from here to be right if those before it were."""
    source: _Source
    position: int


class _Source:
    """A text to copy from."""

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind = kind
        self.name = name
        self.index = TokenIndex()


class _Chances:
    """How likely a token of each kind of match is right: an average in which a trial of long ago counts less."""

    def __init__(self, share: float, base: _Chances | None = None) -> None:
        self._share = share
        self._base = base
        self._chances: dict[_Match, float] = {}

    def of(self, match: _Match) -> float:
        known = self._chances.get(match)
        if known is not None:
            return known
        return self._base.of(match) if self._base is not None else _FIRST_CHANCES[match.length]

    def learn(self, match: _Match, num_drafted: int, num_accepted: int) -> None:
        chance = 1 - (1 - self.of(match)) * (1 - self._share) ** num_accepted
        if num_accepted < num_drafted:
            chance *= 1 - self._share
        self._chances[match] = min(max(chance, _MIN_CHANCE), _MAX_CHANCE)  # never so low that it is not tried again


@dataclass(slots=True)
class _Follower:
    """What is known of one sequence."""

    own: _Source
    chances: _Chances
    proposed: _Place | None = None
    cursor: _Source | None = None
    """Where its last drafts came from: copying goes on there, also past a token that was changed."""
    position: int = 0
    misses: int = 0

    def read(self, tokens: Items[int]) -> None:
        """Take in what was appended to the sequence since the last time, and move the cursor on with it."""
        index = self.own.index
        added = len(tokens) - len(index)
        if len(index):
            self.position += added
        index.splice(len(index), 0, tokens[len(index) :])


@dataclass(slots=True)
class _Counter:
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class PromptLookup:
    """DraftSource over named texts and the sequences themselves. Not thread-safe."""

    max_bytes: int = MAX_SOURCE_BYTES
    max_sources: int = MAX_SOURCES
    _sources: OrderedDict[str, _Source] = field(default_factory=OrderedDict)  # least recently used first
    _followers: dict[int, _Follower] = field(default_factory=dict)
    _chances: _Chances = field(default_factory=lambda: _Chances(_LEARN_ALL))
    _counters: dict[str, _Counter] = field(default_factory=dict)

    def update(self, change: UpdateSource) -> list[str]:
        """Make or edit a source. Returns the names of sources that are gone: their texts must come whole the next time.

        One whose tokens are not `num_before` is gone too: the change was made for another text.
        """
        source = self._sources.pop(change.name, None)
        if change.num_before == 0:
            source = _Source(change.kind, change.name)
        if source is None or len(source.index) != change.num_before:
            return [change.name]
        try:
            source.index.splice(change.start, change.num_removed, change.tokens)
        except ValueError:
            return [change.name]
        self._sources[change.name] = source
        return list(self._shrink())

    def remove(self, name: str) -> None:
        """Forget a source, if it is there."""
        self._sources.pop(name, None)

    def propose(self, sequences: Items[Sequence], room: int) -> list[list[int]]:
        places = [self._best_place(sequence) for sequence in sequences]
        drafts = [_copy(place, room) if place is not None else [] for place in places]
        widths = _share([(place.chance if place else 0.0, len(draft)) for place, draft in zip(places, drafts, strict=True)], room)
        return [draft[:width] for draft, width in zip(drafts, widths, strict=True)]

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        follower = self._followers[sequence.id]
        place = follower.proposed
        assert place is not None, "drafts that nobody proposed"
        counter = self._counters.setdefault(place.match.kind, _Counter())
        counter.steps += 1
        counter.drafted += num_drafted
        counter.accepted += num_accepted
        for chances in (follower.chances, self._chances):
            chances.learn(place.match, num_drafted, num_accepted)
        if num_accepted and self._sources.get(place.source.name) is place.source:
            self._sources.move_to_end(place.source.name)
        if num_accepted or follower.cursor is place.source:
            follower.cursor, follower.position = place.source, place.position
        follower.misses = 0 if num_accepted else follower.misses + 1
        if follower.misses > _MAX_MISSES:
            follower.cursor = None

    def forget(self, sequence: Sequence) -> None:
        self._followers.pop(sequence.id, None)

    def stats(self) -> dict[str, float]:
        """By kind of source: steps with drafts from it, drafts, and those that were right; and what the sources hold."""
        counts = {
            f"draft_{kind}_{name}": getattr(counter, name)
            for kind, counter in self._counters.items()
            for name in ("steps", "drafted", "accepted")
        }
        return {**counts, "draft_sources": len(self._sources), "draft_bytes": self._nbytes()}

    def _nbytes(self) -> int:
        return sum(source.index.nbytes for source in self._sources.values())

    def _shrink(self) -> Iterable[str]:
        total = self._nbytes()
        while total > self.max_bytes or len(self._sources) > self.max_sources:
            name, source = self._sources.popitem(last=False)
            total -= source.index.nbytes
            yield name

    def _best_place(self, sequence: Sequence) -> _Place | None:
        follower = self._followers.get(sequence.id)
        if follower is None:
            follower = _Follower(_Source(OWN), _Chances(_LEARN_HERE, self._chances))
            self._followers[sequence.id] = follower
        follower.read(sequence.tokens)
        suffix = sequence.tokens[-MAX_MATCH:]
        places = [*self._places_at_cursor(follower, suffix), *self._places_by_match(follower, suffix)]
        best = max(places, key=lambda place: (place.chance, place.match.length), default=None)
        follower.proposed = best
        return best

    def _places_by_match(self, follower: _Follower, suffix: list[int]) -> Iterable[_Place]:
        """In each source the last place of the longest match."""
        keys = ngram_keys(suffix)
        for source in (follower.own, *self._sources.values()):
            for n in NGRAMS:
                position = source.index.find(n, keys[n], suffix) if n in keys else 0
                if position:
                    yield _place(follower, source, position, suffix)
                    break

    def _places_at_cursor(self, follower: _Follower, suffix: list[int]) -> Iterable[_Place]:
        """Where the copied text goes on: at the cursor, whatever stands before it, or near it after the sequence's last token."""
        source = follower.cursor
        if source is None or not 0 <= follower.position < len(source.index):
            return
        at_cursor = _place(follower, source, follower.position, suffix)
        yield at_cursor
        if at_cursor.match.length == 0:
            nearby = source.index.after(follower.position, _NEAR)
            if suffix[-1] in nearby[:-1]:
                yield _place(follower, source, follower.position + nearby.index(suffix[-1]) + 1, suffix)


def _place(follower: _Follower, source: _Source, position: int, suffix: list[int]) -> _Place:
    length = source.index.match_length(position, suffix)
    match = _Match(source.kind, 1 << (length.bit_length() - 1) if length else 0)
    return _Place(match, follower.chances.of(match), source, position)


def _copy(place: _Place, count: int) -> list[int]:
    """At most `count` tokens from a place on. At the end of a sequence, what it has been repeating goes on."""
    tokens = place.source.index.after(place.position, count)
    if place.source.kind == OWN:
        period = len(tokens)
        while len(tokens) < count:
            tokens.append(tokens[-period])
    return tokens


def _share(offers: Items[tuple[float, int]], room: int) -> list[int]:
    """How many drafts to take of each (chance of a token, drafts there are): the next row goes where it is likeliest to count."""
    widths = [0] * len(offers)
    heap = [(-chance, n) for n, (chance, count) in enumerate(offers) if count and chance >= _MIN_CHANCE]
    heapq.heapify(heap)
    while heap and sum(widths) < room:
        chance, n = heapq.heappop(heap)
        widths[n] += 1
        chance *= offers[n][0]
        if widths[n] < offers[n][1] and -chance >= _MIN_CHANCE:
            heapq.heappush(heap, (chance, n))
    return widths

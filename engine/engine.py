"""The step loop's state: sequences in, events out. One thread calls it, one step at a time.

What goes wrong with one sequence ends that sequence with a Failed event; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backend import Backend, SequenceRows, StepPlan, TokenSampling
from .cache import PageCache
from .channel import Done, Failed, LogitsRows, Token
from .errors import EngineError, QuadjetError
from .sampling import mask_words, pack_mask, validate
from .scheduler import ScheduledRows, Scheduler
from .sequence import Sequence

Event = Token | LogitsRows | Done | Failed

MAX_WAITING = 64
MAX_KEY_CHARS = 256
_RATE_WINDOW_S = 5.0

_log = logging.getLogger(__name__)


class Vocabulary(NamedTuple):
    """What the engine must know of the tokenizer's tokens."""

    size: int
    """The executor's own vocabulary may be larger: rows that only pad its matrix."""
    eog_ids: frozenset[int]
    """Ids that end a generation."""
    unused_ids: frozenset[int]
    """Ids that stand for nothing and are never generated."""


class Engine:
    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        *,
        context: int,
        max_sequences: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._cache = PageCache(backend.num_pages)
        self._scheduler = Scheduler(self._cache, max_sequences=max_sequences, max_rows=backend.max_rows, max_waiting=MAX_WAITING)
        self._vocabulary = vocabulary
        allowed = np.arange(backend.vocab_size) < vocabulary.size
        allowed[list(vocabulary.unused_ids)] = False
        self._allowed = pack_mask(allowed)
        self._all_allowed = bool(allowed.all())
        self._context = context
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._counters = dict.fromkeys(("steps", "prompt_tokens", "cached_tokens", "generated_tokens"), 0)
        self._recent: deque[tuple[float, int]] = deque()  # time of a step and the tokens it generated

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def submit(self, sequence: Sequence) -> list[Event]:
        """Queue a sequence; a refusal comes back as its Failed event."""
        try:
            if sequence.id in self._sequences:
                raise EngineError(f"sequence {sequence.id} exists already")
            self._check(sequence)
            self._scheduler.submit(sequence)
        except EngineError as error:
            return [Failed(sequence.id, error.message, error.fix)]
        self._sequences[sequence.id] = sequence
        return self._follow_grammar(sequence)

    def cancel(self, sequence_id: int) -> list[Event]:
        """End a sequence before the next step. One that has ended already is no fault: its end crossed this on the way."""
        sequence = self._sequences.get(sequence_id)
        return [] if sequence is None else [self._finish(sequence, "cancelled")]

    def step(self) -> list[Event]:
        """Compute one step's rows and return what came of them."""
        events: list[Event] = []
        planned: list[tuple[ScheduledRows, SequenceRows]] = []
        for scheduled in self._scheduler.schedule():
            try:
                planned.append((scheduled, self._rows(scheduled)))
            except QuadjetError as error:
                events.append(self._fail(scheduled.sequence, error))
        for scheduled, tokens, logits in self._run(planned, events):
            events += self._advance(scheduled, tokens, logits)
        if planned:
            self._count(sum(isinstance(event, Token) for event in events))
        return events

    def stats(self) -> dict[str, float]:
        """Counts since the start, pages, queue, and tokens generated a second over the last seconds, all sequences together."""
        self._forget_old(self._clock())
        return {
            **self._counters,
            "tokens_per_s": sum(n for _, n in self._recent) / _RATE_WINDOW_S,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "pages": self._cache.num_pages,
            "pages_used": self._cache.num_used,
            "pages_idle": self._cache.num_idle,
        }

    def _count(self, generated: int) -> None:
        self._counters["steps"] += 1
        self._counters["generated_tokens"] += generated
        now = self._clock()
        self._recent.append((now, generated))
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _RATE_WINDOW_S:
            self._recent.popleft()

    def _check(self, sequence: Sequence) -> None:
        vocab = self._backend.vocab_size
        if not sequence.tokens:
            raise EngineError("the prompt is empty")
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= vocab:
            raise EngineError(f"the prompt holds a token that is not in 0 .. {vocab - 1}", "use the tokenizer of this model")
        if sequence.max_tokens < 0 or len(sequence.tokens) + sequence.max_tokens > self._context:
            wanted = f"{len(sequence.tokens)} prompt tokens and {sequence.max_tokens} new ones"
            raise EngineError(
                f"{wanted} do not fit the context of {self._context}",
                "raise engine.context, lower max_tokens, or shorten the prompt",
            )
        if len(sequence.key) > MAX_KEY_CHARS:
            raise EngineError(f"a key of {len(sequence.key)} characters is over the limit of {MAX_KEY_CHARS}")
        validate(sequence.sampling)

    def _rows(self, scheduled: ScheduledRows) -> SequenceRows:
        sequence, count, num_sampled = scheduled
        if sequence.started_s == 0.0:
            sequence.started_s = self._clock()
        start = sequence.num_computed
        return SequenceRows(
            start=start,
            tokens=np.array(sequence.tokens[start : start + count], np.int32),
            page_ids=np.array(sequence.page_ids, np.int32),
            num_sampled=num_sampled,
            sampling=TokenSampling() if sequence.wants_prompt_logits else sequence.sampling,
            mask=self._mask(sequence) if num_sampled and not sequence.wants_prompt_logits else None,
            return_logits=sequence.return_logits or sequence.wants_prompt_logits,
        )

    def _mask(self, sequence: Sequence) -> NDArray[np.int32] | None:
        """[1, words] of the tokens that may come next, None for all."""
        if sequence.matcher is None:
            return None if self._all_allowed else self._allowed[None]
        mask = np.zeros(mask_words(self._backend.vocab_size), np.int32)
        sequence.matcher.fill_mask(mask[: mask_words(self._vocabulary.size)])
        mask &= self._allowed
        if not mask.any():
            raise EngineError("the grammar allows no token that the model has")
        return mask[None]

    def _run(
        self, planned: list[tuple[ScheduledRows, SequenceRows]], events: list[Event]
    ) -> list[tuple[ScheduledRows, NDArray[np.int32], NDArray[np.float32] | None]]:
        """Run the step; if it fails, run each sequence alone, so that only the one at fault ends. Rows can be computed twice."""
        if not planned:
            return []
        try:
            result = self._backend.step(StepPlan(tuple(rows for _, rows in planned)))
        except Exception as error:  # an executor's fault is a sequence's end, not the engine's: it is logged and reported
            if len(planned) == 1:
                _log.warning("sequence %d ends: its step failed", planned[0][0].sequence.id, exc_info=True)
                events.append(self._fail(planned[0][0].sequence, error))
                return []
        else:
            outcomes = zip(planned, result.tokens, result.logits, strict=True)
            return [(scheduled, tokens, logits) for (scheduled, _), tokens, logits in outcomes]
        return [outcome for item in planned for outcome in self._run([item], events)]

    def _advance(self, scheduled: ScheduledRows, tokens: NDArray[np.int32], logits: NDArray[np.float32] | None) -> list[Event]:
        sequence, count, num_sampled = scheduled
        start = sequence.num_computed
        self._cache.commit(sequence, count)
        if start < sequence.num_prompt:
            self._counters["prompt_tokens"] += count
        if sequence.wants_prompt_logits:
            assert logits is not None
            rows = LogitsRows(sequence.id, start, logits)
            return [rows, self._finish(sequence, "stop")] if sequence.num_remaining == 0 else [rows]
        return self._accept(sequence, int(tokens[0]), logits) if num_sampled else []

    def _accept(self, sequence: Sequence, token: int, logits: NDArray[np.float32] | None) -> list[Event]:
        """Take a sampled token into the sequence, and end it where it must end."""
        if sequence.first_token_s == 0.0:
            sequence.first_token_s = self._clock()
        if token in self._vocabulary.eog_ids:
            return [self._finish(sequence, "stop")]
        sequence.tokens.append(token)
        events: list[Event] = [Token(sequence.id, token, logits)]
        if sequence.matcher is not None:
            try:
                sequence.matcher.consume(token)
            except QuadjetError as error:
                return [*events, self._fail(sequence, error)]
            return events + self._follow_grammar(sequence)
        if sequence.num_generated == sequence.max_tokens:
            events.append(self._finish(sequence, "length"))
        return events

    def _follow_grammar(self, sequence: Sequence) -> list[Event]:
        """Take the tokens that the grammar leaves no choice about: they are computed along with the next row that is sampled."""
        matcher, events = sequence.matcher, list[Event]()
        if matcher is None:
            return events
        try:
            for token in matcher.forced()[: sequence.max_tokens - sequence.num_generated]:
                matcher.consume(token)
                sequence.tokens.append(token)
                events.append(Token(sequence.id, token))
        except QuadjetError as error:
            return [*events, self._fail(sequence, error)]
        if matcher.is_done:
            events.append(self._finish(sequence, "stop"))
        elif sequence.num_generated == sequence.max_tokens:
            events.append(self._finish(sequence, "length"))
        return events

    def _finish(self, sequence: Sequence, reason: str) -> Done:
        self._remove(sequence)
        now = self._clock()
        first = sequence.first_token_s or now
        return Done(
            id=sequence.id,
            reason=reason,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            completion_tokens=sequence.num_generated,
            prefill_s=first - (sequence.started_s or now),
            decode_s=now - first,
        )

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._remove(sequence)
        if isinstance(error, QuadjetError):
            return Failed(sequence.id, error.message, error.fix)
        return Failed(sequence.id, f"the executor failed: {type(error).__name__}: {error}", "see the engine's log")

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        self._counters["cached_tokens"] += sequence.num_cached


def sequence_of_prompt_logits(sequence_id: int, tokens: list[int]) -> Sequence:
    """A sequence that returns the logits after every token and generates nothing."""
    return Sequence(sequence_id, tokens, len(tokens), 0)

"""The step loop's state: sequences in, events out. One thread calls it, one step at a time.

What goes wrong with one sequence ends that sequence with a Failed event; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backend import Backend, SequenceRows, StepPlan, TokenSampling
from .cache import PageCache
from .channel import Done, Failed, LogitsRows, Token
from .checkpoints import Checkpoints
from .draft import DraftSource
from .errors import EngineError, QuadjetError
from .sampling import mask_words, pack_mask, validate
from .scheduler import ScheduledRows, Scheduler
from .sequence import Sequence, TokenMatcher, pages_for, replay

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


class _Planned(NamedTuple):
    sequence: Sequence
    rows: SequenceRows


class Engine:
    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        *,
        context: int,
        max_sequences: int = 4,
        drafts: DraftSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._cache = PageCache(backend.num_pages, Checkpoints(backend.num_checkpoints) if backend.has_recurrent_state else None)
        self._scheduler = Scheduler(self._cache, max_sequences=max_sequences, max_rows=backend.max_rows, max_waiting=MAX_WAITING)
        self._vocabulary = vocabulary
        allowed = np.arange(backend.vocab_size) < vocabulary.size
        allowed[list(vocabulary.unused_ids)] = False
        self._allowed = pack_mask(allowed)
        self._all_allowed = bool(allowed.all())
        self._can_draft = allowed
        self._can_draft[[token for token in vocabulary.eog_ids if token < allowed.size]] = False
        self._context = context
        self._drafts = drafts
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
        return self._take_up(sequence)

    def cancel(self, sequence_id: int) -> list[Event]:
        """End a sequence before the next step. One that has ended already is no fault: its end crossed this on the way."""
        sequence = self._sequences.get(sequence_id)
        return [] if sequence is None else [self._finish(sequence, "cancelled")]

    def step(self) -> list[Event]:
        """Compute one step's rows and return what came of them."""
        events: list[Event] = []
        planned: list[_Planned] = []
        schedule = self._scheduler.schedule(self._propose if self._drafts is not None else None)
        self._load_checkpoints()
        for scheduled in schedule:
            try:
                planned.append(_Planned(scheduled.sequence, self._rows(scheduled)))
            except QuadjetError as error:
                events.append(self._fail(scheduled.sequence, error))
        for item, tokens, logits in self._run(planned, events):
            events += self._advance(item, tokens, logits)
        if planned:
            self._count(sum(isinstance(event, Token) for event in events))
        return events

    def _load_checkpoints(self) -> None:
        """Right after admission: a checkpoint may be overwritten as soon as a step is done."""
        for sequence in self._scheduler.running:
            if sequence.checkpoint is not None:
                self._backend.load_checkpoint(sequence.slot, sequence.checkpoint)
                sequence.checkpoint = None

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
            **(self._drafts.stats() if self._drafts is not None else {}),
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
        if sequence.max_tokens < 0 or sequence.num_prompt + sequence.max_tokens > self._context:
            wanted = f"{sequence.num_prompt} prompt tokens and {sequence.max_tokens} new ones"
            raise EngineError(
                f"{wanted} do not fit the context of {self._context}",
                "raise engine.context, lower max_tokens, or shorten the prompt",
            )
        if len(sequence.key) > MAX_KEY_CHARS:
            raise EngineError(f"a key of {len(sequence.key)} characters is over the limit of {MAX_KEY_CHARS}")
        validate(sequence.sampling)

    def _propose(self, sequences: list[Sequence], room: int) -> list[list[int]]:
        """Drafts that cannot cross the end of a generation: the token after them is sampled and is still within max_tokens."""
        assert self._drafts is not None
        proposals = self._drafts.propose(sequences, room)
        return [self._usable(sequence, drafts) for sequence, drafts in zip(sequences, proposals, strict=True)]

    def _usable(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        drafts = drafts[: sequence.max_tokens - sequence.num_generated - 1]
        size = self._can_draft.size
        return list(takewhile(lambda token: 0 <= token < size and self._can_draft[token], drafts))

    def _rows(self, scheduled: ScheduledRows) -> SequenceRows:
        sequence, count, num_sampled, drafts = scheduled
        if sequence.started_s == 0.0:
            sequence.started_s = self._clock()
        start = sequence.num_computed
        mask = None
        if num_sampled and not sequence.wants_prompt_logits:
            mask, drafts = self._masks(sequence, drafts)
        tokens = [*sequence.tokens[start : start + count], *drafts]
        return SequenceRows(
            start=start,
            tokens=np.array(tokens, np.int32),
            page_ids=np.array(sequence.page_ids[: pages_for(start + len(tokens))], np.int32),
            num_sampled=num_sampled + len(drafts),
            sampling=TokenSampling() if sequence.wants_prompt_logits else sequence.sampling,
            mask=mask,
            return_logits=sequence.return_logits or sequence.wants_prompt_logits,
            num_drafts=len(drafts),
            slot=sequence.slot,
        )

    def _masks(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[NDArray[np.int32] | None, tuple[int, ...]]:
        """[1 + drafts, words] of the tokens that may follow the sequence and each draft, None for all; and the drafts to try."""
        if sequence.matcher is not None:
            masks = self._follow_drafts(sequence.matcher, drafts)
            return np.stack(masks), drafts[: len(masks) - 1]
        return None if self._all_allowed else np.tile(self._allowed, (1 + len(drafts), 1)), drafts

    def _follow_drafts(self, matcher: TokenMatcher, drafts: tuple[int, ...]) -> list[NDArray[np.int32]]:
        """Masks before the first draft and after each one up to where the grammar forbids a draft or ends.

        A token that the grammar forces is not sampled without drafts, so it is the only one allowed here.
        """
        masks = [self._mask(matcher)]
        forced: list[int] = []
        num_consumed = 0
        try:
            for draft in drafts:
                if not masks[-1][draft // 32] >> (draft % 32) & 1:
                    break
                matcher.consume(draft)
                num_consumed += 1
                forced = forced[1:] if forced else matcher.forced()
                if not forced and matcher.is_done:
                    break
                masks.append(pack_mask(np.arange(self._backend.vocab_size) == forced[0]) if forced else self._mask(matcher))
        except QuadjetError:  # it comes up again, and ends the sequence, if the draft turns out right
            _log.info("drafts end where the grammar fails", exc_info=True)
        matcher.rollback(num_consumed)
        return masks

    def _mask(self, matcher: TokenMatcher) -> NDArray[np.int32]:
        """[words] of the tokens that may come next."""
        mask = np.zeros(mask_words(self._backend.vocab_size), np.int32)
        matcher.fill_mask(mask[: mask_words(self._vocabulary.size)])
        mask &= self._allowed
        if not mask.any():
            raise EngineError("the grammar allows no token that the model has")
        return mask

    def _run(
        self, planned: list[_Planned], events: list[Event]
    ) -> list[tuple[_Planned, NDArray[np.int32], NDArray[np.float32] | None]]:
        """Run the step; if it fails, run each sequence alone, so that only the one at fault ends. Rows can be computed twice."""
        if not planned:
            return []
        try:
            result = self._backend.step(StepPlan(tuple(item.rows for item in planned)))
        except Exception as error:  # an executor's fault is a sequence's end, not the engine's: it is logged and reported
            if len(planned) == 1:
                _log.warning("sequence %d ends: its step failed", planned[0].sequence.id, exc_info=True)
                events.append(self._fail(planned[0].sequence, error))
                return []
        else:
            return list(zip(planned, result.tokens, result.logits, strict=True))
        return [outcome for item in planned for outcome in self._run([item], events)]

    def _advance(self, item: _Planned, tokens: NDArray[np.int32], logits: NDArray[np.float32] | None) -> list[Event]:
        sequence, rows = item
        start, count = sequence.num_computed, len(rows.tokens) - rows.num_drafts
        self._commit(sequence, count)
        if start < sequence.num_prompt:
            self._counters["prompt_tokens"] += count
        if sequence.wants_prompt_logits:
            assert logits is not None
            answer = LogitsRows(sequence.id, start, logits)
            return [answer, self._finish(sequence, "stop")] if sequence.num_remaining == 0 else [answer]
        if self._drafts is not None and rows.num_drafts:
            self._drafts.observe(sequence, rows.num_drafts, len(tokens) - 1)
        events: list[Event] = []
        for n, token in enumerate(tokens.tolist()):
            if self._sequences.get(sequence.id) is not sequence:
                break  # the grammar failed
            if n:  # the draft before this token was right, so its row counts
                self._commit(sequence, 1)
            if sequence.num_remaining == 0:  # else the grammar forced this token, and it is there already
                events += self._accept(sequence, token, None if logits is None else logits[n : n + 1])
        return events

    def _commit(self, sequence: Sequence, num_rows: int) -> None:
        start = sequence.num_computed
        self._cache.commit(sequence, num_rows)
        for position, checkpoint in self._cache.new_checkpoints(sequence, start):
            self._backend.save_checkpoint(sequence.slot, position, checkpoint)

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
                return events + self._follow_grammar(sequence, sequence.matcher, sequence.matcher.forced())
            except QuadjetError as error:
                return [*events, self._fail(sequence, error)]
        if sequence.num_generated == sequence.max_tokens:
            events.append(self._finish(sequence, "length"))
        return events

    def _take_up(self, sequence: Sequence) -> list[Event]:
        """Begin a sequence at the end of its tokens, which may be the end of all: an engine that died generated some of them."""
        if sequence.matcher is not None:
            try:
                forced = replay(sequence.matcher, sequence.tokens[sequence.num_prompt :])
            except QuadjetError as error:
                return [self._fail(sequence, error)]
            return self._follow_grammar(sequence, sequence.matcher, forced)
        is_over = sequence.num_generated == sequence.max_tokens and not sequence.wants_prompt_logits
        return [self._finish(sequence, "length")] if is_over else []

    def _follow_grammar(self, sequence: Sequence, matcher: TokenMatcher, forced: list[int]) -> list[Event]:
        """Take the tokens that the grammar leaves no choice about: they are computed along with the next row that is sampled."""
        events: list[Event] = []
        try:
            for token in forced[: sequence.max_tokens - sequence.num_generated]:
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
        if (checkpoint := self._cache.end_checkpoint(sequence)) is not None:
            self._backend.save_checkpoint(sequence.slot, sequence.num_computed, checkpoint)
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
        if self._drafts is not None:
            self._drafts.forget(sequence)
        self._counters["cached_tokens"] += sequence.num_cached


def sequence_of_prompt_logits(sequence_id: int, tokens: list[int]) -> Sequence:
    """A sequence that returns the logits after every token and generates nothing."""
    return Sequence(sequence_id, tokens, len(tokens), 0)

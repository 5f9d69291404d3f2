"""One token stream: a prompt, what was generated after it, and how much of both is in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .backend import PAGE_TOKENS, TokenSampling


class TokenMatcher(Protocol):
    """A grammar that follows one sequence."""

    @property
    def is_done(self) -> bool:
        """Nothing more may follow."""
        ...

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Set `out`, [ceil(tokenizer's vocab / 32)]: bit set = token may come next. EngineError if none may."""
        ...

    def consume(self, token: int) -> None:
        """Go on by a token. EngineError if the grammar forbids it."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, or []. They are not consumed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` that were consumed."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """Positions 0 .. num_computed - 1 of `tokens` are in the pages; the scheduler, the cache and the engine move it forward."""

    id: int
    tokens: list[int]
    """The prompt and, after it, the generated tokens."""
    num_prompt: int
    max_tokens: int
    """Most tokens to generate; 0 where only the prompt's logits are wanted."""
    sampling: TokenSampling = field(default_factory=TokenSampling)
    matcher: TokenMatcher | None = None
    key: str = ""
    """Names the owner of the transcript: the next sequence of the same key may take over the last, partly filled page."""
    return_logits: bool = False
    page_ids: list[int] = field(default_factory=list)
    slot: int = 0
    """Where its recurrent state is kept while it runs."""
    checkpoint: int | None = None
    """Saved state to load into the slot before its first step."""
    num_parted: int = 0
    """Length of the prefix, in full pages, that was in the cache when it was admitted, with a saved state or without."""
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens that were taken from the cache."""
    started_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def wants_prompt_logits(self) -> bool:
        """Logits of every prompt position are returned and nothing is generated, so nothing may come from the cache."""
        return self.max_tokens == 0

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed."""
        return self.num_computed >= self.num_prompt

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Rows still to compute before the next token can be sampled: one when decoding, more after forced tokens."""
        return len(self.tokens) - self.num_computed

    @property
    def max_pages(self) -> int:
        """Pages it fills if it runs to max_tokens."""
        return pages_for(self.num_prompt + self.max_tokens)

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from the cache: at least one row must be computed to have logits."""
        return 0 if self.wants_prompt_logits else self.num_prompt - 1

    def page_tokens(self, index: int) -> tuple[int, ...]:
        """The tokens of its page `index`, fewer than PAGE_TOKENS at the end."""
        return tuple(self.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])


def replay(matcher: TokenMatcher, tokens: list[int]) -> list[int]:
    """Bring a grammar from its start to where `tokens` end. Returns the tokens that must come next, not consumed.

    Forced tokens are looked up where they were before `tokens` ended: inside a run of them their text may be cut otherwise.
    """
    forced = matcher.forced()
    for token in tokens:
        matcher.consume(token)
        forced = forced[1:] if forced else matcher.forced()
    return forced


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)

"""Grammar-constrained decoding with llguidance: which tokens may come next. It fails closed: never unconstrained by accident."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from .errors import EngineError
from .tokenizer import Tokenizer

_MAX_CACHED = 32


class Matcher:
    """One reply's place in a grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, usable: NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._usable = usable

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        """Set bit i of `out`, int32 [ceil(vocab / 32)] and contiguous, where token i may come next. EngineError if none may."""
        if out.dtype != np.int32 or out.shape != self._usable.shape or not out.flags.c_contiguous:
            raise ValueError(f"a mask is contiguous int32 {self._usable.shape}, not {out.dtype} {out.shape}")
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._raise_error()
        out &= self._usable
        if not out.any():
            raise EngineError("the grammar allows no token here")

    def consume(self, token: int) -> None:
        """Advance by a token. EngineError if the grammar forbids it."""
        if not self._matcher.consume_token(token):
            self._raise_error()
            raise EngineError(f"the grammar does not allow token {token} here")

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` that were consumed: they were drafts."""
        self._matcher.rollback(num_tokens)
        self._raise_error()

    def forced(self) -> list[int]:
        """Tokens that must come next, as `Tokenizer.encode` cuts their text, or []. They need no sampling. None is consumed."""
        tokens = self._matcher.compute_ff_tokens()
        self._raise_error()
        return tokens

    @property
    def is_done(self) -> bool:
        """The grammar is satisfied and nothing can follow: the reply ends here, without an end-of-generation token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar failed: {self._matcher.get_error()[:500]}")


class GrammarCompiler:
    """Compiles grammar text against one vocabulary and keeps the results. Building one costs about 0.3 s for 150,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = sorted(tokenizer.eog_ids, key=lambda token: token != tokenizer.eos_id)
        self._vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=tokenizer.vocab_size, eos_token=eos)
        usable = np.ones(-(-tokenizer.vocab_size // 32) * 32, dtype=np.uint8)
        usable[tokenizer.vocab_size :] = 0
        usable[list(tokenizer.unused_ids)] = 0
        self._usable = np.packbits(usable, bitorder="little").view(np.int32)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the grammar's start. `grammar` is llguidance's Lark. EngineError for one that does not compile."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._vocabulary, grammar, log_level=0)
            if compiled.is_error():
                raise EngineError(f"the grammar does not compile: {compiled.get_error()[:500]}")
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self._usable)


class _Vocabulary:
    """The vocabulary as llguidance reads it: bytes of each token, special ones marked by 0xFF, unused ones empty."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        for text, token in tokenizer.special_ids.items():
            self.tokens[token] = b"\xff" + text.encode("utf-8")
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8"))

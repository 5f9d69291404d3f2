"""Running token sequences on a Backend by hand: chunk by chunk, alone or side by side, in chosen pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from quadjet.engine.backend import PAGE_TOKENS, Backend, SequenceRows, StepPlan, TokenSampling

GREEDY = TokenSampling()


def some_tokens(count: int, vocab: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab, count, dtype=np.int32)


def rows(
    tokens: NDArray[np.int32],
    start: int,
    count: int,
    page_ids: NDArray[np.int32],
    num_sampled: int | None = None,
    *,
    slot: int = 0,
) -> SequenceRows:
    """Rows start .. start + count - 1 of `tokens`, all of them sampled unless said otherwise."""
    end = start + count
    sampled = count if num_sampled is None else num_sampled
    pages = page_ids[: -(-end // PAGE_TOKENS)]
    return SequenceRows(start, tokens[start:end], pages, sampled, GREEDY, return_logits=True, slot=slot)


def run_side_by_side(
    backend: Backend, sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.int32], int]]
) -> list[NDArray[np.float32]]:
    """Logits [n, vocab] of each (tokens [n], page ids, chunk); a step takes one chunk of every sequence that has rows left."""
    done = [0] * len(sequences)
    parts: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    while any(done[i] < len(tokens) for i, (tokens, _, _) in enumerate(sequences)):
        live = [i for i, (tokens, _, _) in enumerate(sequences) if done[i] < len(tokens)]
        counts = {i: min(sequences[i][2], len(sequences[i][0]) - done[i]) for i in live}
        plan = StepPlan(tuple(rows(sequences[i][0], done[i], counts[i], sequences[i][1], slot=i) for i in live))
        for i, logits in zip(live, backend.step(plan).logits, strict=True):
            assert logits is not None
            parts[i].append(logits)
            done[i] += counts[i]
    return [np.concatenate(part) for part in parts]


def run(
    backend: Backend, tokens: NDArray[np.int32], chunk: int, page_ids: NDArray[np.int32] | None = None
) -> NDArray[np.float32]:
    """Logits [n, vocab] after each token, `chunk` rows a step."""
    pages = np.arange(-(-len(tokens) // PAGE_TOKENS), dtype=np.int32) if page_ids is None else page_ids
    return run_side_by_side(backend, [(tokens, pages, chunk)])[0]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return result

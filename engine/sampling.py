"""Choosing the next token from logits: pure, row by row, so a token depends on its row, the seed and the position only.

Order: grammar mask, temperature, top_k, top_p, min_p. That is the order of Hugging Face transformers; vLLM also scales by the
temperature first but applies min_p before top_k, and llama.cpp applies the temperature last.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from .backend import SequenceRows, TokenSampling
from .errors import EngineError

SEED_LIMIT = 2**64
"""Seeds are 0 .. SEED_LIMIT - 1: one word of the generator's key."""
TOP_K_LIMIT = 2**31


def sample(
    logits: NDArray[np.float32], positions: NDArray[np.integer], params: TokenSampling, mask: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Token ids int32 [n] for logits float32 [n, vocab] of rows at `positions` [n].

    `mask` int32 [n, ceil(vocab / 32)]: bit set = token allowed. Temperature 0 takes the largest logit, the lowest id on a tie.
    Raises EngineError for bad parameters, logits that are not finite, and a row whose mask allows nothing.
    """
    validate(params)
    rows, vocab = logits.shape
    if positions.shape != (rows,):
        raise ValueError(f"{rows} rows of logits, but positions of shape {positions.shape}")
    if mask is not None and mask.shape != (rows, mask_words(vocab)):
        raise ValueError(f"mask of shape {mask.shape} for {rows} rows of {vocab} tokens")
    chosen = np.empty(rows, np.int32)
    for row in range(rows):
        if not np.isfinite(logits[row]).all():
            raise EngineError(
                f"the model computed logits that are not finite at position {positions[row]}",
                "check the model file with `quadjet model verify`",
            )
        allowed = np.arange(vocab) if mask is None else np.flatnonzero(unpack_mask(mask[row], vocab))
        if not allowed.size:
            raise EngineError(f"the grammar allows no token at position {positions[row]}")
        values = logits[row, allowed]
        index = int(values.argmax()) if params.temperature == 0 else _draw(values, int(positions[row]), params)
        chosen[row] = allowed[index]
    return chosen


def choose(logits: NDArray[np.float32], rows: SequenceRows) -> NDArray[np.int32]:
    """Token ids of a sequence's sampled rows, from their logits float32 [num_sampled, vocab].

    With drafts, left to right up to the first token that differs from its draft. Each is what a step without drafts would have
    chosen at its position, so drafts change nothing but the number of steps. Rows after that one are not looked at.
    """
    end = rows.start + len(rows.tokens)
    positions = np.arange(end - rows.num_sampled, end)
    if not rows.num_drafts:
        return sample(logits, positions, rows.sampling, rows.mask)
    chosen: list[int] = []
    for row in range(rows.num_sampled):
        mask = None if rows.mask is None else rows.mask[row : row + 1]
        chosen.append(int(sample(logits[row : row + 1], positions[row : row + 1], rows.sampling, mask)[0]))
        if row < rows.num_drafts and chosen[-1] != rows.tokens[len(rows.tokens) - rows.num_drafts + row]:
            break
    return np.array(chosen, np.int32)


def validate(params: TokenSampling) -> None:
    """Raise EngineError naming the first parameter that is not a number in its range."""
    _check("temperature", params.temperature, 0.0, sys.float_info.max, "0 (greedy) or a positive number")
    _check("top_p", params.top_p, sys.float_info.min, 1.0, "above 0 and at most 1")
    _check("min_p", params.min_p, 0.0, 1.0, "from 0 to 1")
    _check_whole("top_k", params.top_k, TOP_K_LIMIT)
    _check_whole("seed", params.seed, SEED_LIMIT)


def mask_words(vocab: int) -> int:
    """int32 words of one mask row."""
    return -(-vocab // 32)


def pack_mask(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """bool [vocab] to int32 [ceil(vocab / 32)], token t in bit t % 32 of word t // 32."""
    padded = np.zeros(mask_words(allowed.size) * 32, np.bool_)
    padded[: allowed.size] = allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def unpack_mask(mask: NDArray[np.int32], vocab: int) -> NDArray[np.bool_]:
    """The inverse of pack_mask."""
    packed = np.ascontiguousarray(mask, "<i4").view(np.uint8)
    return np.unpackbits(packed, count=vocab, bitorder="little").view(np.bool_)


def _draw(values: NDArray[np.float32], position: int, params: TokenSampling) -> int:
    """Index into `values` drawn with probability softmax(values / temperature), cut by top_k, top_p and min_p."""
    shifted = values.astype(np.float64) - float(values.max())
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends everything but the largest to exp(-inf) = 0
        weights = np.exp(shifted / params.temperature)
    kept = np.arange(values.size)
    if 0 < params.top_k < values.size:
        kept = _largest(values, params.top_k)
    if params.top_p < 1.0:
        kept = kept[_nucleus(weights[kept], params.top_p)]
    if params.min_p > 0.0:
        kept = kept[weights[kept] >= params.min_p]  # the largest weight is 1
    bounds = np.cumsum(weights[kept])  # in order of id, so ties among filters cannot change the outcome
    index = int(np.searchsorted(bounds, _uniform(params.seed, position) * bounds[-1], side="right"))
    return int(kept[min(index, kept.size - 1)])


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices, ascending, of exactly `count` largest values; among equals the lowest indices."""
    threshold = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the fewest largest weights that together reach the share top_p; among equals the lowest indices."""
    total = float(weights.sum())
    # Weights under this line sum to less than what the nucleus may leave out, so only the others need sorting.
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / weights.size)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left")) + 1
    return np.sort(order[:needed])


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of seed and position: a counter-based generator, no state between steps."""
    counter = np.array([0, position, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter)).random())


def _check(name: str, value: object, low: float, high: float, wanted: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # nan fails the comparison
        raise EngineError(f"{name} must be {wanted}, not {value!r}")


def _check_whole(name: str, value: object, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise EngineError(f"{name} must be a whole number from 0 to {limit - 1}, not {value!r}")

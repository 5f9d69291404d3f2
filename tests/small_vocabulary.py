"""A byte-level vocabulary of a few hundred tokens, as the metadata of a model file, for tests that need no real model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from quadjet.engine.tokenizer import byte_alphabet

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>", "</tool_call>")
WORDS = (
    "Ġthe",
    "Ġname",
    "name",
    "arguments",
    '":',
    "Ġ{",
    'Ġ"',
    "read_file",
    "path",
    "ĊĊ",
    "12",
    "ĠĠĠĠ",
    "assistant",
    "user",
    "system",
)


def small_metadata(
    *, pre: str = "qwen2", words: Iterable[str] = WORDS, whole: Sequence[str] = (), user_defined: Sequence[str] = USER_DEFINED
) -> dict[str, Any]:
    """`tokenizer.ggml.*` entries. `words` are built by merges from the left, `whole` are tokens that no merge makes.

    Ids: 0..255 the bytes in the order of the alphabet, then words with their beginnings, whole, control, user-defined, padding.
    """
    alphabet = byte_alphabet()
    tokens, merges = [alphabet[byte] for byte in range(256)], []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    tokens += whole
    types = [1] * len(tokens) + [3] * len(CONTROL) + [4] * len(user_defined)
    tokens += [*CONTROL, *user_defined]
    while len(tokens) % 32 != 5:  # padding, and a size that is no multiple of a mask's word
        types.append(5)
        tokens.append(f"[PAD{len(tokens)}]")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
    }

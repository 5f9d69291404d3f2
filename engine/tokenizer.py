"""Byte-level BPE from a model file's own arrays: text to token ids and back, without a network and without guessing.

Plain text never yields a special id: the BPE holds normal tokens only, and special texts are found by our own split when, and
only when, a caller asks for it. Byte tokens are joined before decoding, so no character is ever split.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from .chat import ModelError
from .errors import ModelFileError

REPLACEMENT = "\ufffd"
MAX_SPECIAL_TOKENS = 16_384
"""More than twice what any published vocabulary has. Every one is an alternative when text is split."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`. Byte tokens (6) belong to SentencePiece vocabularies and are not accepted here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    """Applied in turn; what a pattern leaves between its matches is a piece too."""
    ignore_merges: bool = False
    """A piece that is itself a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """What a file without `add_bos_token` means."""


# Contractions of the newer patterns are case-insensitive, written out: `(?i:'s)` would also match the long s (U+017F).
_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4(letter: str, digits: str) -> str:
    """The family of patterns that began with GPT-4: `letter` is a set of classes, `digits` one run of digits."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|{digits}"
        rf"| ?[^\s{letter}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": PreTokenizer((_gpt4(r"\p{L}", r"\p{N}"),)),
    "qwen35": PreTokenizer((_gpt4(r"\p{L}\p{M}", r"\p{N}"),)),
    "llama-bpe": PreTokenizer((_gpt4(r"\p{L}", r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
}

# Tokens that end a reply whatever the file's eos id says: files of every family name only one of theirs.
_EOG_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
_FIM_EOG_TEXTS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


class TokenStream:
    """Turns ids into text as they come: whole characters only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes: "" for a hidden token or while a character is incomplete."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """U+FFFD for a character that the last token left incomplete, else "". The stream is as new afterwards."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A model file's vocabulary. Build one with `from_gguf`."""

    def __init__(
        self,
        texts: Sequence[str],
        types: Sequence[int],
        merges: Sequence[tuple[str, str]],
        pre: PreTokenizer,
        *,
        eog_ids: frozenset[int],
        bos_id: int | None,
        eos_id: int | None,
        add_bos: bool,
    ) -> None:
        self.eog_ids = eog_ids
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos
        self.special_ids: Mapping[str, int] = {text: i for i, text in enumerate(texts) if types[i] in _SPECIAL_TYPES}
        """Text to id of the control and user-defined tokens, in order of id."""
        self.special_texts: tuple[str, ...] = tuple(self.special_ids)
        self._specials = frozenset(self.special_ids.values())
        self.control_ids: frozenset[int] = frozenset(i for i, kind in enumerate(types) if kind == TokenType.CONTROL)
        self.unused_ids: frozenset[int] = frozenset(
            i for i, kind in enumerate(types) if kind in (TokenType.UNUSED, TokenType.UNKNOWN)
        )
        """Padding rows of the embedding: never encoded, and to be masked wherever tokens are sampled."""
        self._bytes = [_token_bytes(text, kind) for text, kind in zip(texts, types, strict=True)]
        self._missing = _missing_bytes(self._bytes)
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        vocab = {text: i for i, text in enumerate(texts) if types[i] == TokenType.NORMAL}
        self._bpe = _build_bpe(vocab, merges, pre)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the `tokenizer.ggml.*` entries of a model file. ModelFileError names what is wrong or not supported."""
        pre = _pre_tokenizer(metadata)
        texts = _strings(metadata, "tokens")
        types = _token_types(metadata, texts)
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != len(texts):
            raise ModelFileError("the vocabulary names a token text twice (tokenizer.ggml.tokens)")
        bos_id, eos_id, eot_id = (_token_id(metadata, f"{name}_token_id", len(texts)) for name in ("bos", "eos", "eot"))
        by_text = (
            ids[text] for text in (*_EOG_TEXTS, *_FIM_EOG_TEXTS) if types[ids.get(text, 0)] == TokenType.CONTROL and text in ids
        )
        eog_ids = frozenset(i for i in (eos_id, eot_id, *by_text) if i is not None)
        if not eog_ids:
            raise ModelFileError(
                "the vocabulary has no end-of-generation token (tokenizer.ggml.eos_token_id): replies would never end"
            )
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)) and bos_id is not None
        merges = _merges(metadata, ids, types)
        return cls(texts, types, merges, pre, eog_ids=eog_ids, bos_id=bos_id, eos_id=eos_id, add_bos=add_bos)

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1, unused ones included."""
        return len(self._bytes)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of `text`; no bos is added.

        With `parse_special` the texts of control and user-defined tokens become their ids, the longest first; without it they
        are text like any other. A character that the vocabulary has no bytes for becomes U+FFFD. ModelError for lone surrogates.
        """
        if not parse_special or self._special is None:
            return self._encode_plain(text)
        ids: list[int] = []
        for i, part in enumerate(self._special.split(text)):
            ids += [self.special_ids[part]] if i % 2 else self._encode_plain(part)
        return ids

    def split_special(self, text: str) -> list[str]:
        """`text` cut at special texts: plain, special, plain, ..., plain. Joined it is `text` again."""
        return self._special.split(text) if self._special is not None else [text]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: control tokens are hidden, user-defined ones printed, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> TokenStream:
        return TokenStream(self)

    def token_bytes(self, token: int) -> bytes:
        """What `decode` prints for one token, before it is joined to characters: b"" for control and unused tokens."""
        return b"" if token in self.control_ids else self._bytes[token]

    def align(self, ids: Sequence[int], known: Sequence[int]) -> list[int]:
        """`ids` with the longest possible beginning taken over from `known`.

        `known` is an earlier prompt and its reply as the model saw them, `ids` the same transcript rendered again, and longer.
        A model may cut a text into other tokens than `encode` does: the texts agree, the ids do not, and a cache keyed by ids
        is lost. The result stands for the same texts and special tokens as `ids` and starts with as much of `known` as agrees.
        """
        same = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), min(len(ids), len(known)))
        ends = {0: same}  # offset in the text after `same` tokens -> index in ids
        text = bytearray()
        for i in range(same, len(ids)):
            text += self._literal(ids[i])
            ends[len(text)] = i + 1
        best, offset = (same, same), 0
        for j in range(same, len(known)):
            literal = self._literal(known[j])
            if not text.startswith(literal, offset):
                break
            offset += len(literal)
            if offset in ends:
                best = (j + 1, ends[offset])
        return [*known[: best[0]], *ids[best[1] :]]

    def _literal(self, token: int) -> bytes:
        """Bytes that no other token sequence has: text is UTF-8, where 0xFF cannot occur, so 0xFF marks an id."""
        text = self.token_bytes(token)
        plain = text and token not in self._specials and b"\xff" not in text
        return text if plain else b"\xff" + token.to_bytes(4, "little")

    def _encode_plain(self, text: str) -> list[int]:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the text holds a lone surrogate at character {error.start}, which no tokenizer can encode"
            ) from None
        if self._missing is not None and self._missing.search(data):
            text = "".join(REPLACEMENT if self._missing.search(char.encode()) else char for char in text)
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids


def _build_bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], pre: PreTokenizer) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges), ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return bpe


def byte_alphabet() -> str:
    """The 256 characters that stand for bytes 0..255 in a byte-level vocabulary: printable ones are themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


_BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}


def _token_bytes(text: str, kind: int) -> bytes:
    """Normal tokens are spelled in the byte alphabet, special ones literally; unused ones stand for nothing."""
    if kind == TokenType.NORMAL:
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError as error:
            raise ModelFileError(
                f"the token {text[:40]!r} has {error.args[0]!r}, which is not of the byte-level alphabet"
            ) from None
    return text.encode("utf-8") if kind in _SPECIAL_TYPES else b""


def _missing_bytes(token_bytes: Sequence[bytes]) -> re.Pattern[bytes] | None:
    """A pattern of the bytes that have no token of their own, or None. Small vocabularies drop bytes that are rare in text."""
    present = {token[0] for token in token_bytes if len(token) == 1}
    if not {*b"\t\n", *range(32, 127), *REPLACEMENT.encode()} <= present:
        raise ModelFileError("the vocabulary lacks single-byte tokens of plain text: it is not a byte-level BPE vocabulary")
    missing = [re.escape(bytes([byte])) for byte in range(256) if byte not in present]
    return re.compile(b"[" + b"".join(missing) + b"]") if missing else None


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2":
        raise ModelFileError(
            f"tokenizer model {model!r} is not supported", 'use a model with a byte-level BPE vocabulary ("gpt2")'
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelFileError(f"pre-tokenizer {pre!r} is not supported", f"use a model with one of: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[pre]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"tokenizer.ggml.{key} is not a list of strings")
    try:
        "".join(values).encode("utf-8")
    except UnicodeEncodeError:
        raise ModelFileError(f"tokenizer.ggml.{key} has a string that is not Unicode text") from None
    return values


def _token_types(metadata: Mapping[str, Any], texts: Sequence[str]) -> list[int]:
    """One type for each token. Padding that an older converter called user-defined counts as unused."""
    values = metadata.get("tokenizer.ggml.token_type")
    try:
        types = [TokenType(int(value)) for value in values] if values is not None else []
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"tokenizer.ggml.token_type is not a list of known types: {error}") from None
    if len(types) != len(texts):
        raise ModelFileError(f"the vocabulary has {len(texts)} tokens but {len(types)} token types")
    for i, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind == TokenType.USER_DEFINED and text == f"[PAD{i}]":
            types[i] = TokenType.UNUSED
        elif not text and kind != TokenType.UNUSED:
            raise ModelFileError(f"token {i} of the vocabulary has no text")
    if sum(kind in _SPECIAL_TYPES for kind in types) > MAX_SPECIAL_TOKENS:
        raise ModelFileError(f"the vocabulary has more than {MAX_SPECIAL_TOKENS} control and user-defined tokens")
    return [int(kind) for kind in types]


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelFileError(f"tokenizer.ggml.{key} is {value!r}, but the vocabulary has {vocab_size} tokens")
    return value


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. A merge is "left right", cut at the first space that is not its first character."""
    merges = []
    for rank, merge in enumerate(_strings(metadata, "merges")):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        known = (text in ids and types[ids[text]] == TokenType.NORMAL for text in (left, right, left + right))
        if cut < 0 or not right or not all(known):
            raise ModelFileError(f"merge {rank} ({merge[:40]!r}) of the vocabulary does not join two of its tokens to a third")
        merges.append((left, right))
    return merges

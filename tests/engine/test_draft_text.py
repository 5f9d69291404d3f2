"""Changes of a text, applied one after another, give the tokens of the text as it stands."""

from __future__ import annotations

import json
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.channel import UpdateSource
from quadjet.engine.draft_text import MAX_TEXT_CHARS, DraftTexts
from quadjet.engine.tokenizer import Tokenizer
from small_vocabulary import small_metadata

TOKENIZER = Tokenizer.from_gguf(small_metadata())
TEXT = st.text(st.sampled_from("ab1 \t\n\n\r.(é"), max_size=60)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 20), TEXT), max_size=8)


def change_of(texts: DraftTexts, text: str, form: str = "text") -> UpdateSource | None:
    """Of the text "a"."""
    return next((change for change in texts.change("a", "document", text) if change.name == f"{form}:a"), None)


def applied(tokens: list[int], change: UpdateSource | None) -> list[int]:
    if change is None:
        return tokens
    assert change.num_before == len(tokens)
    return [*tokens[: change.start], *change.tokens.tolist(), *tokens[change.start + change.num_removed :]]


@given(TEXT, EDITS)
@settings(deadline=None)
def test_edits_add_up_to_the_text_sent_whole(text: str, edits: list[tuple[int, int, str]]) -> None:
    for form in ("text", "json"):
        texts, edited = DraftTexts(TOKENIZER.encode), text
        tokens = applied([], change_of(texts, edited, form))
        for where, size, new in edits:
            start = where % (len(edited) + 1)
            edited = edited[:start] + new + edited[start + size :]
            tokens = applied(tokens, change_of(texts, edited, form))
            assert tokens == applied([], change_of(DraftTexts(TOKENIZER.encode), edited, form))


def test_code_gets_the_tokens_that_it_has_in_a_prompt() -> None:
    code = "def name(the):\n    return the\n\n\n    \nclass Name:\n\n    x = 12\n\ttab\n"
    change = change_of(DraftTexts(TOKENIZER.encode), code)
    assert change is not None
    assert change.tokens.tolist() == TOKENIZER.encode(code)


def test_a_text_is_also_there_as_a_tool_call_quotes_it() -> None:
    code = 'if "é" in text:\n    return "\\"\n'
    change = change_of(DraftTexts(TOKENIZER.encode), code, "json")
    assert change is not None
    assert change.kind == "document_json"
    assert json.loads(f'"{TOKENIZER.decode(change.tokens.tolist())}"') == code


def test_a_keystroke_touches_its_own_lines_only() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return TOKENIZER.encode(text)

    texts = DraftTexts(encode)
    lines = [f"line {i} of the name\n" for i in range(1000)]
    texts.change("a", "document", "".join(lines))
    encoded.clear()
    lines[500] = lines[500].replace("of", "off")
    changes = texts.change("a", "document", "".join(lines))
    assert len(encoded) <= 2 * 3
    assert [len(change.tokens) < 70 for change in changes] == [True, True]
    assert texts.change("a", "document", "".join(lines)) == []


def test_a_text_that_the_engine_lost_is_sent_whole() -> None:
    texts = DraftTexts(TOKENIZER.encode)
    first = change_of(texts, "the name\nthe name\n")
    texts.source_gone("json:a")
    again = change_of(texts, "the name\nthe name\n")
    assert first is not None
    assert again is not None
    assert again.num_before == 0
    assert np.array_equal(again.tokens, first.tokens)


def test_a_text_that_is_too_long_is_taken_back() -> None:
    texts = DraftTexts(lambda text: [1] * len(re.findall(r"\S+", text)))
    assert texts.change("a", "document", "a b c")
    changes = texts.change("a", "document", "x" * (MAX_TEXT_CHARS + 1))
    assert [(change.num_before, change.num_removed, len(change.tokens)) for change in changes] == [(3, 3, 0)] * 2
    assert texts.change("b", "document", "x" * (MAX_TEXT_CHARS + 1)) == []

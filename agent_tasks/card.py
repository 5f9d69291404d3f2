"""A task's result as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .task import Card, Evidence
from .text import neutralise

_MARKS = {True: "ok", False: "FAILED", None: "not run"}


def card_text(card: Card) -> str:
    """Several lines ending with a newline. Everything that came from files, tools or the model is made safe to show."""
    return "".join(f"{neutralise(line).rstrip()}\n" for line in _lines(card))


def _lines(card: Card) -> Iterator[str]:
    yield f"{card.title} ({'verified' if card.verified else 'not verified'})"
    if card.summary:
        yield f"  {_one_line(card.summary)}"
    for item in card.evidence:
        yield f"  {_evidence(item)}"
    for name, value in card.findings.items():
        if isinstance(value, list):
            yield from (f"  {name}: {_one_line(str(entry))}" for entry in value)
        elif value not in ("", None):
            yield f"  {name}: {_one_line(str(value))}"
    yield from (f"  note: {_one_line(note)}" for note in card.notes)
    yield f"  {_effort(card)}"


def _evidence(item: Evidence) -> str:
    command = f" ({item.command})" if item.command else ""
    return f"[{_MARKS[item.passed]}] {item.name}{command}: {_one_line(item.detail)}"


def _effort(card: Card) -> str:
    if not card.turns:
        return f"{card.elapsed_s:.0f} s, no model was needed"
    reused = f", {card.cached_tokens} of {card.prompt_tokens} prompt tokens reused" if card.prompt_tokens else ""
    return f"{card.elapsed_s:.0f} s, {card.turns} turns, {card.completion_tokens} tokens written{reused}"


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""Cards as text."""

from __future__ import annotations

from quadjet.agent_tasks.card import card_text
from quadjet.agent_tasks.task import Card, Evidence


def test_a_card_shows_verdict_evidence_findings_notes_and_effort() -> None:
    card = Card(
        title="fixed",
        verified=True,
        summary="a.py:3",
        evidence=(Evidence("tests", True, "pytest", "3 passed"), Evidence("lint", None, "", "no sandbox"), Evidence("x", False)),
        findings={"line": 3, "left": ["one", "two"], "cause": ""},
        notes=("n",),
        turns=2,
        prompt_tokens=100,
        cached_tokens=60,
        completion_tokens=9,
        elapsed_s=12.4,
    )
    assert card_text(card).splitlines() == [
        "fixed (verified)",
        "  a.py:3",
        "  [ok] tests (pytest): 3 passed",
        "  [not run] lint: no sandbox",
        "  [FAILED] x:",
        "  line: 3",
        "  left: one",
        "  left: two",
        "  note: n",
        "  12 s, 2 turns, 9 tokens written, 60 of 100 prompt tokens reused",
    ]


def test_a_card_cannot_steer_the_terminal() -> None:
    text = card_text(Card("\x1b[2Jtitle\x07", False, "two\nlines", notes=("\u202eright to left",)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "  two lines\n" in text

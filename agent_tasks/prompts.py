"""Every word said to a model, short: on a slow machine each line costs seconds.

The code shown carries no line numbers, so that it can be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from .python_lint import Finding
from .text import neutralise
from .tools import excerpt_line

CONTEXT_LINES = 5
MAX_EXCERPT_LINES = 60

CLEANUP = (
    "You clean up Python code. You are shown one linter finding at a time. Answer with one edit_file call: copy the lines to "
    "change into search and write the corrected lines into replace. Change nothing else; the behaviour stays the same."
)
TRIAGE = (
    "You mend one failing Python test by correcting the code that it tests, never the test. Say the cause, then answer with one "
    "edit_file call: copy the faulty lines into search and write the corrected lines into replace, with the same indentation."
)


def excerpt(lines: Sequence[str], first: int, last: int) -> str:
    """Lines first..last (from 1, both included, cut to the file) as a code block."""
    first, last = max(1, first), min(last, len(lines), max(1, first) + MAX_EXCERPT_LINES - 1)
    return "```python\n" + "\n".join(excerpt_line(line) for line in lines[first - 1 : last]) + "\n```"


def finding_question(finding: Finding, lines: Sequence[str]) -> str:
    """One finding with the code around it."""
    line = lines[finding.line - 1].strip() if finding.line <= len(lines) else ""
    hint = f"\nHint: {finding.hint}." if finding.hint else ""
    last = max(finding.end_line, finding.line)
    code = excerpt(lines, finding.line - CONTEXT_LINES, min(last, finding.line + 20) + CONTEXT_LINES)
    return (
        f"{finding.path}, line {finding.line}: {finding.code} {finding.message}\nThe line: `{excerpt_line(line)}`{hint}\n{code}"
    )


def instruction(text: str) -> str:
    return f"\nThe user adds: {neutralise(text)}" if text else ""

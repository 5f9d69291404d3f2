"""Every word said to a model, short: on a slow machine each line costs seconds.

The code shown carries no line numbers, so that it can be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from .python_lint import Finding
from .task import LineRange
from .text import neutralise
from .tools import excerpt_line

CONTEXT_LINES = 5
MAX_EXCERPT_LINES = 60

CLEANUP = "You clean up Python code. The behaviour stays the same."
TRIAGE = "You fix bugs in Python. The tests are right; the code that they test is to be corrected."

CUT_OFF = "Your answer was cut off after {tokens} tokens, so nothing was done. Make one shorter tool call."
NO_CALL = "That was not a tool call, so nothing was done. Answer with exactly one tool call: {names}."
STRATEGY = "You made this call {count} times with the same result. Do something else: other lines, another tool, or finish."
INTERRUPTED = "This call was interrupted and its effect is unknown. Read the file again before you go on."


def excerpt(lines: Sequence[str], first: int, last: int) -> str:
    """Lines first..last (from 1, both included, cut to the file) as a code block."""
    first, last = max(1, first), min(last, len(lines), max(1, first) + MAX_EXCERPT_LINES - 1)
    return "```python\n" + "\n".join(excerpt_line(line) for line in lines[first - 1 : last]) + "\n```"


def finding_question(finding: Finding, lines: Sequence[str], function: LineRange | None) -> str:
    """One finding with the function it is in, or with the lines around it."""
    line = excerpt_line(lines[finding.line - 1].strip()) if finding.line <= len(lines) else ""
    hint = f" Hint: {finding.hint}." if finding.hint else ""
    if function is not None and function.last - function.first < MAX_EXCERPT_LINES:
        code, ask = excerpt(lines, function.first, function.last), "Correct the function and change nothing else."
    else:
        code, ask = excerpt(lines, finding.line - CONTEXT_LINES, finding.line + CONTEXT_LINES), "Answer with one edit_file call."
    return f"{finding.path}:\n{code}\nThe linter says: {finding.code} {finding.message}, line `{line}`.{hint}\n{ask}"


def failed_test(test: str, what: str, where: str, line: str, code: str) -> str:
    at = f" ({where}, line `{excerpt_line(line)}`)" if line else f" ({where})"
    return f"The test {test} fails with {what}{at}\n{code}\nCorrect the function."


def instruction(text: str) -> str:
    return f"\nThe user adds: {neutralise(text)}" if text else ""

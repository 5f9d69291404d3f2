"""How the command line speaks: results on stdout, everything else on stderr; rich on a terminal, plain lines in a pipe.

Text that came from a model, a repository or a tool is data: `printable` shows its control characters instead of sending them.
"""

from __future__ import annotations

import json
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from .models import Progress as ByteProgress

_PLAIN_STEP_S = 5.0
_DIFF_STYLES = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def say(text: str) -> None:
    """A line for the person, beside the result."""
    click.echo(printable(text), err=True)


def result(text: str) -> None:
    """A line of the result. In a terminal no control character of it acts."""
    click.echo(printable(text) if sys.stdout.isatty() else text)


def result_json(tree: object) -> None:
    click.echo(json.dumps(tree, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def printable(text: str) -> str:
    """The text with control, bidirectional and zero-width characters written as \\xNN or \\uNNNN; newline and tab stay."""
    return "".join(_shown(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in text)


def _shown(char: str) -> str:
    if char in "\n\t":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal; in a pipe one line a row, fields apart by tabs, without headers."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(field.replace("\t", " ").replace("\n", " ") for field in row))
        return
    grid = Table(*headers, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*(Text(printable(field)) for field in row))
    Console(highlight=False).print(grid)


def diff(text: str) -> None:
    """A unified diff, coloured on a terminal and byte for byte the same in a pipe."""
    if not sys.stdout.isatty():
        click.echo(text, nl=not text.endswith("\n"))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in text.splitlines():
        style = next((style for start, style in _DIFF_STYLES if line.startswith(start)), "")
        console.print(Text(printable(line), style=style))


@contextmanager
def byte_progress() -> Iterator[ByteProgress]:
    """Progress over bytes: a bar on a terminal, else a line every few seconds, on stderr."""
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(task, description=printable(label), completed=done, total=total)


class _PlainProgress:
    """Prints when the label changes and every few seconds."""

    def __init__(self) -> None:
        self._label = ""
        self._printed = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        if label == self._label and time.monotonic() - self._printed < _PLAIN_STEP_S and done < total:
            return
        self._label, self._printed = label, time.monotonic()
        say(f"{label}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")


def as_json(value: Any) -> Any:
    """Plain data for json: paths become text, tuples lists."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)

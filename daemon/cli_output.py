"""How the command line speaks: results on stdout, everything else on stderr; rich on a terminal, plain lines in a pipe.

Text that came from a model, a repository or a tool is data: its control characters never reach a terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..agent_tasks.text import neutralise
from .models import Progress as ByteProgress

_PLAIN_STEP_S = 5.0
_DIFF_STYLES = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def say(text: str) -> None:
    """A line for the person, beside the result."""
    # Not click.echo: a progress bar puts itself in the place of sys.stderr, so that lines appear above it.
    sys.stderr.write(neutralise(text) + "\n")
    sys.stderr.flush()


def result(text: str) -> None:
    """A line of the result. In a terminal no control character of it acts."""
    _write(neutralise(text) if sys.stdout.isatty() else text)


def result_json(tree: object) -> None:
    _write(json.dumps(tree, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def stream(text: str) -> None:
    """A piece of the result, shown at once."""
    _write(neutralise(text) if sys.stdout.isatty() else text, end="")
    sys.stdout.flush()


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal; in a pipe one line a row, fields apart by tabs, without headers."""
    if not sys.stdout.isatty():
        for row in rows:
            _write("\t".join(field.replace("\t", " ").replace("\n", " ") for field in row))
        return
    grid = Table(*headers, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*(Text(neutralise(field)) for field in row))
    Console(highlight=False).print(grid)


def diff(text: str) -> None:
    """A unified diff, coloured on a terminal and byte for byte the same in a pipe."""
    if not sys.stdout.isatty():
        _write(text, end="" if text.endswith("\n") else "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in text.splitlines():
        style = next((style for start, style in _DIFF_STYLES if line.startswith(start)), "")
        console.print(Text(neutralise(line), style=style))


def _write(text: str, end: str = "\n") -> None:
    """Lone surrogates are no text, but names of files and reports of tests can hold them: they come out as JSON spells them."""
    data = (text + end).encode(sys.stdout.encoding, "backslashreplace")
    click.echo(data, nl=False)


@contextmanager
def byte_progress() -> Iterator[ByteProgress]:
    """Progress over bytes: a bar on a terminal, else a line every few seconds; on stderr."""
    with _progress(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), plain=_in_megabytes) as report:
        yield report


@contextmanager
def share_progress() -> Iterator[ByteProgress]:
    """The same for work whose unit says nothing to a person: a percentage."""
    with _progress(TaskProgressColumn(), plain=_in_percent) as report:
        yield report


@contextmanager
def _progress(*columns: ProgressColumn, plain: Callable[[str, int, int], str]) -> Iterator[ByteProgress]:
    if not sys.stderr.isatty():
        yield _PlainProgress(plain)
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda label, done, total: bar.update(task, description=neutralise(label), completed=done, total=total)


class _PlainProgress:
    """Prints when the label changes, every few seconds, and at the end."""

    def __init__(self, render: Callable[[str, int, int], str]) -> None:
        self._render = render
        self._label = ""
        self._printed = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        if label == self._label and time.monotonic() - self._printed < _PLAIN_STEP_S:
            return
        self._label, self._printed = label, time.monotonic()
        say(self._render(label, done, total))


def _in_megabytes(label: str, done: int, total: int) -> str:
    return f"{label}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def _in_percent(label: str, done: int, total: int) -> str:
    return f"{label}: {done / total:.0%}" if total else label


def path_of(uri: str) -> str:
    """The path of a file: URI."""
    return unquote(urlsplit(uri).path)


def as_json(value: Any) -> Any:
    """Plain data for json: paths become text, tuples lists."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)

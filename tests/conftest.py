"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quadjet.daemon.config import Places
from quadjet.daemon.known_models import KNOWN
from quadjet.daemon.models import ModelStore


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """The file of a real model by its registered name; without it the test is skipped, or fails under QUADJET_REQUIRE_MODELS=1.

    QUADJET_TEST_MODELS, a folder with the files, is looked at before the user's own models.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("QUADJET_TEST_MODELS", "")
        if folder and (path := Path(folder).expanduser() / KNOWN[name].file).is_file():
            return path
        entry = ModelStore(Places.from_environment().models).find(name)
        if entry is not None and entry.path.is_file():
            return entry.path
        reason = f"the model {name} is not here; fetch it with: quadjet model pull {name}"
        if os.environ.get("QUADJET_REQUIRE_MODELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return find

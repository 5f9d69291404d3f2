"""The demo as a person runs it, with the real default model: both kinds at once, honest cards, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
def test_the_demo_ends_with_two_honest_cards(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QUADJET_", "XDG_"))}
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        environment[f"XDG_{kind}_HOME"] = str(tmp_path / kind.lower())
    environment["TMPDIR"] = tempfile.mkdtemp(prefix="qj")  # short: the demo's socket is in there
    command = [sys.executable, "-m", "quadjet.daemon.cli"]
    add = [*command, "model", "add", str(model_path("qwen2.5-coder-0.5b")), "--name", "qwen2.5-coder-0.5b"]
    subprocess.run(add, env=environment, check=True, capture_output=True)

    start = time.monotonic()
    result = subprocess.run([*command, "demo"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 480

    cards = re.findall(r"^(cleanup|triage) \S+ \(\w+\): (\S+)", result.stdout, re.MULTILINE)
    assert sorted(kind for kind, _ in cards) == ["cleanup", "triage"]
    for line in (
        "test: tests/test_prices.py::test_average_of_no_prices_is_zero",
        "exception: ZeroDivisionError",
        "file: shop/prices.py",
        "line: 20",
    ):
        assert f"  {line}\n" in result.stdout
    assert "-import os" in result.stdout
    assert "[ok] tests unchanged" in result.stdout
    claims_fix = "+++ b/shop/prices.py" in result.stdout
    assert claims_fix != ("cause found, no fix" in result.stdout)

    assert list(Path(environment["TMPDIR"]).iterdir()) == []
    assert not (tmp_path / "state").exists()
    assert [
        p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if environment["TMPDIR"] in " ".join(p.info["cmdline"] or [])
    ] == []
    Path(environment["TMPDIR"]).rmdir()

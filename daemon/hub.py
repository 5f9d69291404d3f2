"""One file from the Hugging Face hub over https: one try, five seconds to connect, resumable when the hash is known."""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO, NamedTuple

from .known_models import HubFile
from .models import ModelStoreError, Progress, require_space

HUB = "https://huggingface.co"
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SPEC = re.compile(rf"hf:(?P<repo>{_PART}/{_PART}):(?P<file>(?:{_PART}/){{0,4}}{_PART}\.gguf)(?:@(?P<revision>{_PART}))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Fetched(NamedTuple):
    """What the hub said of the file, each empty if it did not."""

    commit: str
    sha256: str


def parse_spec(spec: str) -> HubFile:
    """`hf:OWNER/REPO:FILE[@REVISION]` as a HubFile; the revision is `main` if none is given."""
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise ModelStoreError(
            f"{spec!r} is not a model of the hub", "write hf:OWNER/REPO:FILE.gguf or hf:OWNER/REPO:FILE.gguf@REVISION"
        )
    return HubFile(match["repo"], match["file"], match["revision"] or "main")


def fetch(source: HubFile, partial: Path, on_progress: Progress, *, resume: bool, base_url: str = HUB) -> Fetched:
    """Write the file to `partial`. With `resume`, what is already there is kept and only the rest is asked for.

    ModelStoreError says why it failed; `partial` keeps what came.
    """
    start = partial.stat().st_size if resume and partial.is_file() else 0
    url = f"{base_url}/{source.repo}/resolve/{urllib.parse.quote(source.revision)}/{urllib.parse.quote(source.file)}"
    headers = {"User-Agent": "quadjet", "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    redirects = _Redirects(https_only=base_url.startswith("https:"))
    opener = urllib.request.build_opener(_Https(), _Http(), redirects)
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=CONNECT_TIMEOUT_S) as response:
            if start and response.status != http.client.PARTIAL_CONTENT:
                start = 0
            total = start + int(response.headers.get("Content-Length") or 0)
            _copy(response, partial, (start, total), lambda done: on_progress(source.file, done, total))
            return _said_by(response.headers, redirects.said)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return redirects.said  # it was whole already; the caller's hash decides
        raise ModelStoreError(
            f"the hub answered {error.code} {error.reason} for {url}", "check owner, repository, file and revision"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelStoreError(
            f"the hub could not be reached or broke off: {reason}", "run the same command again when it can be reached"
        ) from None


def _copy(response: IO[bytes], partial: Path, span: tuple[int, int], on_bytes: Callable[[int], None]) -> None:
    """Append the bytes of `span` (first, end of file) to `partial`."""
    start, total = span
    if total <= start:
        raise ValueError("it did not say how large the file is")
    require_space(partial.parent, total - start)
    with partial.open("ab") as target:
        target.truncate(start)
        done = start
        while chunk := response.read(1 << 20):
            target.write(chunk)
            done += len(chunk)
            on_bytes(done)
    if done != total:
        raise ValueError(f"the connection ended after {done} of {total} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows the hub to its storage, never from https to anything else, and keeps what the hub said of the file."""

    def __init__(self, *, https_only: bool) -> None:
        self.said = Fetched("", "")
        self._schemes = ("https",) if https_only else ("http", "https")

    def redirect_request(  # noqa: PLR0917  # urllib's signature
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in self._schemes:
            fp.close()
            raise ValueError(f"it redirects to {newurl}, which is not https")
        self.said = _said_by(headers, self.said)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]  # typeshed wants HTTPMessage


def _said_by(headers: Message, before: Fetched) -> Fetched:
    """What these headers tell of the file, else what was known before."""
    commit = str(headers.get("X-Repo-Commit", ""))
    sha256 = str(headers.get("X-Linked-ETag", "")).strip('"')
    return Fetched(
        commit if _COMMIT.fullmatch(commit) else before.commit,
        sha256 if _SHA256.fullmatch(sha256) else before.sha256,
    )


class _HttpsConnection(http.client.HTTPSConnection):
    """Connects with the short timeout, then allows a slow read."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_TIMEOUT_S)


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_TIMEOUT_S)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req, context=ssl.create_default_context())


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)

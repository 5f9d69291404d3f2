from __future__ import annotations

import logging
import stat
from pathlib import Path

from quadjet.daemon.daemon_log import open_log


def test_the_log_is_rotated_and_private(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "daemon.log"
    with open_log(path):
        for _ in range(11):
            logging.getLogger("quadjet.test").info("x" * 2**20)
    found = sorted(path.parent.iterdir())
    assert [file.name for file in found] == ["daemon.log", "daemon.log.1", "daemon.log.2", "daemon.log.3"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in found} == {0o600}
    assert sum(file.stat().st_size for file in found) < 17 * 2**20


def test_foreign_text_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    with open_log(path):
        logging.getLogger("quadjet.test").info("%s left", "\x1b]0;title\x07ed\u202eitor\udcff")
    assert path.read_text().endswith("quadjet.test: ed<U+202E>itor<U+DCFF> left\n")


def test_bodies_of_messages_are_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    with open_log(path):
        logging.getLogger("pygls.protocol.json_rpc").info("Sending data: %s", "a document")
        logging.getLogger("quadjet.test").info("kept")
    assert "a document" not in path.read_text()
    assert "kept" in path.read_text()
    logging.getLogger("quadjet.test").info("after")
    assert "after" not in path.read_text()

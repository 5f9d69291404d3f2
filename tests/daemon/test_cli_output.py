"""What reaches a pipe, whatever the text is: it comes from models, repositories and tools."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from quadjet.daemon import cli_output as out

ODD = "caf\u00e9 \ud800 \udcff"


@pytest.mark.parametrize(
    "show",
    [out.result, out.stream, out.diff, lambda text: out.table(("a", "b"), [(text, "")])],
    ids=["result", "stream", "diff", "table"],
)
def test_text_that_has_no_encoding_is_spelt_out(capsysbinary: pytest.CaptureFixture[bytes], show: Callable[[str], None]) -> None:
    show(ODD)
    assert capsysbinary.readouterr().out.decode().rstrip() == "caf\u00e9 \\ud800 \\udcff"


def test_json_stays_json(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out.result_json({"message": ODD})
    assert json.loads(capsysbinary.readouterr().out) == {"message": ODD}

"""Both kinds on seeded projects with known answers, with a scripted model; everything else is real."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import Answer, ScriptedModel, call
from quadjet.agent_tasks.card import card_text
from quadjet.agent_tasks.edits import apply_hunks
from quadjet.agent_tasks.task import Card, Diagnostic, LineRange, NeedsYou, Task, TaskState
from quadjet.engine.chat import ContextOverflowError, FinishReason, Message, Reply
from task_harness import NoSandbox, fingerprint, make_repository, open_harness

REPORT = "shop/report.py"
PRICES = "shop/prices.py"
MENDED = [
    call("edit_file", path=REPORT, search="if name == None:", replace="if name is None:"),
    call(
        "edit_file",
        path=REPORT,
        search="price, items=[]):",
        replace="price, items=None):\n    items = [] if items is None else items",
    ),
]
BREAKS_A_TEST = call("edit_file", path=REPORT, search='    if name == None:\n        name = "unnamed"\n', replace="")
OLD_LINE = "    return round(sum(prices) / len(prices), 2)"


def fix(replace: str, search: str = OLD_LINE, path: str = PRICES, cause: str = "an empty list has no mean") -> Answer:
    return call("edit_file", cause=cause, path=path, search=search, replace=replace)


GOOD_FIX = fix(f"    if not prices:\n        return 0.0\n{OLD_LINE}")


def card_of(task: Task) -> Card:
    assert task.card is not None, task.message
    return task.card


def evidence(task: Task) -> dict[str, bool | None]:
    return {item.name: item.passed for item in card_of(task).evidence}


def proposed(task: Task) -> dict[str, str]:
    """The proposed text of each file, relative to the root."""
    assert task.proposal is not None
    texts = {}
    for change in task.proposal.changes:
        data = apply_hunks(change, [hunk.id for hunk in change.hunks])
        assert data is not None
        texts[change.path.relative_to(task.spec.root).as_posix()] = data.decode()
    return texts


# -- cleanup --------------------------------------------------------------------------------------------------------------


async def test_cleanup_mends_every_finding_and_keeps_the_tests(sample: Path, state: Path) -> None:
    before = fingerprint(sample)
    async with open_harness(state, sample, ScriptedModel(MENDED)) as harness:
        task = await harness.run("cleanup", REPORT)
    assert task.state is TaskState.PROPOSED
    assert evidence(task) == {"syntax": True, "linter clean": True, "tests unchanged": True}
    assert card_of(task).verified
    counts = {key: value for key, value in card_of(task).findings.items() if key != "left"}
    assert counts == {"before": 9, "after": 0, "fixed_by_linter": 7, "fixed_by_model": 2}
    assert "9 findings before (1 of them code that never runs" in card_text(card_of(task))
    text = proposed(task)[REPORT]
    assert "import os" not in text
    assert "is None" in text
    assert "width = 20" not in text
    assert "line done" not in text
    assert fingerprint(sample) == before


async def test_cleanup_shows_one_finding_at_a_time(sample: Path, state: Path) -> None:
    model = ScriptedModel(MENDED)
    async with open_harness(state, sample, model) as harness:
        await harness.run("cleanup", REPORT)
    shown = [[code in prompt[1].content for code in ("E711", "B006")] for prompt in model.prompts]
    assert shown == [[True, False], [False, True]]
    assert [len(prompt) for prompt in model.prompts] == [2, 2]
    assert model.prompts[0][0] == model.prompts[1][0]


async def test_cleanup_without_a_useful_model_offers_the_linters_part(sample: Path, state: Path) -> None:
    model = ScriptedModel([call("finish", summary="all done")])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("cleanup", REPORT)
    assert task.state is TaskState.PROPOSED
    assert not card_of(task).verified
    assert evidence(task)["linter clean"] is False
    assert card_of(task).findings["after"] == 2
    assert len(card_of(task).findings["left"]) == 2
    assert "import os" not in proposed(task)[REPORT]


async def test_cleanup_takes_back_edits_that_break_a_test(sample: Path, state: Path) -> None:
    model = ScriptedModel([BREAKS_A_TEST, call("finish", summary="x")])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("cleanup", REPORT)
        results = harness.tool_results(task.id)
    assert "test_line_without_a_name" in results[0]
    assert 'name = "unnamed"' in proposed(task)[REPORT]
    assert evidence(task)["tests unchanged"] is True


async def test_cleanup_takes_back_edits_that_do_not_parse_or_add_findings(sample: Path, state: Path) -> None:
    model = ScriptedModel(
        [
            call("edit_file", path=REPORT, search="if name == None:", replace="if name is None"),
            call("edit_file", path=REPORT, search="if name == None:", replace="import re\n    if name is None:"),
            call("finish", summary="x"),
        ]
    )
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("cleanup", REPORT)
        results = harness.tool_results(task.id)
    assert "the file is as before" in results[0]
    assert "adds a finding" in results[1]
    assert "== None" in proposed(task)[REPORT]


async def test_cleanup_leaves_a_finding_after_two_tries_and_goes_on(sample: Path, state: Path) -> None:
    useless = [call("edit_file", path=REPORT, search="name == None", replace=f"name{gap}== None") for gap in ("  ", "   ")]
    async with open_harness(state, sample, ScriptedModel([*useless, MENDED[1]])) as harness:
        task = await harness.run("cleanup", REPORT)
    assert card_of(task).findings["left"] == [f"{REPORT}:10: E711 Comparison to `None` should be `cond is None`"]
    assert card_of(task).findings["fixed_by_model"] == 1


async def test_cleanup_reads_a_corrected_function_from_plain_text(sample: Path, state: Path) -> None:
    code = "def add_item(name, quantity, price, items=None):\n    return [*(items or []), [name, quantity, price]]\n"
    text = Message("assistant", f"Here it is:\n```python\n{code}```\nThis is better.")
    async with open_harness(state, sample, ScriptedModel([MENDED[0], text])) as harness:
        task = await harness.run("cleanup", REPORT)
    assert card_of(task).verified
    assert code in proposed(task)[REPORT]


async def test_cleanup_stays_in_the_range(sample: Path, state: Path) -> None:
    outside = call("edit_file", path=REPORT, search="except (OSError, ValueError):", replace="except Exception:")
    model = ScriptedModel([outside, MENDED[0]])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("cleanup", REPORT, range=LineRange(10, 17))
        results = harness.tool_results(task.id)
    assert "only lines 10 to 15" in results[0]
    text = proposed(task)[REPORT]
    assert "import os" in text
    assert "items=[]" in text
    assert "is None" in text
    assert card_of(task).findings["before"] == 3
    assert card_of(task).verified


async def test_cleanup_of_lines_behind_the_end_says_where_it_is(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"a.py": "import os\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py", range=LineRange(5, 9))
    assert task.state is TaskState.FAILED
    assert "a.py has 1 lines" in task.message


async def test_cleanup_uses_the_projects_rules(state: Path, tmp_path: Path) -> None:
    files = {"ruff.toml": 'lint.select = ["F401"]\n', "a.py": "import os\nx = 1\nif x == None:\n    x = 2\n"}
    root = make_repository(tmp_path / "project", files)
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert proposed(task)["a.py"] == "x = 1\nif x == None:\n    x = 2\n"
    assert card_of(task).findings["before"] == 1


async def test_cleanup_keeps_fixes_that_make_a_long_line_less_long(state: Path, tmp_path: Path) -> None:
    line = f"print('{'x' * 70} {{}}'.format(1), sys.argv)\n"
    files = {"ruff.toml": 'lint.select = ["E501", "F401", "UP032"]\n', "a.py": f"import os\nimport sys\n{line}"}
    root = make_repository(tmp_path / "project", files)
    async with open_harness(state, root, ScriptedModel([call("finish", summary="x")])) as harness:
        task = await harness.run("cleanup", "a.py")
    counts = {key: value for key, value in card_of(task).findings.items() if key != "left"}
    assert counts == {"before": 3, "after": 1, "fixed_by_linter": 2, "fixed_by_model": 0}
    assert proposed(task)["a.py"] == f"import sys\nprint(f'{'x' * 70} {{1}}', sys.argv)\n"


async def test_cleanup_leaves_out_only_the_rule_whose_fixes_add_findings(state: Path, tmp_path: Path) -> None:
    text = f"x = [\n    '{'x ' * 41}'\n]\n"  # the longest line is as long as may be, and a comma more is too long
    files = {"ruff.toml": 'lint.select = ["COM812", "E501", "F401"]\n', "a.py": f"import os\n{text}"}
    root = make_repository(tmp_path / "project", files)
    async with open_harness(state, root, ScriptedModel([call("finish", summary="x")])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert proposed(task)["a.py"] == text
    assert card_of(task).notes == ("the linter's fixes of COM812 were left out: they add a.py:2: E501 Line too long (89 > 88)",)


async def test_cleanup_does_not_take_a_default_of_none_that_nothing_handles(state: Path, tmp_path: Path) -> None:
    source = "def f(words=[]):\n    words.append(1)\n    return words\n"
    root = make_repository(tmp_path / "project", {"a.py": source})
    half = call("edit_file", path="a.py", search="words=[]", replace="words=None")
    async with open_harness(state, root, ScriptedModel([half, half])) as harness:
        task = await harness.run("cleanup", "a.py")
        results = harness.tool_results(task.id)
    assert "words is None when f is called without it" in results[0]
    assert card_of(task).title == "1 findings, none mended"
    assert proposed(task) == {}


async def test_cleanup_asks_first_about_functions_and_takes_no_chapter_for_another(state: Path, tmp_path: Path) -> None:
    body = "".join(f"def f{n}(x):\n    return x == None\n\n\n" for n in range(3))
    root = make_repository(tmp_path / "project", {"a.py": f"l = 1\n\n\n{body}"})
    model = ScriptedModel([call("edit_file", path="a.py", search="nowhere", replace="x")] * 8)
    async with open_harness(state, root, model, max_turns=20) as harness:
        task = await harness.run("cleanup", "a.py")
    assert "E711" in model.prompts[0][1].content
    assert task.state is TaskState.PROPOSED
    assert len(card_of(task).findings["left"]) == 4


async def test_cleanup_of_a_clean_file_says_so(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"a.py": "x = 1\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert card_of(task).title == "nothing to clean up"
    assert task.proposal is not None
    assert task.proposal.hunks == ()


async def test_cleanup_without_tests_is_not_verified(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"a.py": "import os\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert evidence(task) == {"syntax": True, "linter clean": True, "tests unchanged": None}
    assert not card_of(task).verified
    assert proposed(task)["a.py"] == ""


async def test_cleanup_keeps_line_endings_and_byte_order_mark(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {})
    data = "\ufeffimport os\r\nname = 'Größe'\r\n".encode()
    (root / "a.py").write_bytes(data)
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
        await harness.manager.accept(task.id)
    assert (root / "a.py").read_bytes() == data.replace(b"import os\r\n", b"")


async def test_cleanup_does_not_touch_what_the_linter_cannot_read(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {})
    (root / "a.py").write_bytes("# -*- coding: latin-1 -*-\nimport os\nname = 'Größe'\n".encode("latin-1"))
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.py")
    assert card_of(task).title == "not supported"
    assert proposed(task) == {}


async def test_cleanup_without_a_sandbox_is_not_verified(sample: Path, state: Path) -> None:
    model = ScriptedModel([call("edit_file", path=REPORT, search='    print("line done")\n', replace="")])
    async with open_harness(state, sample, model, sandbox=NoSandbox()) as harness:
        task = await harness.run("cleanup", REPORT)
    assert "not verified: no sandbox" in card_of(task).notes
    assert evidence(task) == {"syntax": True, "linter clean": None, "tests unchanged": None}
    assert "line done" not in proposed(task)[REPORT]


async def test_cleanup_of_another_language_says_what_is_supported(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"a.rs": "fn main() {}\n"})
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("cleanup", "a.rs")
    assert card_of(task).title == "not supported"
    assert "Python" in card_of(task).summary


async def test_cleanup_of_a_folder_leaves_out_what_it_cannot_read_and_says_so(sample: Path, state: Path) -> None:
    (sample / "shop" / "large.py").write_text("x = 1\n" * 400_000)
    (sample / "shop" / "odd\udcff.py").write_text("import os\n")
    async with open_harness(state, sample, ScriptedModel(MENDED)) as harness:
        task = await harness.run("cleanup", "shop")
    assert list(proposed(task)) == [REPORT]
    notes = " ".join(card_of(task).notes)
    assert "large.py has 2,400,000 bytes" in notes
    assert "shop/odd<U+DCFF>.py" in notes


async def test_cleanup_of_a_folder_takes_its_python_files(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel(MENDED)) as harness:
        task = await harness.run("cleanup", "shop")
    assert card_of(task).verified
    assert list(proposed(task)) == [REPORT]


# -- triage ---------------------------------------------------------------------------------------------------------------


async def test_triage_names_the_failure_and_fixes_it(sample: Path, state: Path) -> None:
    before = fingerprint(sample)
    async with open_harness(state, sample, ScriptedModel([GOOD_FIX])) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
    assert task.state is TaskState.PROPOSED
    assert card_of(task).verified
    assert card_of(task).findings == {
        "test": "tests/test_prices.py::test_average_of_no_prices_is_zero",
        "exception": "ZeroDivisionError",
        "message": "division by zero",
        "file": PRICES,
        "line": 20,
        "cause": "ZeroDivisionError: division by zero is raised in average_price, shop/prices.py:20",
        "suspected": "an empty list has no mean",
    }
    assert list(proposed(task)) == [PRICES]
    assert fingerprint(sample) == before


async def test_triage_without_a_fix_still_tells_the_cause(sample: Path, state: Path) -> None:
    model = ScriptedModel([call("finish", cause="the list is empty")])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
    assert card_of(task).title == "cause found, no fix"
    assert not card_of(task).verified
    assert card_of(task).findings["line"] == 20
    assert card_of(task).findings["suspected"] == "the list is empty"
    assert proposed(task) == {}


async def test_triage_does_not_take_a_fix_that_breaks_another_test(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel([fix("    return 0.0")])) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
    assert card_of(task).title == "cause found, no fix"
    assert evidence(task)["no other test is worse"] is False
    assert proposed(task) == {}


async def test_triage_does_not_let_the_test_be_changed(sample: Path, state: Path) -> None:
    cheat = fix("    assert True", search="    assert average_price([]) == 0.0", path="tests/test_prices.py")
    model = ScriptedModel([cheat, call("finish", cause="x")])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
        results = harness.tool_results(task.id)
    assert "not run" in results[0]
    assert proposed(task) == {}


async def test_triage_reads_a_corrected_function_from_plain_text(sample: Path, state: Path) -> None:
    code = f"def average_price(prices):\n    if not prices:\n        return 0.0\n{OLD_LINE}\n"
    text = Message("assistant", f"An empty list has no mean. So:\n```python\n{code}```")
    async with open_harness(state, sample, ScriptedModel([text])) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
    assert card_of(task).verified
    assert card_of(task).findings["suspected"] == "An empty list has no mean."
    assert code in proposed(task)[PRICES]


async def test_triage_takes_back_an_edit_that_changes_nothing_for_the_test(sample: Path, state: Path) -> None:
    model = ScriptedModel([fix("    return round(sum(prices) / len(prices), 3)"), GOOD_FIX])
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
        results = harness.tool_results(task.id)
    assert "still fails in the same way" in results[0]
    assert "2)" in proposed(task)[PRICES]


async def test_triage_from_the_source_file_finds_the_same_failure(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel([GOOD_FIX])) as harness:
        task = await harness.run("triage", PRICES)
    assert card_of(task).findings["test"] == "tests/test_prices.py::test_average_of_no_prices_is_zero"
    assert card_of(task).verified


async def test_triage_when_nothing_fails(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel([])) as harness:
        task = await harness.run("triage", "tests/test_report.py")
    assert card_of(task).title == "nothing fails"
    assert card_of(task).verified
    assert not any(card_of(task).findings.values())
    assert "line" not in card_text(card_of(task))


async def test_triage_picks_the_failure_that_was_pointed_at(state: Path, tmp_path: Path) -> None:
    source = "def one():\n    return 1\n\n\ndef two():\n    raise KeyError('two')\n"
    tests = "import m\n\n\ndef test_one():\n    assert m.one() == 2\n\n\ndef test_two():\n    m.two()\n"
    root = make_repository(tmp_path / "project", {"m.py": source, "test_m.py": tests})
    give_up = [call("finish", cause="x")]
    async with open_harness(state, root, [ScriptedModel(give_up) for _ in range(3)]) as harness:
        by_range = await harness.run("triage", "test_m.py", range=LineRange(8, 9))
        seen = (Diagnostic(str(root / "m.py"), 6, "KeyError"),)
        by_diagnostics = await harness.run("triage", "test_m.py", diagnostics=seen)
        first = await harness.run("triage", "test_m.py")
    assert [card_of(task).findings["exception"] for task in (by_range, by_diagnostics, first)] == [
        "KeyError",
        "KeyError",
        "AssertionError",
    ]
    assert card_of(first).findings["line"] == 5


async def test_triage_of_a_test_file_that_does_not_import(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"m.py": "import nothing_of_this_name\n", "test_m.py": "import m\n"})
    async with open_harness(state, root, ScriptedModel([call("finish", cause="x")])) as harness:
        task = await harness.run("triage", "test_m.py")
    findings = card_of(task).findings
    assert (findings["exception"], findings["file"], findings["line"]) == ("ModuleNotFoundError", "m.py", 1)


async def test_triage_of_a_file_with_a_syntax_error(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"m.py": "def f(:\n    pass\n", "test_m.py": "import m\n"})
    async with open_harness(state, root, ScriptedModel([call("finish", cause="x")])) as harness:
        task = await harness.run("triage", "test_m.py")
    findings = card_of(task).findings
    assert (findings["exception"], findings["file"], findings["line"]) == ("SyntaxError", "m.py", 1)


async def test_triage_of_a_failure_in_generated_code_stays_with_the_code_that_is_there(state: Path, tmp_path: Path) -> None:
    source = "def f():\n    exec(compile('1 / 0', 'made_up.py', 'exec'))\n"
    root = make_repository(tmp_path / "project", {"m.py": source, "test_m.py": "import m\n\n\ndef test_f():\n    m.f()\n"})
    async with open_harness(state, root, ScriptedModel([call("finish", cause="x")])) as harness:
        task = await harness.run("triage", "test_m.py")
    findings = card_of(task).findings
    assert (findings["exception"], findings["file"], findings["line"]) == ("ZeroDivisionError", "m.py", 2)


FORGED = """
import json, os, sys

def pytest_unconfigure():
    frame = {{"file": {file!r}, "line": 1, "function": "f"}}
    failure = {{"test": "test_m.py::test", "exception": "E", "message": "", "frames": [frame]}}
    report = {{"outcomes": {{"test_m.py::test": "failed"}}, "failures": [failure], "seconds": 1}}
    open(sys.argv[1], "w").write({report} or json.dumps(report))
    os._exit(1)
"""


@pytest.mark.parametrize("file", ["/etc/passwd", "../../../../etc/passwd", ".env", "nul\0", "\ud800", ""])
async def test_a_forged_report_of_tests_shows_no_other_file(state: Path, tmp_path: Path, file: str) -> None:
    files = {"conftest.py": FORGED.format(file=file, report="''"), "test_m.py": "def test():\n    pass\n"}
    root = make_repository(tmp_path / "project", files)
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("triage", "test_m.py")
    assert (card_of(task).findings["file"], card_of(task).findings["exception"]) == ("test_m.py", "E")


@pytest.mark.parametrize(
    "report",
    [
        "'[' * 100_000",
        "json.dumps(report).replace(': 1,', ': 1e999,')",
        "'{}'",
        "'\\0'",
        "json.dumps(report).replace('::test', chr(92) + 'u0000')",
    ],
)
async def test_a_damaged_report_of_tests_is_called_so(state: Path, tmp_path: Path, report: str) -> None:
    files = {"conftest.py": FORGED.format(file="a.py", report=report), "test_m.py": "def test():\n    pass\n"}
    root = make_repository(tmp_path / "project", files)
    async with open_harness(state, root, ScriptedModel([])) as harness:
        task = await harness.run("triage", "test_m.py")
    assert task.state is TaskState.FAILED
    assert "the report of the tests is damaged" in task.message


async def test_triage_shows_the_functions_a_failing_assertion_calls(state: Path, tmp_path: Path) -> None:
    files = {
        "m.py": "def unrelated():\n    pass\n\n\ndef one():\n    return 1\n",
        "test_m.py": "from m import one\n\n\ndef test():\n    assert one() == 2\n",
    }
    root = make_repository(tmp_path / "project", files)
    model = ScriptedModel([call("finish", cause="x")])
    async with open_harness(state, root, model) as harness:
        await harness.run("triage", "test_m.py")
    question = model.prompts[0][1].content
    assert "def one():" in question
    assert "unrelated" not in question


async def test_triage_shows_first_what_the_failing_line_calls_and_takes_the_function_that_changed(
    state: Path, tmp_path: Path
) -> None:
    push = "    def push(self, item):\n        self.items.append(item)\n"
    pop = "    def pop(self):\n        return self.items.pop({})\n"
    code = "class Stack:\n    def __init__(self):\n        self.items = []\n\n" + push + "\n" + pop
    test = "from m import Stack\n\n\ndef test():\n    s = Stack()\n    s.push(1)\n    s.push(2)\n    assert s.pop() == 2\n"
    root = make_repository(tmp_path / "project", {"m.py": code.format(0), "test_m.py": test})
    model = ScriptedModel([Message("assistant", f"```python\n{push}\n{pop.format('')}```")])
    async with open_harness(state, root, model) as harness:
        task = await harness.run("triage", "test_m.py")
    question = model.prompts[0][1].content
    assert question.index("def pop") < question.index("def push")
    assert proposed(task) == {"m.py": code.format("")}


async def test_triage_without_a_sandbox_says_so(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel([]), sandbox=NoSandbox()) as harness:
        task = await harness.run("triage", "tests/test_prices.py")
    assert "not verified: no sandbox" in card_of(task).notes
    assert not card_of(task).verified


async def test_triage_of_tests_that_never_end(state: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "project", {"test_m.py": "def test():\n    while True:\n        pass\n"})
    async with open_harness(state, root, ScriptedModel([]), command_timeout_s=2.0) as harness:
        task = await harness.run("triage", "test_m.py")
    assert "did not end within 2 s" in card_of(task).summary


# -- weak models ----------------------------------------------------------------------------------------------------------


def babble(seed: int) -> ScriptedModel:
    """Calls of a model that understood nothing."""
    chance = random.Random(seed)

    def answer(messages: Sequence[Message]) -> Answer:
        paths = [REPORT, PRICES, "tests/test_prices.py", "../../etc/passwd", "/etc/passwd", ".git/config", ""]
        texts = ["", "x", "    return", OLD_LINE, "\n" * 50, "if name == None:", "import os", "\x00", "é" * 100]
        path, search, replace = chance.choice(paths), chance.choice(texts), chance.choice(texts)
        answers: list[Answer] = [
            call("edit_file", path=path, search=search, replace=replace),
            call("edit_file", cause="x", path=path, search=search, replace=replace),
            call("edit_file", path=5, search=None),
            call("read_file", path=path, first=chance.randint(-5, 500)),
            call("read_file"),
            call("no_such_tool", a=1),
            call("run_command", argv=["rm", "-rf", "/"]),
            call("search", text="x" * 1000),
            Message("assistant", "I cannot do that."),
            Message("assistant", ""),
            Reply(Message("assistant", '<tool_call>{"name": "edi'), FinishReason.LENGTH),
        ]
        return chance.choice(answers)

    return ScriptedModel(answer)


async def test_a_babbling_model_does_no_harm_and_gets_an_honest_card(sample: Path, state: Path) -> None:
    before = fingerprint(sample)
    async with open_harness(state, sample, [babble(seed) for seed in range(4)], max_turns=12) as harness:
        sent = [await harness.send(kind, path) for kind, path in [("cleanup", REPORT), ("triage", "tests/test_prices.py")] * 2]
        tasks = [await harness.finished(task.id) for task in sent]
    assert fingerprint(sample) == before
    for task in tasks:
        assert task.state in (TaskState.PROPOSED, TaskState.NEEDS_YOU), task.message
        if task.spec.kind == "triage":
            assert card_of(task).findings["exception"] == "ZeroDivisionError"
        else:
            assert "import os" not in proposed(task)[REPORT]
            assert evidence(task)["tests unchanged"] is True


async def test_a_model_that_repeats_itself_is_parked_with_a_card(sample: Path, state: Path) -> None:
    model = ScriptedModel([call("read_file", path=REPORT)] * 4)
    async with open_harness(state, sample, model) as harness:
        task = await harness.run("cleanup", REPORT)
        results = harness.tool_results(task.id)
    assert (task.state, task.reason) == (TaskState.NEEDS_YOU, NeedsYou.STUCK)
    assert [("Do something else" in text) for text in results] == [False, False, True, False]
    assert "import os" not in proposed(task)[REPORT]


async def test_a_full_context_ends_early_with_a_card(sample: Path, state: Path) -> None:
    async with open_harness(state, sample, ScriptedModel([MENDED[0], ContextOverflowError(9000, 400, 8192)])) as harness:
        task = await harness.run("cleanup", REPORT)
    assert task.state is TaskState.PROPOSED
    assert any("context is full" in note for note in card_of(task).notes)
    assert card_of(task).findings["after"] == 1

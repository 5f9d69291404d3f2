"""Drafts: how many are right, by what is asked for and where they come from; and what a keystroke in a large file costs.

.venv/bin/python tests/bench/bench_drafts.py MODEL.gguf [TOKENS]

Each of 30 transcripts is about a function of Python's own library and is answered greedily by the model, four at a time. The
module of the function is an open document. Counts of tokens and steps do not depend on the machine; times do.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from quadjet.engine.channel import Token, encode
from quadjet.engine.chat import Message, ToolSpec
from quadjet.engine.draft import PromptLookup
from quadjet.engine.draft_text import DraftTexts
from quadjet.engine.engine import Engine, Vocabulary
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.grammar import GrammarCompiler
from quadjet.engine.reference import ReferenceBackend
from quadjet.engine.sequence import Sequence
from quadjet.engine.template import ChatTemplate
from quadjet.engine.tokenizer import Tokenizer

CONTEXT = 4096
BATCH = 4
KINDS = ("sequence", "document", "document_json")
EDIT_FILE = ToolSpec(
    "edit_file",
    "Replace lines of a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 300},
            "search": {"type": "string", "maxLength": 900, "description": "lines to replace, copied exactly from the file"},
            "replace": {"type": "string", "maxLength": 1200, "description": "the lines to put there"},
        },
        "required": ["path", "search", "replace"],
        "additionalProperties": False,
    },
)
REWRITE_FUNCTION = ToolSpec(
    "rewrite_function",
    "Replace a Python function.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "maxLength": 300},
            "name": {"type": "string", "maxLength": 100},
            "code": {"type": "string", "maxLength": 3000, "description": "the whole corrected function, from def on"},
        },
        "required": ["path", "name", "code"],
        "additionalProperties": False,
    },
)
TOOLS = {"small edit, by lines": EDIT_FILE, "small edit, by function": REWRITE_FUNCTION}


class Case(NamedTuple):
    kind: str
    target: str
    """module:function"""
    wish: str


REWRITE = "Answer with the whole function in one code block and nothing else."
SMALL_EDITS = [
    ("statistics:harmonic_mean", "Make the error message say that the data is empty."),
    ("shutil:copyfileobj", "Let the default length be 65536."),
    ("glob:escape", "Add a line to the docstring that says that bytes work too."),
    ("textwrap:shorten", "Collapse the whitespace in a variable named `collapsed` first."),
    ("calendar:monthrange", "Raise ValueError instead of IllegalMonthError."),
    ("json:load", "Rename the parameter `fp` to `file`."),
]
CASES = [
    Case("file rewrite", "textwrap:dedent", f"Rename `lines` to `rows` everywhere. {REWRITE}"),
    Case("file rewrite", "bisect:bisect_right", f"Rename `mid` to `middle`. {REWRITE}"),
    Case("file rewrite", "heapq:merge", f"Remove all comments. {REWRITE}"),
    Case("file rewrite", "shlex:join", f"Add type annotations. {REWRITE}"),
    Case("file rewrite", "difflib:get_close_matches", f"Rename `result` to `found` and drop the docstring. {REWRITE}"),
    Case("file rewrite", "fnmatch:filter", f"Rename `names` to `file_names`. {REWRITE}"),
    *(Case(kind, target, wish) for kind in TOOLS for target, wish in SMALL_EDITS),
    Case("new code", "heapq:heapreplace", "Write a function `heappeek(heap)` in the style of this one, with a docstring."),
    Case("new code", "bisect:insort_right", "Write `index(a, x)`, which finds the leftmost x or raises ValueError."),
    Case("new code", "statistics:median_low", "Write a function `midrange(data)` like this one."),
    Case("new code", "textwrap:indent", "Write a function `unindent(text, prefix)` that undoes this one."),
    Case("new code", "fnmatch:fnmatchcase", "Write three pytest tests for this function."),
    Case("new code", "shlex:quote", "Write three unittest tests for this function."),
    Case("chat", "heapq:nsmallest", "What does this function do, and how fast is it?"),
    Case("chat", "difflib:unified_diff", "Explain this function to a beginner."),
    Case("chat", "shutil:which", "Are there any bugs in this function?"),
    Case("chat", "textwrap:fill", "When would I use this function?"),
    Case("chat", "bisect:bisect_left", "How does this differ from bisect_right?"),
    Case("chat", "statistics:median", "Which errors can this function raise, and when?"),
]


@dataclass
class Run:
    """One transcript as it is generated."""

    sequence: Sequence
    tokens: int = 0
    steps: int = 0


class Total(NamedTuple):
    kind: str
    transcripts: int
    tokens: int
    steps: int
    """In which one of the transcripts got a token, summed over the transcripts."""
    stats: dict[str, float]


class Model:
    def __init__(self, path: Path) -> None:
        with GgufFile.open(path) as file:
            self.tokenizer = Tokenizer.from_gguf(file.metadata)
            self.template = ChatTemplate.from_gguf(file.metadata, self.tokenizer)
            self.backend = ReferenceBackend(file, num_pages=BATCH * CONTEXT // 64)
        self.compiler = GrammarCompiler(self.tokenizer)

    def sequence(self, number: int, case: Case, max_tokens: int) -> Sequence:
        tools = [TOOLS[case.kind]] if case.kind in TOOLS else []
        name, code = case.target.split(":")[0], function_source(case)
        text = f"{case.wish}\n\nFile {name}.py:\n```python\n{code}\n```"
        prompt = self.template.render([Message("user", text)], tools)
        matcher = self.compiler.compile(self.template.dialect.tool_grammar(tools)) if tools else None
        return Sequence(number, list(prompt), len(prompt), max_tokens, matcher=matcher)

    def run(self, cases: list[Case], max_tokens: int) -> Total:
        """All cases of one kind, four at a time, with an index of their own."""
        lookup, texts = PromptLookup(), DraftTexts(self.tokenizer.encode)
        for name in {case.target.split(":")[0] for case in cases}:
            for change in texts.change(name, "document", module_source(name)):
                lookup.update(change)
        vocabulary = Vocabulary(self.tokenizer.vocab_size, self.tokenizer.eog_ids, self.tokenizer.unused_ids)
        engine = Engine(self.backend, vocabulary, context=CONTEXT, max_sequences=BATCH, drafts=lookup)
        runs = {n: Run(self.sequence(n, case, max_tokens)) for n, case in enumerate(cases)}
        for run in runs.values():
            engine.submit(run.sequence)
        while engine.has_work:
            tokens = [event.id for event in engine.step() if isinstance(event, Token)]
            for n in set(tokens):
                runs[n].tokens += tokens.count(n)
                runs[n].steps += 1
        counts = [(run.tokens, run.steps) for run in runs.values()]
        return Total(cases[0].kind, len(cases), sum(n for n, _ in counts), sum(n for _, n in counts), engine.stats())


def module_source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


def function_source(case: Case) -> str:
    """Without decorators."""
    module, name = case.target.split(":")
    source = module_source(module)
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_source_segment(source, found) or ""


def measure_acceptance(path: Path, max_tokens: int) -> None:
    model = Model(path)
    print("\n| asked for | replies | tokens | per step | drafts | right | of the sequence | of documents | of the same in JSON |")
    print("|---|---|---|---|---|---|---|---|---|")
    try:
        for kind in dict.fromkeys(case.kind for case in CASES):
            print(row(model.run([case for case in CASES if case.kind == kind], max_tokens)), flush=True)
    finally:
        model.template.close()


def row(total: Total) -> str:
    counts = [[int(total.stats.get(f"draft_{kind}_{name}", 0)) for name in ("accepted", "drafted")] for kind in KINDS]
    right, drafted = (sum(count[i] for count in counts) for i in (0, 1))
    cells = [total.kind, total.transcripts, total.tokens, f"{total.tokens / total.steps:.2f}", drafted, share(right, drafted)]
    return "| " + " | ".join(map(str, [*cells, *(f"{a} of {b}, {share(a, b)}" for a, b in counts)])) + " |"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def library_lines(count: int) -> list[str]:
    """Real code: modules of the standard library, one after another."""
    folder = Path(sysconfig.get_path("stdlib"))
    lines = [line for path in sorted(folder.glob("*.py")) for line in path.read_text("utf-8").splitlines(keepends=True)]
    return lines[:count]


def measure_keystrokes(path: Path, num_lines: int = 10_000, count: int = 300) -> None:
    """Typing in a file, at one place and all over it. Each keystroke is a whole new text: so an editor session has it."""
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    text = "".join(library_lines(num_lines))
    at_one_place = range(len(text) // 3, len(text) // 3 + count)
    anywhere = np.random.default_rng(1).integers(0, len(text), count).tolist()
    rows = []
    for name, places in (("at one place", at_one_place), ("anywhere", anywhere)):
        lookup, texts = PromptLookup(), DraftTexts(tokenizer.encode)
        start = time.thread_time()
        changes = texts.change("file", "document", text)
        for change in changes:
            lookup.update(change)
        first_s = time.thread_time() - start
        rows.append(f"| {name} | {' | '.join(f'{ms:.2f}' for ms in keystrokes(texts, lookup, text, places))} |")
        size = f"{num_lines} lines, {len(text)} characters, {len(changes[0].tokens)} tokens, first time {first_s:.2f} s"
    print(f"{size}, index {lookup.stats()['draft_bytes'] / 1e6:.1f} MB; milliseconds of CPU time")
    print("| keystrokes | text to message: median | 99 % | index: median | 99 % |")
    print("|---|---|---|---|---|", *rows, sep="\n", flush=True)


def keystrokes(texts: DraftTexts, lookup: PromptLookup, text: str, places: Iterable[int]) -> list[float]:
    times: list[tuple[float, float]] = []
    for n, place in enumerate(places):
        text = text[:place] + "self.x = "[n % 9] + text[place:]
        begin = time.thread_time()
        changes = texts.change("file", "document", text)
        for change in changes:
            encode(change)
        sent = time.thread_time()
        gone = [name for change in changes for name in lookup.update(change)]
        times.append((sent - begin, time.thread_time() - sent))
        assert not gone
    return [float(np.percentile([t[i] for t in times], share)) * 1e3 for i in (0, 1) for share in (50, 99)]


if __name__ == "__main__":
    measure_keystrokes(Path(sys.argv[1]))
    measure_acceptance(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 160)

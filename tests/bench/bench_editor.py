"""How long an editor waits for an answer while four tasks stream and a person types in a 20,000-line file.

    .venv/bin/python tests/bench/bench_editor.py

The model is scripted, so what is measured is the daemon: sessions, documents, events, journal. Three rounds of 100 code action
requests, each after an edit; then as many with no task running, for the ratio that a busy machine does not change.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from editor_client import Editor, fresh_home, make_repository, running_daemon, script

TEXT = "".join(f"value_{n} = {n}  # a line of a large file\n" for n in range(20_000))
STEP = {"say": "word ", "repeat": 400, "read": ["long.py", 1], "times": 190, "delay_s": 0.02}
SPAN = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 0}}


async def answer_times(editor: Editor, uri: str, first_version: int) -> list[float]:
    """Sorted milliseconds of 100 requests."""
    took = []
    for count in range(100):
        change = {
            "textDocument": {"uri": uri, "version": first_version + count},
            "contentChanges": [{"range": SPAN, "text": "x"}],
        }
        editor.notify("textDocument/didChange", change)
        started = time.perf_counter()
        asked = {"textDocument": {"uri": uri}, "range": SPAN, "context": {"diagnostics": []}}
        await editor.request("textDocument/codeAction", asked)
        took.append((time.perf_counter() - started) * 1e3)
    return sorted(took)


async def measure(socket: Path, repo: Path) -> None:
    editor = await Editor.open(socket, [repo], None)
    uri = editor.open_document(repo / "large.py", TEXT)
    await editor.request("agent/subscribe")
    print("| tasks | p50 ms | p99 ms |\n|---|---|---|")
    idle = await answer_times(editor, uri, 2)
    print(f"| none | {idle[50]:.1f} | {idle[98]:.1f} |")
    tasks = [await editor.send_to_agent("cleanup", repo / "long.py", instruction=script(STEP)) for _ in range(4)]
    for task_id in tasks:
        await editor.state(task_id, "running")
    for number in range(3):
        took = await answer_times(editor, uri, 102 + 100 * number)
        print(f"| four | {took[50]:.1f} | {took[98]:.1f} |")
    await editor.leave()


def main() -> None:
    files = {"large.py": TEXT, "long.py": "x = 1\n" * 300}
    with fresh_home() as home, running_daemon(home, QUADJET_TASKS_MAX_TURNS="200"):
        asyncio.run(measure(home.places.socket, make_repository(home.folder / "repo", files)))


if __name__ == "__main__":
    main()

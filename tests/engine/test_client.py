"""The engine process as its client sees it: a real process, a real socket, a real (tiny, random) model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from quadjet.engine.backend import TokenSampling
from quadjet.engine.channel import MAX_HEADER_BYTES, Cancel, Close, Hello, Message, Token, encode, read_message
from quadjet.engine.client import EngineClient, EngineSettings, GenerateRequest, TokenEvent
from quadjet.engine.errors import EngineDiedError, EngineError, ModelFileError
from tiny_models import VOCAB, tiny_model

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[EngineClient]:
    started = await EngineClient.start(EngineSettings(model, context=4096))
    yield started
    await started.close()


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB - 9, length)]


def request(length: int = 20, seed: int = 1, max_tokens: int = 16, key: str = "") -> GenerateRequest:
    return GenerateRequest(prompt(length, seed), TokenSampling(1.0, seed=seed), max_tokens, key=key, return_logits=True)


async def run(client: EngineClient, wanted: GenerateRequest) -> tuple[list[int], NDArray[np.float32], TokenEvent]:
    events = [event async for event in client.generate(wanted)]
    logits = np.array([event.logits for event in events[:-1]])
    return [event.token for event in events[:-1] if event.token is not None], logits, events[-1]


async def until_running(client: EngineClient, count: int) -> None:
    while (await client.stats())["running"] < count:
        pass  # each answer comes after a step


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, waited for or not
            if "quadjet.engine.worker" in process.cmdline():
                found.append(process)
    return found


async def test_the_load_is_reported_and_the_model_described(model: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    client = await EngineClient.start(EngineSettings(model), lambda *progress: heard.append(progress))
    try:
        assert client.info.vocab_size == VOCAB
        assert client.info.context == 8192
        assert client.info.backend == "reference"
        assert heard[-1][1] == heard[-1][2] > 0
        assert psutil.Process(client.pid).is_running()
    finally:
        await client.close()
    assert not psutil.pid_exists(client.pid)


async def test_four_at_once_are_four_alone_bit_for_bit(client: EngineClient) -> None:
    requests = [request(30 * i, seed=i) for i in range(1, 5)]
    alone = [await run(client, r) for r in requests]
    together = await asyncio.gather(*[run(client, r) for r in requests])
    for (tokens, logits, _), (tokens_together, logits_together, _) in zip(alone, together, strict=True):
        assert tokens == tokens_together
        assert logits.tobytes() == logits_together.tobytes()


async def test_more_than_four_wait_and_all_are_served(client: EngineClient) -> None:
    results = await asyncio.gather(*[run(client, request(seed=i, max_tokens=4)) for i in range(9)])
    assert all(last.finish in ("length", "stop") for _, _, last in results)


async def test_usage_counts_the_cache(client: EngineClient) -> None:
    tokens, _, first = await run(client, request(100, key="task"))
    following = replace(request(100, key="task"), tokens=[*prompt(100), *tokens, 5, 6, 7])
    _, _, second = await run(client, following)
    assert first.usage is not None
    assert second.usage is not None
    assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (100, 0)
    assert second.usage.cached_tokens == 100 + len(tokens) - 1
    assert second.usage.prefill_s > 0


async def test_logits_are_those_of_every_position(client: EngineClient) -> None:
    tokens = prompt(130)
    logits = await client.logits(tokens)
    assert logits.shape == (130, VOCAB)
    _, generated, _ = await run(client, replace(request(130), max_tokens=1))
    assert logits[-1].tobytes() == generated[0].tobytes()


async def test_closing_the_iterator_ends_the_sequence_before_the_next_step(client: EngineClient) -> None:
    async with contextlib.aclosing(client.generate(request(max_tokens=3000))) as events:
        for _ in range(3):
            assert (await anext(events)).token is not None
    after = await client.stats()  # commands are obeyed in order, so this one came right behind the cancel
    assert (after["running"], after["pages_used"]) == (0, 0)
    assert (await client.stats())["steps"] == after["steps"]


async def test_cancelling_who_waits_ends_the_sequence(client: EngineClient) -> None:
    task = asyncio.create_task(run(client, request(3000, max_tokens=1000)))
    await until_running(client, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.stats())["running"] == 0


async def test_end_early_goes_on_to_the_usage(client: EngineClient) -> None:
    events = []
    async for event in client.generate(request(max_tokens=3000)):
        events.append(event)
        if len(events) == 2:
            client.end_early(event)
    assert events[-1].finish == "stop"
    assert events[-1].usage is not None
    assert len(events) < 3000


async def test_a_bad_parameter_is_its_senders_alone(client: EngineClient) -> None:
    good = asyncio.create_task(run(client, request()))
    for bad, reason in (
        (replace(request(), sampling=TokenSampling(float("nan"))), "temperature must be"),
        (replace(request(), tokens=[]), "prompt is empty"),
        (replace(request(), tokens=[VOCAB]), "not in 0"),
        (replace(request(), tokens=[2**40]), "list of token ids"),
        (replace(request(), max_tokens=0), "max_tokens must be at least 1"),
        (replace(request(), max_tokens=4096), "do not fit the context"),
        (replace(request(), max_tokens=2, generated=[1, 2, 3]), "3 of 23 tokens cannot be generated ones"),
        (replace(request(), max_tokens=2.5), "max_tokens: not a whole number"),  # type: ignore[arg-type]
        (replace(request(), grammar="start: ("), "grammar does not compile"),
        (replace(request(), key="k" * 300), "over the limit"),
    ):
        with pytest.raises(EngineError, match=reason):
            await run(client, bad)
    assert (await good)[0] == (await run(client, request()))[0]


async def test_a_grammar_holds_the_reply(client: EngineClient) -> None:
    held = replace(request(), grammar='start: "abc" | "abd"')
    tokens, _, last = await run(client, held)
    assert last.finish == "stop"
    assert len(tokens) >= 1


async def test_a_killed_process_fails_every_call_by_name(client: EngineClient) -> None:
    calls = [asyncio.create_task(run(client, request(seed=i, max_tokens=3000))) for i in range(6)]
    await until_running(client, 4)
    os.kill(client.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(EngineError, match=r"ended by signal 9 \(SIGKILL\)"):
            await call
    with pytest.raises(EngineError, match=r"(?s)SIGKILL.*lower engine\.context"):
        await client.stats()
    assert client.failure is not None


async def test_a_process_that_stands_still_is_killed_and_named(model: Path) -> None:
    client = await EngineClient.start(EngineSettings(model, context=4096, silence_limit_s=2.0))
    try:
        call = asyncio.create_task(run(client, request(max_tokens=3000)))
        await until_running(client, 1)
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDiedError, match="it hung, it gave no sign of life for 2 s, so it was killed"):
            await call
        assert not psutil.pid_exists(client.pid)
    finally:
        await client.close()


async def test_a_process_that_stands_still_while_it_loads_is_killed(model: Path) -> None:
    def stop(*_: object) -> None:
        for process in workers():
            process.suspend()

    with pytest.raises(EngineDiedError, match="no sign of life"):
        await EngineClient.start(EngineSettings(model, silence_limit_s=2.0), stop)
    assert not workers()


@pytest.mark.slow
async def test_a_step_that_takes_too_long_is_a_hang(tmp_path: Path) -> None:
    # Steps of many seconds on any machine: long beside the limit and the second between two signs of life.
    deep = tiny_model(tmp_path, layers=60)
    settings = EngineSettings(deep, max_sequences=1, context=16384, max_step_rows=1024, step_limit_s=1.0)
    client = await EngineClient.start(settings)
    try:
        with pytest.raises(EngineDiedError, match="it hung, one step took more than 1 s, so it was killed"):
            await run(client, request(16_000, max_tokens=1))
    finally:
        await client.close()


async def test_a_process_that_only_waits_is_left_alone(model: Path) -> None:
    client = await EngineClient.start(EngineSettings(model, silence_limit_s=2.0, step_limit_s=1.0))
    try:
        await asyncio.sleep(4.0)
        assert client.failure is None
    finally:
        await client.close()


@pytest.mark.parametrize("grammar", [None, 'start: "abc" /[a-z]{40}/ "and so on to the end" /[0-9]{20}/'])
async def test_a_reply_goes_on_anywhere_as_if_nothing_had_happened(client: EngineClient, grammar: str | None) -> None:
    whole = replace(request(80, seed=3, max_tokens=48), grammar=grammar, return_logits=grammar is None)
    tokens, logits, last = await run(client, whole)
    for cut in (*range(0, len(tokens), 3), len(tokens)):
        rest, rest_logits, end = await run(client, replace(whole, generated=tokens[:cut]))
        assert [*tokens[:cut], *rest] == tokens
        if grammar is None:
            assert rest_logits.tobytes() == logits[cut:].tobytes()
        assert end.finish == last.finish
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (80, len(tokens))


async def test_last_words_of_a_crash_are_told(client: EngineClient) -> None:
    call = asyncio.create_task(run(client, request(max_tokens=3000)))
    await until_running(client, 1)
    os.kill(client.pid, signal.SIGABRT)
    with pytest.raises(EngineError, match=r"(?s)SIGABRT.*\| Fatal Python error: Aborted"):
        await call


async def test_close_ends_calls_that_wait(client: EngineClient) -> None:
    call = asyncio.create_task(run(client, request(max_tokens=3000)))
    await until_running(client, 1)
    await client.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await call
    assert not psutil.pid_exists(client.pid)


async def test_an_interrupt_from_the_terminal_leaves_the_engine_to_its_client(client: EngineClient) -> None:
    os.kill(client.pid, signal.SIGINT)
    assert (await run(client, request()))[2].finish in ("length", "stop")


async def test_a_start_that_is_cancelled_leaves_no_process(model: Path) -> None:
    def stop(*_: object) -> None:
        start.cancel()

    start = asyncio.create_task(EngineClient.start(EngineSettings(model), stop))
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not workers()


async def test_a_process_that_dies_while_loading_fails_the_start(model: Path) -> None:
    def kill(*_: object) -> None:
        for process in workers():
            process.kill()

    with pytest.raises(EngineError, match="SIGKILL"):
        await EngineClient.start(EngineSettings(model), kill)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"model_path": Path("/nowhere/model.gguf")}, ModelFileError, "/nowhere/model.gguf"),
        ({"backend": "abacus"}, EngineError, "no backend 'abacus'"),
        ({"context": 10**6}, EngineError, "engine.context is 1000000"),
        ({"context": -5}, EngineError, "engine.context is -5"),
        ({"max_sequences": 0}, EngineError, "engine.max_sequences is 0"),
        ({"max_step_rows": 3}, EngineError, "engine.max_step_rows is 3"),
    ],
)
async def test_a_load_that_fails_says_why(model: Path, change: dict[str, object], error: type[EngineError], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        await EngineClient.start(replace(EngineSettings(model), **change))  # type: ignore[arg-type]
    assert caught.value.fix


@pytest.fixture
def damaged(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(model.read_bytes()[:100_000])
    return path


async def test_a_damaged_file_is_a_model_file_error(damaged: Path) -> None:
    with pytest.raises(ModelFileError, match="damaged"):
        await EngineClient.start(EngineSettings(damaged))


PARENT = """
import asyncio, sys
from pathlib import Path
from quadjet.engine.client import EngineClient, EngineSettings, GenerateRequest

async def main():
    client = await EngineClient.start(EngineSettings(Path(sys.argv[1])))
    async for event in client.generate(GenerateRequest([1, 2, 3], max_tokens=8000)):
        print(client.pid, flush=True)

asyncio.run(main())
"""


def test_the_process_does_not_outlive_a_killed_parent(model: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(model)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([worker], timeout=WAIT_S)
    assert gone
    assert not alive


class RawWorker:
    """The process with our end of its socket in hand."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(WAIT_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quadjet.engine.worker", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()

    def answers(self) -> list[Message]:
        """All that it says until it closes."""
        with self.socket.makefile("rb") as stream:
            return list(iter(lambda: read_message(stream), None))


HALF = encode(Hello(1))[:9]
OVERSIZED = struct.pack("<I", MAX_HEADER_BYTES + 1)
UNKNOWN = struct.pack("<I", 25) + b'{"type":"Exec","bytes":0}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (HALF, "ended inside a frame"),
        (OVERSIZED, "over the limit"),
        (UNKNOWN, "no message of type 'Exec'"),
        (encode(Hello(1)) + OVERSIZED, "over the limit"),
        (encode(Cancel(1)), "expected a greeting, not Cancel"),
        (encode(Token(1, 2)), "expected a greeting, not Token"),
        (encode(Hello(1)) + encode(Cancel(1)), "expected a model to load, not Cancel"),
        (encode(Hello(7)), "speaks version 1, its client version 7"),
    ],
    ids=["half", "oversized", "unknown", "late", "no-greeting", "wrong-way", "no-load", "version"],
)
def test_a_client_that_talks_nonsense_is_told_and_left(data: bytes, reason: str) -> None:
    with RawWorker() as worker:
        worker.socket.sendall(data)
        worker.socket.shutdown(socket.SHUT_WR)
        last = worker.answers()[-1]
        assert isinstance(last, Close)
        assert reason in last.reason
        assert worker.process.wait(WAIT_S) == 1


def test_the_process_ends_well_when_its_parent_only_leaves() -> None:
    with RawWorker() as worker:
        worker.socket.close()
        assert worker.process.wait(WAIT_S) == 0
        assert worker.process.stderr is not None
        assert worker.process.stderr.read() == b""


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    command = [sys.executable, "-P", "-m", "quadjet.engine.worker", "--fd", "0"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"is not a socket" in done.stderr

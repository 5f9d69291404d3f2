"""An engine whose process is killed, stopped and crashed: replies are those of an undisturbed one, and a crash loop ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from quadjet.engine.backend import TokenSampling
from quadjet.engine.client import EngineSettings, GenerateRequest, TokenEvent
from quadjet.engine.errors import EngineDiedError, EngineError, ModelFileError
from quadjet.engine.supervisor import EngineSupervisor, RestartLimits
from tiny_models import FAMILIES, VOCAB, tiny_model

GRAMMAR = 'start: "abc" /[a-z]{90}/ "and so on to the end" /[0-9]{60}/'
PATIENT = RestartLimits(deaths_without_token=1000, deaths_while_loading=1000, deaths=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_model(folder)


@contextlib.asynccontextmanager
async def started(model: Path, limits: RestartLimits = PATIENT, **settings: float) -> AsyncIterator[EngineSupervisor]:
    engine = await EngineSupervisor.start(replace(EngineSettings(model, context=2048), **settings), limits=limits)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.close()
    assert not workers()


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, waited for or not
            if "quadjet.engine.worker" in process.cmdline():
                found.append(process)
    return found


def request(seed: int, max_tokens: int = 200, **fields: object) -> GenerateRequest:
    """Of odd seeds greedy, of even ones sampled."""
    tokens = [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB - 9, 30 * seed)]
    sampling = TokenSampling() if seed % 2 else TokenSampling(1.0, top_k=200, top_p=0.95, seed=seed)
    return replace(GenerateRequest(tokens, sampling, max_tokens, key=f"task {seed}"), **fields)  # type: ignore[arg-type]


def four(max_tokens: int = 200) -> list[GenerateRequest]:
    return [*[request(seed, max_tokens) for seed in (1, 2, 3)], request(4, max_tokens, grammar=GRAMMAR)]


class Outcome(NamedTuple):
    tokens: list[int]
    last: TokenEvent


class Heard:
    """The tokens of a reply as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._more = asyncio.Event()

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self._more.set()

    async def until(self, count: int) -> None:
        while len(self.tokens) < count:
            self._more.clear()
            await self._more.wait()


async def run(engine: EngineSupervisor, wanted: GenerateRequest, heard: Heard | None = None) -> Outcome:
    heard = heard or Heard()
    last = None
    async for event in engine.generate(wanted):
        assert last is None
        if event.token is None:
            last = event
        else:
            heard.add(event.token)
    assert last is not None
    return Outcome(heard.tokens, last)


async def run_all(engine: EngineSupervisor, requests: list[GenerateRequest]) -> list[Outcome]:
    return list(await asyncio.gather(*[run(engine, wanted) for wanted in requests]))


def assert_same(disturbed: list[Outcome], calm: list[Outcome]) -> None:
    for a, b in zip(disturbed, calm, strict=True):
        assert a.tokens == b.tokens
        assert a.last.finish == b.last.finish
        assert a.last.usage is not None
        assert b.last.usage is not None
        assert a.last.usage.prompt_tokens == b.last.usage.prompt_tokens
        assert a.last.usage.completion_tokens == b.last.usage.completion_tokens == len(a.tokens)


async def until_it_computes(engine: EngineSupervisor, prompt_tokens: int) -> None:
    """Until one process has computed so many tokens of prompts."""
    computed = 0.0
    while computed < prompt_tokens:
        with contextlib.suppress(EngineDiedError):  # the last one, which was killed
            computed = (await engine.stats())["prompt_tokens"]


@pytest.mark.parametrize("arch", FAMILIES)
async def test_four_replies_go_on_after_one_restart(folder: Path, arch: str) -> None:
    async with started(tiny_model(folder, arch=arch)) as engine:
        calm = await run_all(engine, four(80))
        heard = [Heard() for _ in range(4)]
        replies = [asyncio.create_task(run(engine, r, h)) for r, h in zip(four(80), heard, strict=True)]
        for tokens in heard:
            await tokens.until(10)
        os.kill(engine.pid, signal.SIGKILL)
        assert_same(list(await asyncio.gather(*replies)), calm)
        assert engine.num_restarts == 1
        assert (await engine.stats())["restarts"] == 1


@pytest.mark.slow
async def test_a_hundred_kills_at_random_moments_change_nothing(model: Path) -> None:
    chance = random.Random(7)
    async with started(model) as engine:
        calm = await run_all(engine, four(600))
        num_kills = 0

        async def kill_now_and_then() -> None:
            nonlocal num_kills
            while num_kills < 100:
                await asyncio.sleep(chance.choice((0.02, 0.3, 1.5)) * chance.random())
                for worker in workers():  # loading, rebuilding or generating
                    worker.kill()
                    num_kills += 1

        killer = asyncio.create_task(kill_now_and_then())
        num_rounds = 0
        while not killer.done():
            assert_same(await run_all(engine, four(600)), calm)
            num_rounds += 1
        await killer
        print(f"{num_kills} kills, {engine.num_restarts} restarts, {num_rounds} rounds of four replies")
        assert engine.num_restarts >= 50


async def test_a_process_that_stands_still_is_replaced(model: Path) -> None:
    async with started(model, silence_limit_s=2.0) as engine:
        calm = await run_all(engine, four())
        heard = Heard()
        reply = asyncio.create_task(run(engine, four()[0], heard))
        await heard.until(5)
        os.kill(engine.pid, signal.SIGSTOP)
        assert_same([await reply], calm[:1])
        assert engine.num_restarts == 1


async def test_whoever_waits_hears_of_the_restart(model: Path) -> None:
    messages: list[str] = []
    async with started(model) as engine:
        events = engine.generate(request(1), lambda message, *_: messages.append(message))
        await anext(events)
        assert messages == []
        os.kill(engine.pid, signal.SIGKILL)
        assert [event async for event in events][-1].finish is not None
        assert messages[0] == "the engine died and is started again"
        assert "loading weights" in messages
        assert messages[-1] == "the engine runs again"


async def test_a_reply_that_ended_early_needs_no_restart(model: Path) -> None:
    async with started(model) as engine:
        events = engine.generate(request(1, 1500))
        event = await anext(events)
        os.kill(engine.pid, signal.SIGSTOP)  # it will not hear of the end
        engine.end_early(event)
        os.kill(engine.pid, signal.SIGKILL)
        rest = [event async for event in events]
        assert rest[-1].finish == "stop"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == len(rest)
        assert engine.num_restarts == 0


async def test_an_idle_process_that_died_is_replaced_when_it_is_needed(model: Path) -> None:
    async with started(model) as engine:
        calm = await run_all(engine, four())
        os.kill(engine.pid, signal.SIGKILL)
        assert_same(await run_all(engine, four()), calm)


async def test_a_reply_that_kills_every_process_takes_no_other_with_it(model: Path) -> None:
    """Whatever process is at work at it, alone or not, dies before it has a token."""
    async with started(model, RestartLimits()) as engine:
        calm = await run_all(engine, four())
        heard = [Heard() for _ in range(4)]
        replies = [asyncio.create_task(run(engine, r, h)) for r, h in zip(four(), heard, strict=True)]
        for tokens in heard:
            await tokens.until(1)
        # 1,800 prompt tokens take a while: time to kill.
        poison = asyncio.create_task(run(engine, replace(request(60), max_tokens=1), bad := Heard()))
        for _ in range(3):
            await until_it_computes(engine, 900)
            os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(?s)died 3 times while it worked at this reply.*SIGKILL.*lower engine\.context"):
            await poison
        assert bad.tokens == []
        assert_same(list(await asyncio.gather(*replies)), calm)
        assert engine.failure is None


async def test_deaths_without_end_are_an_error(model: Path) -> None:
    async with started(model, RestartLimits(deaths=4)) as engine:
        heard = Heard()
        reply = asyncio.create_task(run(engine, request(1, 1500), heard))
        for _ in range(5):
            await heard.until(len(heard.tokens) + 1)
            os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"died 5 times in 600 s"):
            await reply
        assert engine.failure is not None
        with pytest.raises(EngineError, match="died 5 times"):
            await run(engine, request(2))


async def test_a_model_that_kills_what_loads_it_is_an_error(model: Path) -> None:
    def kill(*_: object) -> None:
        for process in workers():
            process.kill()

    with pytest.raises(EngineError, match=r"(?s)died 3 times in a row while it loaded the model.*SIGKILL"):
        await EngineSupervisor.start(EngineSettings(model), kill)
    assert not workers()


async def test_a_file_that_is_gone_at_the_restart_is_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    async with started(path) as engine:
        heard = Heard()
        reply = asyncio.create_task(run(engine, request(1, 1500), heard))
        await heard.until(1)
        path.unlink()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(ModelFileError, match=path.name):
            await reply


async def test_a_reply_can_be_cancelled_during_the_restart_and_the_others_go_on(model: Path) -> None:
    async with started(model) as engine:
        calm = await run_all(engine, four())
        heard = [Heard() for _ in range(4)]
        replies = [asyncio.create_task(run(engine, r, h)) for r, h in zip(four(), heard, strict=True)]
        for tokens in heard:
            await tokens.until(3)
        pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        while not any(worker.pid != pid for worker in workers()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.001)
        replies[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await replies[0]
        assert_same(list(await asyncio.gather(*replies[1:])), calm[1:])
        assert (await engine.stats())["running"] == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01, 0.1, 0.3])
async def test_close_during_a_restart_leaves_no_process_and_nobody_waiting(model: Path, delay_s: float) -> None:
    async with started(model) as engine:
        heard = Heard()
        reply = asyncio.create_task(run(engine, request(1, 1500), heard))
        await heard.until(1)
        pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.0)
        await asyncio.sleep(delay_s)
    with pytest.raises(EngineError, match="the engine was closed"):
        await reply

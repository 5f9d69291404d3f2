"""An engine that outlives its process: one that died or hung is started again, and every reply goes on where it was.

Tokens depend on the tokens before them, the seed and the position only, so a reply resumed from its tokens is the reply.
All methods belong to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Self

from .channel import RemoveSource, UpdateSource
from .chat import ProgressCallback
from .client import EngineClient, EngineInfo, EngineSettings, GenerateRequest, GenerationUsage, TokenEvent
from .errors import EngineDiedError, EngineError, QuadjetError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When to give up. Every restart loads the model, so each of them is minutes of a busy machine with a large one."""

    deaths_without_token: int = 3
    """Of the process while it worked at one reply and that reply got no token further: the reply is what kills it."""
    deaths_while_loading: int = 3
    """In a row: the model cannot be loaded on this machine as it is."""
    deaths: int = 20
    within_s: float = 600.0
    """Of any kind: replies go on, but by crashes."""


@dataclass(slots=True)
class _Reply:
    """A reply as it grows, whichever process generates it."""

    request: GenerateRequest
    number: int
    submitted_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    num_deaths: int = 0
    deaths_without_token: int = 0
    is_ended: bool = False
    """By its reader: whatever comes now is not wanted."""
    client: EngineClient | None = None
    event: TokenEvent | None = None
    """The last one from `client`."""

    @property
    def is_suspect(self) -> bool:
        """It may be what kills the engine, so it must not take others with it."""
        return self.deaths_without_token > 1


class EngineSupervisor:
    """A running engine, whichever process that is. Make one with `start`, end it with `close`."""

    def __init__(self, settings: EngineSettings, on_progress: ProgressCallback, limits: RestartLimits) -> None:
        self._settings = settings
        self._limits = limits
        self._client: EngineClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._listeners: set[ProgressCallback] = {on_progress}
        self._suspects = asyncio.Lock()
        self._replies: dict[int, _Reply] = {}
        self._numbers = itertools.count(1)
        self._deaths: deque[float] = deque()
        self._failure: QuadjetError | None = None
        self.info = EngineInfo("", 0, 0, 0)
        self.num_restarts = 0
        self.on_source_gone: Callable[[str], None] = lambda name: None

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        on_progress: ProgressCallback = lambda *_: None,
        limits: RestartLimits = RestartLimits(),
    ) -> Self:
        """Start the process and load the model. ModelFileError or EngineError says why it could not be."""
        supervisor = cls(settings, on_progress, limits)
        try:
            await supervisor._running()
        except BaseException:
            await supervisor.close()
            raise
        supervisor._listeners.discard(on_progress)
        return supervisor

    @property
    def pid(self) -> int:
        """Of the process that runs or ran last."""
        assert self._client is not None
        return self._client.pid

    @property
    def failure(self) -> QuadjetError | None:
        """Why no process is started any more; None while replies can be had."""
        return self._failure

    async def generate(
        self, request: GenerateRequest, on_progress: ProgressCallback | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """EngineClient.generate, over as many processes as it takes. `on_progress` hears of an engine that is started again.

        After a restart the usage is that of the whole reply: times by the clock from its submission on, with the restarts in
        them, and as cached those tokens of the prompt that the last process did not compute.
        EngineError when the engine keeps dying.
        """
        reply = _Reply(request, next(self._numbers))
        self._replies[reply.number] = reply
        if on_progress is not None:
            self._listeners.add(on_progress)
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._attempt(reply)) as events:
                        async for event in events:
                            yield event
                    return
                except EngineDiedError as death:
                    if reply.is_ended:
                        break
                    self._count_death(reply, death)
            yield TokenEvent(reply.number, None, "stop", _usage(reply, None))
        finally:
            del self._replies[reply.number]
            if on_progress is not None:
                self._listeners.discard(on_progress)

    def end_early(self, event: TokenEvent) -> None:
        """Stop a reply before the next step; its iterator goes on to the last event, which holds the usage."""
        reply = self._replies.get(event.id)
        if reply is not None and reply.client is not None and reply.event is not None:
            reply.is_ended = True
            reply.client.end_early(reply.event)

    def update_source(self, change: UpdateSource | RemoveSource) -> None:
        """EngineClient.update_source. A process that is started again learns a text whole when it is next changed."""
        if self._client is not None:
            self._client.update_source(change)

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of the process that runs, and how often one was started again."""
        client = await self._running()
        return {**await client.stats(), "restarts": self.num_restarts}

    async def close(self) -> None:
        """End the process, or the start of one, and every reply that still waits."""
        self._failure = self._failure or EngineError("the engine was closed")
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._client is not None:
            await self._client.close()

    async def _attempt(self, reply: _Reply) -> AsyncGenerator[TokenEvent, None]:
        """The reply from where it is, by one process."""
        async with contextlib.AsyncExitStack() as alone:
            if reply.is_suspect:
                await alone.enter_async_context(self._suspects)
            reply.client = await self._running()
            request = replace(reply.request, generated=(*reply.request.generated, *reply.tokens))
            async with contextlib.aclosing(reply.client.generate(request)) as events:
                async for event in events:
                    reply.event = event
                    if event.token is not None:
                        reply.tokens.append(event.token)
                        reply.first_token_s = reply.first_token_s or time.monotonic()
                        reply.deaths_without_token = 0
                        await alone.aclose()  # it was not this one
                    usage = _usage(reply, event.usage) if event.token is None and reply.num_deaths else event.usage
                    yield replace(event, id=reply.number, usage=usage)

    def _count_death(self, reply: _Reply, death: EngineDiedError) -> None:
        """Raise EngineError if this was one too many for the reply."""
        reply.num_deaths += 1
        reply.deaths_without_token += 1
        if reply.deaths_without_token >= self._limits.deaths_without_token:
            raise EngineError(
                f"the engine died {reply.deaths_without_token} times while it worked at this reply and got no further; "
                f"at last {death.message}",
                death.fix,
            ) from death

    async def _running(self) -> EngineClient:
        """A process that runs, started if there is none. All who wait share one start, and none of them can cancel it."""
        while self._failure is None:
            if self._client is not None and self._client.failure is None:
                return self._client
            starting = self._starting = self._starting or asyncio.create_task(self._start())
            await asyncio.wait([starting])
            if not starting.cancelled() and (error := starting.exception()) is not None:
                raise error
        raise self._failure

    async def _start(self) -> None:
        try:
            if self._client is not None and self._client.failure is not None:
                await self._client.close()
                self._count_restart(self._client.failure)
            client = await self._load()
            client.on_source_gone = self._source_gone
            self._client, self.info = client, client.info
            if self.num_restarts:
                self._tell("the engine runs again", 1, 1)
        except QuadjetError as error:
            self._failure = error
            _log.error("the engine is not started again: %s", error)
        except OSError as error:
            self._failure = EngineError(f"the engine process cannot be started: {error}", "run `quadjet doctor`")
        finally:
            self._starting = None

    async def _load(self) -> EngineClient:
        for num_deaths in itertools.count(1):
            try:
                client = await EngineClient.start(self._settings, self._tell)
            except EngineDiedError as death:
                if num_deaths >= self._limits.deaths_while_loading:
                    message = f"the engine died {num_deaths} times in a row while it loaded the model; at last {death.message}"
                    raise EngineError(message, death.fix) from death
                self._count_restart(death)
            else:
                break
        return client

    def _count_restart(self, death: QuadjetError) -> None:
        """Tell of a restart that is due, or raise EngineError if it is one too many."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self._limits.within_s:
            self._deaths.popleft()
        if len(self._deaths) > self._limits.deaths:
            message = f"the engine died {len(self._deaths)} times in {self._limits.within_s:.0f} s; at last {death.message}"
            raise EngineError(message, death.fix) from death
        self.num_restarts += 1
        _log.warning("restart %d of the engine: %s", self.num_restarts, death.message.partition("\n")[0])
        self._tell("the engine died and is started again", 0, 0)

    def _source_gone(self, name: str) -> None:
        self.on_source_gone(name)

    def _tell(self, message: str, done: int, total: int) -> None:
        for listener in list(self._listeners):
            listener(message, done, total)


def _usage(reply: _Reply, last: GenerationUsage | None) -> GenerationUsage:
    now = time.monotonic()
    first = reply.first_token_s or now
    return GenerationUsage(
        prompt_tokens=len(reply.request.tokens),
        cached_tokens=0 if last is None else last.cached_tokens,
        completion_tokens=len(reply.tokens),
        prefill_s=first - reply.submitted_s,
        decode_s=now - first,
    )

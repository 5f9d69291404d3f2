"""The daemon's side of the engine process: starts it, talks to it, and says what happened when it ends.

All methods belong to one asyncio loop. Whatever ends the process ends every call that waits for it with an EngineError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from .backend import TokenSampling
from .channel import (
    PROTOCOL_VERSION,
    Alive,
    Cancel,
    ChannelError,
    Close,
    Done,
    Failed,
    FromEngine,
    Generate,
    GetStats,
    Hello,
    Load,
    LoadFailed,
    Logits,
    LogitsRows,
    Progress,
    Ready,
    RemoveSource,
    SourceGone,
    Stats,
    ToEngine,
    Token,
    UpdateSource,
    encode,
    receive_message,
)
from .chat import ProgressCallback
from .errors import EngineDiedError, EngineError, ModelFileError
from .heartbeat import INTERVAL_S
from .sampling import validate

_STDERR_LINES = 30
_STDERR_LINE = 500
_STDERR_CHUNK = 64 * 1024
_CLOSE_WAIT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process is started with."""

    model_path: Path
    backend: str = "auto"
    max_sequences: int = 4
    context: int = 0
    """Tokens that a prompt and its reply may have together; 0: as many as the model was made for, 8192 at most."""
    max_step_rows: int = 64
    """Rows of one step: how long a prompt holds up the sequences that decode."""
    silence_limit_s: float = 60.0
    """A process that gives no sign of life for so long hangs. It gives one a second, but a machine that swaps may hold it up."""
    step_limit_s: float = 300.0
    """A step that takes so long hangs. On a CPU, 64 prompt rows of the largest models that fit take some tens of seconds."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    tokens: Sequence[int]
    sampling: TokenSampling = TokenSampling()  # noqa: RUF009 - frozen
    max_tokens: int = 512
    generated: Sequence[int] = ()
    """What another engine process has generated of the reply, `max_tokens` at most: this one goes on behind it."""
    grammar: str | None = None
    """llguidance's Lark: every token is held to it, and its end is the end."""
    key: str = ""
    """Names the transcript: its last, partly filled page is kept for the next request of the same key."""
    return_logits: bool = False


@dataclass(frozen=True, slots=True)
class GenerationUsage:
    """Counts in tokens; prefill_s runs from the first step to the first token, decode_s from there to the end."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; or, last, `token` None with why it ended. End-of-generation tokens are not among the tokens."""

    id: int
    """The generation's number, for `end_early`."""
    token: int | None
    finish: Literal["stop", "length"] | None = None
    usage: GenerationUsage | None = None
    logits: NDArray[np.float32] | None = None
    """[vocab] that the token was chosen from, where they were asked for; None for one that the grammar forced."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    backend: str
    vocab_size: int
    context: int
    num_pages: int


_Answer = Token | LogitsRows | Done | Failed | Stats


class EngineClient:
    """A running engine process. Make one with `start`, end it with `close`."""

    def __init__(
        self,
        settings: EngineSettings,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._settings = settings
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[_Answer | EngineError]] = {}
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_task = asyncio.create_task(self._read_stderr())
        self._reader_task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._num_heard = 0
        self._hang = ""
        self._watch_task = asyncio.create_task(self._watch())
        self.info = EngineInfo("", 0, 0, 0)
        self.on_source_gone: Callable[[str], None] = lambda name: None
        """Called with the name of a draft source that must be sent whole the next time."""

    @classmethod
    async def start(cls, settings: EngineSettings, on_progress: ProgressCallback = lambda *_: None) -> Self:
        """Start the process and load the model. ModelFileError or EngineError says why it could not be."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: the current folder may be a stranger's and must not provide modules.
                *(sys.executable, "-P", "-m", "quadjet.engine.worker", "--fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(os.environ),
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        client = cls(settings, process, reader, writer)
        try:
            client.info = await client._load(on_progress)
        except BaseException:  # a cancelled start must not leave a process behind either
            await client.close()
            raise
        client._reader_task = asyncio.create_task(client._read())
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def failure(self) -> EngineError | None:
        """Why the process is gone, None while it runs."""
        return self._failure

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens as they come. Closing the iterator, or cancelling who waits for it, ends the sequence before the next step."""
        validate(request.sampling)
        number = next(self._ids)
        message = Generate(
            id=number,
            tokens=_token_array([*request.tokens, *request.generated]),
            num_generated=len(request.generated),
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            grammar=request.grammar,
            key=request.key,
            return_logits=request.return_logits,
        )
        async with contextlib.aclosing(self._answers(number, message)) as answers:
            async for answer in answers:
                if isinstance(answer, Token):
                    yield TokenEvent(number, answer.token, logits=None if answer.logits is None else answer.logits[0])
                elif isinstance(answer, Done):
                    yield TokenEvent(number, None, "length" if answer.reason == "length" else "stop", _usage(answer))

    def end_early(self, event: TokenEvent) -> None:
        """Stop a generation before the next step; its iterator goes on to the last event, which holds the usage."""
        if self._failure is None:
            self._send(Cancel(event.id))

    async def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[n, vocab] after each of the tokens, computed afresh."""
        number = next(self._ids)
        async with contextlib.aclosing(self._answers(number, Logits(number, _token_array(tokens)))) as answers:
            return np.concatenate([a.logits async for a in answers if isinstance(a, LogitsRows)])

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of the engine: steps, tokens, pages, queue."""
        number = next(self._ids)
        async with contextlib.aclosing(self._answers(number, GetStats(number))) as answers:
            return next(iter([a.values async for a in answers if isinstance(a, Stats)]))

    def update_source(self, change: UpdateSource | RemoveSource) -> None:
        """Tell the engine of a text that drafts may be copied from. No effect when it is gone: a new one has no texts."""
        if self._failure is None:
            self._send(change)

    async def close(self) -> None:
        """End the process, by force if it does not end by itself, and every call that still waits."""
        if self._failure is None:
            self._failure = EngineError("the engine was closed")
        with contextlib.suppress(OSError):
            self._writer.write(encode(Close("closed by its client")))
        self._writer.close()
        for stop in (self._process.terminate, self._process.kill):
            try:
                await asyncio.wait_for(self._process.wait(), _CLOSE_WAIT_S)
                break
            except TimeoutError:
                stop()
        await self._process.wait()
        self._watch_task.cancel()
        await asyncio.wait([self._watch_task])
        if self._reader_task is not None:
            await self._reader_task
        await self._stderr_task
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _load(self, on_progress: ProgressCallback) -> EngineInfo:
        settings = self._settings
        self._send(Hello(PROTOCOL_VERSION))
        self._send(
            Load(
                model_path=str(settings.model_path.absolute()),
                backend=settings.backend,
                max_sequences=settings.max_sequences,
                context=settings.context,
                max_step_rows=settings.max_step_rows,
            )
        )
        while True:
            try:
                message = await self._receive()
            except (ChannelError, OSError) as error:
                raise await self._death(str(error)) from error
            if isinstance(message, Hello) and message.version == PROTOCOL_VERSION:
                continue
            if isinstance(message, Progress):
                on_progress(message.message, message.done, message.total)
            elif isinstance(message, Ready):
                return EngineInfo(message.backend, message.vocab_size, message.context, message.num_pages)
            elif isinstance(message, LoadFailed):
                raise (ModelFileError if message.is_model_file else EngineError)(message.message, message.fix)
            else:
                raise await self._death(message.reason if isinstance(message, Close) else "")

    async def _answers(self, number: int, message: ToEngine) -> AsyncGenerator[_Answer, None]:
        """Send a command and yield its answers up to the last one. Leaving early cancels it."""
        if self._failure is not None:
            raise self._failure
        queue: asyncio.Queue[_Answer | EngineError] = asyncio.Queue()
        self._waiting[number] = queue
        is_over = False
        try:
            self._send(message)
            while not is_over:
                answer = await queue.get()
                is_over = not isinstance(answer, Token | LogitsRows)
                if isinstance(answer, EngineError):
                    raise answer
                if isinstance(answer, Failed):
                    raise EngineError(answer.message, answer.fix)
                yield answer
        finally:
            del self._waiting[number]
            if not is_over and self._failure is None:
                self._send(Cancel(number))

    def _send(self, message: ToEngine) -> None:
        self._writer.write(encode(message))

    async def _receive(self) -> FromEngine | ToEngine | None:
        """The next message but signs of life."""
        while True:
            message = await receive_message(self._reader)
            self._num_heard += 1
            if not isinstance(message, Alive):
                return message
            if message.busy_s > self._settings.step_limit_s:
                self._end_hang(f"{message.work} took more than {self._settings.step_limit_s:.0f} s")

    async def _watch(self) -> None:
        """Kill the process when it has been silent for too long. Time in which this loop itself stood still does not count."""
        limit_s, silent_s = self._settings.silence_limit_s, 0.0
        while silent_s < limit_s:
            heard = self._num_heard
            await asyncio.sleep(INTERVAL_S)
            silent_s = silent_s + INTERVAL_S if heard == self._num_heard else 0.0
        self._end_hang(f"it gave no sign of life for {limit_s:.0f} s")

    def _end_hang(self, what: str) -> None:
        if self._process.returncode is None and not self._hang:
            self._hang = f"it hung, {what}, so it was killed"
            self._process.kill()

    async def _read(self) -> None:
        """Hand answers to whoever waits for them, until the stream ends; then say why to all that still wait."""
        reason = ""
        try:
            while (message := await self._receive()) is not None:
                if isinstance(message, Close):
                    reason = message.reason
                    break
                self._dispatch(message)
        except (ChannelError, OSError) as error:
            reason = str(error)
        if self._failure is None:
            self._failure = await self._death(reason)
            _log.error("%s", self._failure)
        for queue in self._waiting.values():
            queue.put_nowait(self._failure)

    def _dispatch(self, message: FromEngine | ToEngine) -> None:
        if isinstance(message, SourceGone):
            self.on_source_gone(message.name)
            return
        if not isinstance(message, _Answer):
            raise ChannelError(f"the engine sent a {type(message).__name__} that nobody asked for")
        if (queue := self._waiting.get(message.id)) is not None:  # else it was cancelled meanwhile
            queue.put_nowait(message)

    async def _death(self, reason: str) -> EngineError:
        """Wait for the process to end and tell how it did. It is killed if it lives on without its channel."""
        self._writer.close()
        try:
            code = await asyncio.wait_for(self._process.wait(), _CLOSE_WAIT_S)
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        await self._stderr_task
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        lines = "".join(f"\n  | {line}" for line in self._stderr)
        fix = "run `quadjet doctor`; `quadjet logs` shows what came before"
        if code == -signal.SIGKILL and not self._hang:  # nobody but the system's memory killer does that unasked
            fix = "if memory ran out, lower engine.context or engine.max_sequences, or use a smaller model; see `quadjet doctor`"
        reason = self._hang or reason
        return EngineDiedError(f"the engine process ended {how}" + (f": {reason}" if reason else "") + lines, fix)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(_STDERR_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:_STDERR_LINE]
            for line in lines:
                self._note(line)
        if rest:
            self._note(rest)

    def _note(self, line: bytes) -> None:
        text = line[:_STDERR_LINE].decode(errors="replace")
        self._stderr.append(text)
        _log.info("engine: %s", text)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: matrix products run on the cores that it really has, and their idle threads do not spin.

    OpenBLAS threads spin for 2^26 ticks by default. Beside other busy processes that made steps 5 times slower than 2^4 does.
    """
    threads = str(_physical_cores())
    defaults = {"OPENBLAS_NUM_THREADS": threads, "OPENBLAS_THREAD_TIMEOUT": "4", "OMP_NUM_THREADS": threads}
    return {**defaults, "OMP_WAIT_POLICY": "passive", **environment}


def _physical_cores() -> int:
    """Cores that this process may use, hardware threads of one core counted once: they share what a product needs."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
    cores = {path.read_text() if path.is_file() else str(path) for path in siblings}
    return len(cores)


def _token_array(tokens: Sequence[int]) -> NDArray[np.int32]:
    try:
        return np.array(tokens, np.int32).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise EngineError(f"a prompt is a list of token ids: {error}") from error


def _usage(done: Done) -> GenerationUsage:
    return GenerationUsage(
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        completion_tokens=done.completion_tokens,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
    )

"""The engine process: `python -m quadjet.engine.worker --fd N`, started by client.py with one end of a socket pair as N.

It opens the model file that it is told to, and no other file. It ends when the other end of the socket closes, however the
parent died. One thread reads and prepares commands, so that compiling a grammar stops no step; the main thread does all else.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .backend import CHECKPOINTS_PER_SLOT, Backend
from .channel import (
    PROTOCOL_VERSION,
    Cancel,
    ChannelError,
    Close,
    Failed,
    FromEngine,
    Generate,
    GetStats,
    Hello,
    Load,
    LoadFailed,
    Logits,
    Message,
    Progress,
    Ready,
    RemoveSource,
    SourceGone,
    Stats,
    UpdateSource,
    encode,
    read_message,
)
from .draft import PromptLookup
from .engine import Engine, Vocabulary
from .errors import EngineError, ModelFileError, QuadjetError
from .gguf_file import GgufFile
from .grammar import GrammarCompiler
from .heartbeat import Heartbeat
from .model import MAX_CONTEXT, load_config
from .reference import ReferenceBackend
from .sequence import Sequence, pages_for
from .tokenizer import Tokenizer

DEFAULT_CONTEXT = 8192
"""Tokens of a sequence where the setting leaves it open and the model could have more: cache for all of them is allocated."""
MAX_SEQUENCES = 16
MAX_STEP_ROWS = 1024
_EXIT_GRACE_S = 2.0
"""How long a step may go on after the parent is gone."""
_PROGRESS_INTERVAL_S = 0.05
_LOADING = "one part of the load"

_Item = Message | Sequence | ChannelError | None
"""What the reading thread hands over: prepared sequences, other messages as they are, None at the end of the stream."""


class Loaded(NamedTuple):
    backend: Backend
    backend_name: str
    vocabulary: Vocabulary
    compiler: GrammarCompiler
    context: int


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._compiler: GrammarCompiler | None = None
        self._lookup = PromptLookup()
        self._last_progress_s = 0.0
        self._sending = threading.Lock()
        self._heartbeat = Heartbeat(self._send)

    def run(self) -> int:
        """Serve until the stream ends; the process's exit code."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        try:
            with self._heartbeat.beating():
                self._serve()
        except ChannelError as error:
            return self._end(error.message)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the parent is gone
        return 0

    def _serve(self) -> None:
        if not isinstance(hello := self._inbox.get(), Hello):
            return self._refuse(hello, "a greeting")
        self._send(Hello(PROTOCOL_VERSION))
        if hello.version != PROTOCOL_VERSION:
            raise ChannelError(f"this engine speaks version {PROTOCOL_VERSION}, its client version {hello.version}")
        if not isinstance(load := self._inbox.get(), Load):
            return self._refuse(load, "a model to load")
        try:
            with self._heartbeat.during(_LOADING):
                loaded = load_model(load, self._report)
        except (QuadjetError, MemoryError) as error:
            return self._send(load_failed(error))
        self._compiler = loaded.compiler
        engine = Engine(
            loaded.backend,
            loaded.vocabulary,
            context=loaded.context,
            max_sequences=load.max_sequences,
            drafts=self._lookup,
        )
        self._send(Ready(loaded.backend_name, loaded.backend.vocab_size, loaded.context, loaded.backend.num_pages))
        while self._obey(engine):
            if engine.has_work:
                with self._heartbeat.during("one step"):
                    events = engine.step()
                self._send(*events)

    def _obey(self, engine: Engine) -> bool:
        """Carry out the commands that are there; wait for one if there is nothing to compute. False at the end."""
        while not (engine.has_work and self._inbox.empty()):
            item = self._inbox.get()
            if item is None or isinstance(item, Close):
                return False
            with self._heartbeat.during("one command"):
                self._send(*self._carry_out(engine, item))
        return True

    def _carry_out(self, engine: Engine, item: Message | Sequence | ChannelError) -> Iterable[FromEngine]:
        if isinstance(item, Sequence):
            return engine.submit(item)
        if isinstance(item, Failed):
            return [item]
        if isinstance(item, Cancel):
            return engine.cancel(item.id)
        if isinstance(item, GetStats):
            return [Stats(item.id, engine.stats())]
        if isinstance(item, UpdateSource):
            return map(SourceGone, self._lookup.update(item))
        if isinstance(item, RemoveSource):
            self._lookup.remove(item.name)
        else:
            self._refuse(item, "a command")
        return []

    def _refuse(self, item: _Item, wanted: str) -> None:
        """Raise for an item that has no place here. The stream's end is none of those."""
        if isinstance(item, ChannelError):
            raise item
        if item is not None and not isinstance(item, Close):
            raise ChannelError(f"expected {wanted}, not {type(item).__name__}")

    def _end(self, reason: str) -> int:
        """Tell the client why the conversation ends, if it still listens."""
        try:
            self._send(Close(reason))
        except (BrokenPipeError, ConnectionResetError):
            logging.getLogger(__name__).warning("the client left before it heard: %s", reason)
        return 1

    def _report(self, message: str, done: int, total: int) -> None:
        self._heartbeat.go_on(_LOADING)
        now = time.monotonic()
        if done >= total or now - self._last_progress_s >= _PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            self._send(Progress(message, done, total))

    def _send(self, *messages: FromEngine) -> None:
        data = b"".join(map(encode, messages))
        with self._sending:  # the heartbeat speaks too
            self._connection.sendall(data)

    def _read(self) -> None:
        """The reading thread."""
        stream = self._connection.makefile("rb")
        item: _Item = None
        try:
            while (message := read_message(stream)) is not None:
                with self._heartbeat.during("preparing one command"):
                    self._inbox.put(self._prepare(message))
        except ChannelError as error:
            item = error
        except OSError:
            item = None  # reset by a parent that died
        except BaseException as error:  # a panic of the grammar library is one: unread commands would wait for ever
            logging.getLogger(__name__).exception("reading commands failed")
            item = ChannelError(f"a command could not be prepared: {error!r}")
        self._inbox.put(item)
        # The main thread may be loading or inside a step: nobody wants the result any more.
        time.sleep(_EXIT_GRACE_S)
        os._exit(0 if item is None else 1)

    def _prepare(self, message: Message) -> _Item:
        if isinstance(message, Logits):
            tokens = message.tokens.tolist()
            return Sequence(message.id, tokens, len(tokens), 0)
        if not isinstance(message, Generate):
            return message
        try:
            return self._sequence(message)
        except QuadjetError as error:
            return Failed(message.id, error.message, error.fix)

    def _sequence(self, message: Generate) -> Sequence:
        if message.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, not {message.max_tokens}")
        if not 0 <= message.num_generated <= min(len(message.tokens), message.max_tokens):
            raise EngineError(f"{message.num_generated} of {len(message.tokens)} tokens cannot be generated ones")
        matcher = None
        if message.grammar is not None:
            if self._compiler is None:
                raise EngineError("a grammar came before the model was loaded")
            matcher = self._compiler.compile(message.grammar)
        tokens = message.tokens.tolist()
        return Sequence(
            message.id,
            tokens,
            len(tokens) - message.num_generated,
            message.max_tokens,
            sampling=message.sampling,
            matcher=matcher,
            key=message.key,
            return_logits=message.return_logits,
        )


def load_model(load: Load, report: Callable[[str, int, int], None]) -> Loaded:
    """Open the model file and build all that serves it. Raises ModelFileError or EngineError."""
    _check(load)
    with GgufFile.open(Path(load.model_path)) as file:
        config = load_config(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        context = load.context or min(config.context, DEFAULT_CONTEXT)
        if context > config.context:
            raise EngineError(
                f"engine.context is {context}, but {file.path.name} was made for {config.context} tokens",
                f"set engine.context to at most {config.context}",
            )
        backend = ReferenceBackend(
            file,
            num_pages=load.max_sequences * pages_for(context),
            max_rows=load.max_step_rows,
            num_slots=load.max_sequences,
            num_checkpoints=CHECKPOINTS_PER_SLOT * load.max_sequences,
            on_progress=lambda done, total: report("loading weights", done, total),
        )
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eog_ids, tokenizer.unused_ids)
    return Loaded(backend, "reference", vocabulary, GrammarCompiler(tokenizer), context)


def _check(load: Load) -> None:
    if load.backend not in ("auto", "reference"):
        raise EngineError(
            f"there is no backend {load.backend!r} for a model file here", "set engine.backend to auto or reference"
        )
    limits = (
        ("engine.max_sequences", load.max_sequences, 1, MAX_SEQUENCES),
        ("engine.max_step_rows", load.max_step_rows, load.max_sequences, MAX_STEP_ROWS),
        ("engine.context", load.context, 0, MAX_CONTEXT),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise EngineError(f"{name} is {value}, not from {least} to {most}", f"set {name} within these bounds")


def load_failed(error: QuadjetError | MemoryError) -> LoadFailed:
    if isinstance(error, QuadjetError):
        return LoadFailed(isinstance(error, ModelFileError), error.message, error.fix)
    return LoadFailed(False, f"there is not enough memory for the model: {error}", "use a smaller model or lower engine.context")


def main() -> int:
    parser = argparse.ArgumentParser(prog="quadjet.engine.worker", description="The engine process; started by its client.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the connected socket")
    fd = parser.parse_args().fd
    faulthandler.enable(all_threads=False)  # the client shows the last lines of what a crash says
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the client decides when to end
    try:
        connection = socket.socket(fileno=fd)
    except OSError as error:
        parser.exit(2, f"descriptor {fd} is not a socket: {error}\n")
    return Worker(connection).run()


if __name__ == "__main__":
    sys.exit(main())

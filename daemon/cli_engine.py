"""`quadjet generate` and `logits`: one engine process for one call, without the daemon."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_output as out
from .cli_settings import Settings, pass_settings

if TYPE_CHECKING:
    from ..engine.client import EngineClient, EngineSettings
    from ..engine.tokenizer import Tokenizer


class TokensType(click.ParamType[list[int]]):
    name = "ID,ID,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            tokens = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of token ids such as 1,2,3", param, ctx)
        if not all(0 <= token < 2**31 for token in tokens):
            self.fail("a token id is a number from 0 on", param, ctx)
        return tokens


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--tokens", type=TokensType(), help="The prompt as token ids.")
@click.option("-n", "--max-tokens", default=128, show_default=True, type=click.IntRange(1, 32768))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 5))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1))
@click.option("--json", "as_json", is_flag=True)
@pass_settings
def generate(
    settings: Settings,
    model: str,
    prompt: str | None,
    tokens: list[int] | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    as_json: bool,
) -> None:
    """One completion of PROMPT (or of stdin) as it stands, without a chat template. MODEL is a name or a .gguf."""
    from ..engine.backend import TokenSampling
    from ..engine.client import GenerateRequest

    if math.isnan(temperature):  # no range refuses it
        raise click.BadParameter("nan is not a temperature", param_hint="--temperature")
    if (prompt is None) == (tokens is None):
        if tokens is not None:
            raise click.UsageError("give the prompt as text or as --tokens, not both")
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, --tokens, or text on stdin")
        prompt = sys.stdin.read()
    path = settings.models.resolve(model)
    tokenizer = _tokenizer(path)
    ids = tokens if tokens is not None else _encode(tokenizer, prompt or "")
    request = GenerateRequest(ids, TokenSampling(temperature=temperature, seed=seed), max_tokens)
    asyncio.run(_generate(_engine_settings(settings, path), tokenizer, request, as_json=as_json))


async def _generate(engine: EngineSettings, tokenizer: Tokenizer, request: Any, *, as_json: bool) -> None:
    stream, texts, ids, last = tokenizer.stream(), [], [], None
    async with _engine(engine) as client:
        async for event in client.generate(request):
            if event.token is None:
                last = event
                continue
            ids.append(event.token)
            texts.append(stream.push(event.token))
            if not as_json:
                out.stream(texts[-1])
    texts.append(stream.flush())
    assert last is not None
    assert last.usage is not None
    if not as_json:
        out.stream(texts[-1] + "\n")
        return
    usage = last.usage
    timing = {"prefill_s": usage.prefill_s, "decode_s": usage.decode_s}
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    out.result_json({"text": "".join(texts), "tokens": ids, "finish": last.finish, **counts, **timing})


@click.command()
@click.argument("model")
@click.option("--tokens", type=TokensType(), required=True, help="The token ids to feed.")
@click.option("--out", "target", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The .npy file to write.")
@pass_settings
def logits(settings: Settings, model: str, tokens: list[int], target: Path) -> None:
    """Float32 logits [n, vocab] after each token, as a NumPy file: how engines are compared."""
    import numpy as np

    async def compute() -> Any:
        async with _engine(_engine_settings(settings, settings.models.resolve(model))) as client:
            return await client.logits(tokens)

    array = asyncio.run(compute())
    try:
        with target.open("wb") as file:
            np.save(file, array)
    except OSError as error:
        raise click.FileError(str(target), error.strerror or "") from None
    out.say(f"{target}: float32 {list(array.shape)}")


def _tokenizer(path: Path) -> Tokenizer:
    from ..engine.gguf_file import GgufFile
    from ..engine.tokenizer import Tokenizer

    with GgufFile.open(path) as file:
        return Tokenizer.from_gguf(file.metadata)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return start + tokenizer.encode(text)


def _engine_settings(settings: Settings, path: Path) -> EngineSettings:
    from ..engine.client import EngineSettings

    config = settings.config.engine
    return EngineSettings(path, backend=config.backend, max_sequences=1, context=config.context)


@asynccontextmanager
async def _engine(engine: EngineSettings) -> AsyncIterator[EngineClient]:
    from ..engine.client import EngineClient

    with out.share_progress() as progress:
        client = await EngineClient.start(engine, progress)
    try:
        yield client
    finally:
        await client.close()


VERBS = (generate, logits)

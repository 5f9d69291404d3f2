"""Tokens per second of the engine process: one sequence, four one after another, four at once, and beside a long prompt.

.venv/bin/python tests/bench/bench_batch.py MODEL.gguf [TOKENS]
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
from quadjet.engine.client import EngineClient, EngineSettings, GenerateRequest, GenerationUsage

PROMPT = 64


def prompt(seed: int, length: int) -> list[int]:
    """Ids that every vocabulary has; prompts of different seeds share nothing."""
    return [int(t) for t in np.random.default_rng(seed).integers(300, 900, length)]


async def generate(client: EngineClient, seed: int, count: int, length: int = PROMPT) -> GenerationUsage:
    async for event in client.generate(GenerateRequest(prompt(seed, length), max_tokens=count)):
        if event.usage is not None:
            return event.usage
    raise AssertionError("a generation without an end")


async def measure(client: EngineClient, count: int) -> None:
    print(f"{'what':44} {'tokens/s':>9} {'first token s':>14}")
    alone = [await generate(client, seed, count) for seed in range(4)]
    decode_s = sum(usage.decode_s for usage in alone)
    print(f"{'one sequence at a time':44} {sum(u.completion_tokens for u in alone) / decode_s:9.1f} {alone[0].prefill_s:14.2f}")
    together = await asyncio.gather(*[generate(client, seed, count) for seed in range(10, 14)])
    span = max(usage.decode_s for usage in together)
    total = sum(u.completion_tokens for u in together) / span
    print(f"{'four at once, all together':44} {total:9.1f} {max(u.prefill_s for u in together):14.2f}")
    long = asyncio.create_task(generate(client, 20, 1, length=1024))
    beside = await generate(client, 21, count)
    rate = beside.completion_tokens / beside.decode_s
    print(f"{'one, beside a prompt of 1024 tokens':44} {rate:9.1f} {beside.prefill_s:14.2f}")
    usage = await long
    print(f"{'the prompt of 1024 tokens beside it':44} {1024 / usage.prefill_s:9.1f} {usage.prefill_s:14.2f}")


async def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32
    start = time.monotonic()
    client = await EngineClient.start(EngineSettings(path))
    print(f"{path.name}: loaded in {time.monotonic() - start:.1f} s")
    try:
        await measure(client, count)
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())

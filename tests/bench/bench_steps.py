"""Step times of the reference executor: padded, as it runs, and unpadded, which gives up bit identity.

    .venv/bin/python tests/bench/bench_steps.py MODEL.gguf [--repeat N] [--context N]

Every time is the best of N, padded and unpadded taken in turn, since other processes slow both. `decode 4` is one step of four
sequences; `4 x decode 1` is four unpadded steps of one sequence each: the same work without a batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from quadjet.engine.backend import PAGE_TOKENS, SequenceRows, StepPlan, TokenSampling
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.reference import ReferenceBackend

SEQUENCES = 4
ROWS = (1, 4, 12, 16, 64)


def plan(num_rows: int, num_sequences: int, context: int, num_sampled: int | None = None) -> StepPlan:
    """`num_rows` rows dealt over sequences that hold `context` tokens each. Each decodes and verifies drafts, or prefills."""
    count = num_rows // num_sequences
    pages_each = -(-(context + max(ROWS)) // PAGE_TOKENS)
    sequences = []
    for index in range(num_sequences):
        tokens = np.arange(count, dtype=np.int32)
        used = -(-(context + count) // PAGE_TOKENS)
        page_ids = np.arange(index * pages_each, index * pages_each + used, dtype=np.int32)
        sequences.append(SequenceRows(context, tokens, page_ids, count if num_sampled is None else num_sampled, TokenSampling()))
    return StepPlan(tuple(sequences))


def best(backends: list[ReferenceBackend], step: StepPlan, repeat: int) -> list[float]:
    """Milliseconds of each backend's fastest step."""
    times = [float("inf")] * len(backends)
    for _ in range(repeat):
        for index, backend in enumerate(backends):
            began = time.perf_counter()
            backend.step(step)
            times[index] = min(times[index], 1000 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--context", type=int, default=256, help="tokens that each sequence already has")
    options = parser.parse_args()
    pages = SEQUENCES * -(-(options.context + max(ROWS)) // PAGE_TOKENS)
    with GgufFile.open(options.model) as file:
        began = time.perf_counter()
        padded = ReferenceBackend(file, num_pages=pages)
        print(f"{options.model.name}: loaded in {time.perf_counter() - began:.1f} s; context {options.context}")
        unpadded = ReferenceBackend(file, num_pages=pages, is_padded=False)
    print(f"\n| step | padded ms | unpadded ms | padded / unpadded |\n|{'---|' * 4}")
    times: dict[str, list[float]] = {}
    for rows in ROWS:
        is_prefill = rows == max(ROWS)
        name = f"prefill {rows}" if is_prefill else f"decode {rows}"
        step = plan(rows, 1 if is_prefill or rows < SEQUENCES else SEQUENCES, options.context, 1 if is_prefill else None)
        times[name] = best([padded, unpadded], step, options.repeat)
        print(f"| {name} | {times[name][0]:.0f} | {times[name][1]:.0f} | {times[name][0] / times[name][1]:.2f} |")
    one, twelve, four = times["decode 1"], times["decode 12"], times["decode 4"]
    print(f"\n12 rows padded / 1 row padded: {twelve[0] / one[0]:.2f} (at most 1.2)")
    print(f"4 x decode 1 unpadded / decode 4 padded: {4 * one[1] / four[0]:.2f} (at least 1.25)")
    print(f"prefill: {1000 * max(ROWS) / times[f'prefill {max(ROWS)}'][0]:.0f} tokens/s")


if __name__ == "__main__":
    main()

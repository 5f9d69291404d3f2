"""Print a digest of one sequence's logits for each of several ways to cut it. Run by test_reference under other BLAS settings."""

import hashlib
import sys
from pathlib import Path

import numpy as np
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.reference import ReferenceBackend

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference_runs import run, run_side_by_side, some_tokens

with GgufFile.open(Path(sys.argv[1])) as file:
    backend = ReferenceBackend(file, num_pages=16, max_rows=256)
tokens = some_tokens(140, backend.vocab_size, seed=3)
beside = [
    (some_tokens(100 + seed, backend.vocab_size, seed), np.arange(4 * seed, 4 * seed + 4, dtype=np.int32), 21) for seed in (1, 2)
]
runs = [run(backend, tokens, chunk) for chunk in (1, 16, 64, 140)]
runs.append(run_side_by_side(backend, [*beside, (tokens, np.array([0, 3, 1, 2], np.int32), 9)])[2])
for logits in runs:
    print(hashlib.sha256(logits.tobytes()).hexdigest())

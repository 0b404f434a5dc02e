"""A worker's backend over an arena that may be there already: prints what the check of its records found and the digest of its logits.

Started twice by test_arena_check.py; between the two runs records are damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny" / "checkpoint"
CHECK_WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shm-dir", required=True)
    parser.add_argument("--admission", required=True, choices=("in_step", "between_steps"))
    args = parser.parse_args()
    settings = GpuWorkerSettings.load(
        {},
        mode="exact",
        shm_dir=args.shm_dir,
        warm_up=False,
        ec_max_slots=24,
        ec_admission=args.admission,
        cache_tokens=8192,
        context_tokens=2048,
    )
    backend = loader.load(settings, Checkpoint(MODEL), lambda _fraction, _what: None, "test")
    try:
        deadline = time.monotonic() + CHECK_WAIT_S
        # Passes and repairs at the same time; what these passes compute from bad records nobody reads.
        while backend.check is not None and not (backend.check.done or backend.check.lost) and time.monotonic() < deadline:
            stream = backend.open_stream()
            backend.prefill(stream, list(range(20, 120)), all_logits=False)
            for token in range(8):
                backend.decode([stream], [token + 30])
            backend.close_stream(stream)
        stream, digest = backend.open_stream(), hashlib.sha256()
        digest.update(backend.prefill(stream, list(range(10, 310)), all_logits=False).tobytes())
        for token in range(40):
            digest.update(backend.decode([stream], [token + 50]).tobytes())
        backend.close_stream(stream)
        verified, stats = vars(backend.verify()), backend.stats()
        found = {"check": stats.get("arena_check"), "verify": verified, "checksum_failures": stats["checksum_failures"]}
        json.dump({"arena": backend.info.arena, **found, "logits": digest.hexdigest()}, sys.stdout)
    finally:
        backend.close()


if __name__ == "__main__":
    main()

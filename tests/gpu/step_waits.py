"""Runs decode steps of the shipped checkpoint and prints, for each, which driver calls made the host wait.

Started by test_waits.py with the counter preloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.backend_info import gpu_info
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from tests.gpu.early_passes import SLOTS
from tests.gpu.shipped_model import backend_of, shipped
from tests.support.cuda_waits import Waits

WARM, STEPS = 48, 24


def measure(backend: Exl3Backend, waits: Waits, streams: int) -> list[dict[str, Any]]:
    """Counts of each steady step."""
    opened = [backend.open_stream() for _ in range(streams)]
    for i, stream in enumerate(opened):
        backend.prefill(stream, list(range(20 + i, 40 + i)), all_logits=False)
    rows = []
    for step in range(WARM + STEPS):
        tokens = [50 + (7 * step + i) % 1000 for i in range(streams)]
        waits.open()
        backend.decode(opened, tokens)
        counted = waits.close()
        if step >= WARM:
            rows.append({"streams": streams, "step": step, **counted, "calls": waits.calls()})
    for stream in opened:
        backend.close_stream(stream)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-demand", action="store_true", help="misses are copied within the step")
    parser.add_argument("--hints", type=int, default=0, help="records of a layer that a guess of its picks brings ahead")
    args = parser.parse_args()
    waits = Waits()
    with shipped("waits", cache_tokens=8192, max_streams=4, chunk=2048) as model:
        pager = PagerPolicy(hint_records=args.hints)
        options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=args.on_demand, pager=pager)
        num_slots = round((SLOTS if args.hints else 1 / 6) * model.num_records)
        info = gpu_info(model.checkpoint.config.vocab_size, 1024, 4, 2048)
        with backend_of(model, num_slots, options, info) as backend:
            rows = [row for streams in (1, 2, 4) for row in measure(backend, waits, streams)]
            hints = backend.stats().get("hint_records_started", 0)
    print(json.dumps({"hooked": waits.hooked, "hints": hints, "rows": rows}))  # noqa: T201 - this is what the test reads
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Decodes the shipped checkpoint with misses copied by the copy engine and with misses gathered; prints whether all bits are the same.

Started by test_gather.py in a process of its own: it keeps VRAM.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.backend_info import gpu_info
from bench.gpu_exact_script import same_bits
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.exl3 import copy_way, fast_setup
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.fast import FastSetup
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from tests.gpu.early_passes import decode
from tests.gpu.shipped_model import Shipped, backend_of, shipped

STREAMS = (1, 4)
SLOTS = 1 / 4  # of the experts: every step misses some
HINTS = 2
WAYS: tuple[copy_way.Asked, ...] = ("engine", "gather", "auto")


def compare(model: Shipped, mode: str, streams: int, hint_records: int) -> dict[str, Any]:
    """One way to decode, over each way to copy."""
    info = gpu_info(model.checkpoint.config.vocab_size, 1024, max(STREAMS), 2048, "fast" if mode == "fast" else "exact")
    sides, row = {}, {"mode": mode, "streams": streams, "hints": hint_records}
    for copy in WAYS:
        options = ExpertOptions(
            PlacementOptions(admit_after=1),
            on_demand=mode == "in_step",
            pager=PagerPolicy(hint_records=hint_records),
            copy=copy,
            fast=FastSetup(None) if mode == "fast" else None,
        )
        with backend_of(model, round(SLOTS * model.num_records), options, info) as backend:
            sides[copy] = decode(backend, streams, None)
            stats, verified = backend.stats(), backend.verify()
        kept = ("copy_way", "copy_reason", "copy_engine_gb_s", "copy_gather_gb_s", "bytes_copied", "admissions", "records_in_transit")
        row[copy] = {name: stats[name] for name in kept if name in stats}
        row[copy]["bad"] = verified.records_bad + verified.slots_bad
        row[copy]["equal"] = sum(same_bits(a, b) for a, b in zip(sides["engine"], sides[copy], strict=True))
    return row | {"passes": len(sides["engine"]), "stride": model.loaded.records.stride}


def main() -> None:
    with shipped("gather", cache_tokens=8192, max_streams=max(STREAMS), chunk=2048) as model:
        no_fast = fast_setup.problem(model.shapes, "fast")
        modes = ["in_step", *([] if no_fast else ["fast"])]
        rows = [compare(model, mode, streams, hints) for mode in modes for streams in STREAMS for hints in (0, HINTS)]
    print(json.dumps({"rows": rows, "no_fast": no_fast, "no_gather": copy_way.why_not()}))  # noqa: T201 - this is what the test reads
    sys.stdout.flush()


if __name__ == "__main__":
    main()

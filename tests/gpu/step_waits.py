"""Runs decode steps of the shipped checkpoint and prints, for each, which driver calls made the host wait.

Started by test_waits.py with the counter preloaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kernels.python.arena import Arena
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import triton_tuners, upstream
from services.gpu_worker.patches.replace import Replacements
from tests.support.cuda_waits import Waits

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny" / "checkpoint"
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
    args = parser.parse_args()
    waits = Waits()
    upstream.check()
    # Late, as exllamav3 imports them. Timing every configuration takes over a minute, and what is counted here is the same with the first.
    from triton.runtime.autotuner import Autotuner

    importlib.import_module(upstream.TUNED)
    triton_tuners.use_first_configurations(triton_tuners.find(Autotuner))
    checkpoint = Checkpoint(MODEL)
    shapes = cpu_arena.expert_shapes(checkpoint)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="glm53-waits-") as folder:
        arena = Arena.create(f"{folder}/arena", shapes, checkpoint.config.n_routed_experts, checkpoint.hash)
        arena_fill.fill(checkpoint, shapes, arena, lambda _fraction, _words: None)
        arena.seal()
        loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=8192, max_streams=4, chunk=2048)
        options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=args.on_demand)
        store = loader.make_store(loaded, loaded.records.num_records // 6, checkpoint.config.num_experts_per_tok, options)
        store.place(loader.spread(loaded.records.num_records // 6, loaded.records.num_records))
        vocab = checkpoint.config.vocab_size
        info = BackendInfo(vocab, 1024, 4, "cuda", "", "exact", "", "", "", 0, 0, "", chunk_size=2048, page_tokens=PAGE_TOKENS)
        backend = Exl3Backend(loaded.model, loaded.cache, store, loaded.records, Replacements(), info)
        rows = [row for streams in (1, 2, 4) for row in measure(backend, waits, streams)]
        torch.cuda.synchronize()
    print(json.dumps({"hooked": waits.hooked, "rows": rows}))  # noqa: T201 - this is what the test reads
    sys.stdout.flush()


if __name__ == "__main__":
    main()

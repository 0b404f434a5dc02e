"""Decodes and prefills the shipped checkpoint with slots that are lent to every prefill, and without; prints whether all bits are the same.

Started by test_slot_memory.py in a process of its own: it keeps VRAM and settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bench.gpu_exact_script import same_bits
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3 import fast_setup, lending, loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.fast import FastSetup
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.backends.exl3.slots import ActivationNeed, ElasticSlots
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches.replace import Replacements
from services.gpu_worker.settings import GpuWorkerSettings
from tests.gpu.shipped_model import shipped

MIB = 1 << 20
CHUNK, STEPS = 512, 10
ALL = 1 << 40


def script(backend: Exl3Backend, usable: list[int]) -> Iterator[torch.Tensor]:
    """Logits of every pass: prompts and decode steps in turn, one stream and then two."""

    def prefill(stream: Any, seed: int, rows: int) -> torch.Tensor:
        ids = torch.randint(10, 2000, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
        logits = torch.from_numpy(backend.prefill(stream, ids, all_logits=False).copy())
        usable.append(backend.experts.placement.usable)
        report = backend.verify()
        assert (report.records_bad, report.slots_bad) == (0, 0)
        return logits

    def decode(streams: list[Any], rows: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            rows = torch.from_numpy(backend.decode(streams, [int(row.argmax()) for row in rows]).copy())
            usable.append(backend.experts.placement.usable)
            yield rows

    streams = [backend.open_stream()]
    yield prefill(streams[0], 1, CHUNK)
    yield (first := prefill(streams[0], 2, CHUNK))
    yield from decode(streams, first)
    streams.append(backend.open_stream())
    yield (second := prefill(streams[1], 3, CHUNK))
    yield from decode(streams, torch.cat([first, second]))
    streams.append(backend.open_stream())
    yield (third := prefill(streams[2], 4, PAGE_TOKENS))
    yield from decode(streams[2:], third)
    for stream in streams:
        backend.close_stream(stream)
    backend.check_idle()


def run(loaded: loader.Loaded, checkpoint: Checkpoint, options: ExpertOptions, slots: ElasticSlots | int) -> dict[str, Any]:
    """Logits of the script, and what became of the slots."""
    num_slots = slots if isinstance(slots, int) else len(slots.tensor)
    info = BackendInfo(checkpoint.config.vocab_size, 2048, 4, "cuda", "", "exact", "", "", "", 0, 0, "", chunk_size=CHUNK)
    usable: list[int] = []
    with Replacements() as into:
        elastic = None if isinstance(slots, int) else slots
        store = loader.make_store(loaded, num_slots, checkpoint.config.num_experts_per_tok, options, into, elastic)
        try:
            needs: dict[int, int] = {}
            if elastic is not None:
                needs = lending.measure(loaded.model, loaded.cache, CHUNK, 2048, store.begin_prefill).known
                elastic.need = ActivationNeed({1: 0, 8: 0, 9: ALL})
            store.place(loader.spread(num_slots, loaded.records.num_records))
            backend = Exl3Backend(loaded.model, loaded.cache, store, loaded.records, Replacements(), info)
            logits = list(script(backend, usable))
            stats = store.stats()
        finally:
            torch.cuda.synchronize()
            store.close()
    return {"logits": logits, "usable": usable, "stats": stats, "needs": needs, "slots": num_slots}


def compare(loaded: loader.Loaded, checkpoint: Checkpoint, mode: str) -> dict[str, Any]:
    """One way to decode, without lending and with it."""
    records = loaded.records
    num_slots = records.num_records * 5 // 6
    sides = []
    for lent in (False, True):
        fast = FastSetup(None) if mode == "fast" else None
        options = ExpertOptions(PlacementOptions(admit_after=1), on_demand=mode == "in_step", stage_min_rows=9, fast=fast)
        slots: ElasticSlots | int = num_slots
        if lent:
            most = num_slots * records.stride * 5 // 8
            slots = lending.make(num_slots, records.stride, loader.DEVICE, most=most, reserve=64 * MIB, chunk_bytes=MIB)
        sides.append(run(loaded, checkpoint, options, slots))
    plain, lending_side = sides
    equal = [same_bits(a, b) for a, b in zip(plain["logits"], lending_side["logits"], strict=True)]
    counters = {name: lending_side["stats"][name] for name in ("slot_lendings", "slot_bytes_lent", "slots_used", "staged_passes")}
    return {
        "passes": len(equal),
        "equal": sum(equal),
        "plain_usable": plain["usable"],
        **{name: lending_side[name] for name in ("usable", "needs", "slots")},
        **counters,
    }


def start(checkpoint: Checkpoint, shm_dir: str, stride: int) -> dict[str, Any]:
    """A start that finds room for the reserve and a hundred experts, and a prompt and an answer after it."""
    settings = GpuWorkerSettings.load(
        {},
        mode="exact",
        shm_dir=shm_dir,
        warm_up=False,
        cache_tokens=8192,
        context_tokens=2048,
        chunk_size=CHUNK,
        max_streams=4,
        ec_elastic_gb=10.0,
    )
    reserve = int(settings.ec_reserve_gb * (1 << 30))
    with mock.patch.object(loader, "free_bytes", return_value=reserve + 100 * stride):
        backend = loader.load(settings, checkpoint, lambda _fraction, _what: None, "test")
    try:
        list(script(backend, []))
        return dict(backend.stats())
    finally:
        backend.close()


def main() -> None:
    with shipped("lent", cache_tokens=8192, max_streams=4, chunk=CHUNK) as model:
        loaded, checkpoint, shapes = model.loaded, model.checkpoint, model.shapes
        # The first pass of a shape chooses kernels.
        run(loaded, checkpoint, ExpertOptions(stage_min_rows=9), loaded.records.num_records // 2)
        modes = ["between_steps", "in_step", *([] if fast_setup.problem(shapes, "fast") else ["fast"])]
        result = {mode: compare(loaded, checkpoint, mode) for mode in modes}
        started = start(checkpoint, model.folder, loaded.records.stride)
    print(json.dumps({"modes": result, "started": started, "no_fast": fast_setup.problem(shapes, "fast")}))  # noqa: T201 - this is what the test reads
    sys.stdout.flush()


if __name__ == "__main__":
    main()

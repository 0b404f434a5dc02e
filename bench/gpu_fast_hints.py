"""Hints on the full-shape slice: `fast` and `exact` with guesses of several qualities beside the same without, all in one process.

The early router runs as it does when it serves; what it would have found on a trained model comes from the trace (bench/slice_hints.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench import fast_figures, routing_trace, slice_hints, slice_ours
from bench.fast_fidelity import Setting
from bench.gpu_fast import Results
from bench.gpu_fast_parts import EXPECTED_MS, SHM, Measured, first_steps, lanes, load_slice, prepare
from bench.gpu_fast_rig import GpuRig, LaneProcess
from services.gpu_worker.backends.exl3.backend import Exl3Backend

STEPS = 80  # measured, and as many before: there are many rows
SEED = 1
COUNTERS = ("named", "started", "used", "late", "dropped")


def settings_of_hints(threads: int) -> list[Measured]:
    """What is measured, the most valuable first; without hints and with them next to each other.

    Args:
        threads: of cpu_expert.
    """
    share, facts = routing_trace.SLOT_SHARE, {"threads": threads}
    fast = Setting(fast_figures.NO_HINTS, slots=share, placed=share, facts=facts)
    exact = dataclasses.replace(fast, name=fast_figures.EXACT_NO_HINTS, fast=False, lane=False, facts={})

    def hinted(base: Setting, name: str, recall: float, records: int = 3) -> Setting:
        return dataclasses.replace(base, name=name, hint_records=records, hint_recall=recall)

    return [
        Measured(fast, (1, 4)),
        Measured(hinted(fast, fast_figures.HINTS, slice_hints.MEASURED), (1, 4)),
        Measured(exact, (1, 4)),
        Measured(hinted(exact, fast_figures.EXACT_HINTS, slice_hints.MEASURED), (1, 4)),
        # What is to be told apart is no more than what one row differs from the next by.
        Measured(hinted(fast, fast_figures.HINTS + fast_figures.AGAIN, slice_hints.MEASURED), (1,)),
        Measured(dataclasses.replace(fast, name=fast_figures.NO_HINTS + fast_figures.AGAIN), (1,)),
        Measured(hinted(fast, fast_figures.TWO_HINTS, slice_hints.MEASURED, records=2), (1,)),
        Measured(hinted(fast, fast_figures.PERFECT_HINTS, slice_hints.PERFECT), (1, 4)),
        Measured(hinted(fast, fast_figures.HALF_HINTS, slice_hints.HALF), (1, 4)),
        Measured(hinted(exact, fast_figures.EXACT_PERFECT_HINTS, slice_hints.PERFECT), (1,)),
        Measured(hinted(exact, fast_figures.EXACT_HALF_HINTS, slice_hints.HALF), (1,)),
    ]


def key_of(setting: Setting, streams: int) -> dict[str, Any]:
    """A row's names."""
    return {"part": fast_figures.HINT_PART, "name": setting.name, "streams": streams}


def expected_s(streams: int, steps: int) -> float:
    """Seconds that a row should take."""
    return 1.5 + steps * EXPECTED_MS[streams] / 1000


def hints_on_gpu(args: argparse.Namespace, results: Results, deadline: float) -> None:
    """Every row that is not there yet, as far as time allows."""
    settings = settings_of_hints(args.threads)
    if all(results.done(**key_of(one.setting, n)) for one in settings for n in one.streams):
        print("hints: everything is measured", flush=True)
        return
    prepare(results)
    loaded, checkpoint = load_slice(args.layers)
    depths = slice_ours.depths_of(args.layers)
    times = argparse.Namespace(warm=min(args.warm, STEPS), steps=min(args.steps, STEPS))
    trace = routing_trace.make(0, times.warm + times.steps, streams=8, depths=depths)
    routing = slice_ours.ForcedRouting(loaded, trace)
    lane = LaneProcess("slice", SHM, args.threads)
    rig = GpuRig(loaded, routing_trace.TOP_K, checkpoint.config.vocab_size, "slice", lane, deadline, SHM)
    results.kept.note(record_bytes=loaded.records.stride, layers=args.layers)
    try:
        print(f"first steps: {first_steps(rig, routing):.1f} s", flush=True)
        for one in sorted(settings, key=lambda one: any(results.failed(**key_of(one.setting, n)) for n in one.streams)):
            todo = [n for n in one.streams if not results.done(**key_of(one.setting, n))]
            fits = [n for n in todo if rig.fits(expected_s(n, times.warm + times.steps))]
            for streams in (n for n in todo if n not in fits):
                results.leave_out(fast_figures.key_of(key_of(one.setting, streams)))
            if fits:
                with results.trying(*(key_of(one.setting, n) for n in fits)), rig.backend(one.setting) as backend:
                    for streams in fits:
                        row = measure(backend, routing, trace, depths, one.setting, streams, times, deadline)
                        results.add(**key_of(one.setting, streams), **row)
    finally:
        lane.close()


def measure(
    backend: Exl3Backend,
    routing: slice_ours.ForcedRouting,
    trace: Any,
    depths: tuple[int, ...],
    setting: Setting,
    streams: int,
    times: argparse.Namespace,
    deadline: float,
) -> dict[str, Any]:
    """One row: times, counters of the measured steps, and how good the hints were on what was in no slot in the second half of the warm-up.

    Args:
        trace: that `routing` forces, [tokens, streams, layers, 8].
        depths: of its layers.
        times: warm and steps.
    """
    pager: Any = backend.experts._on_demand
    before: dict[int, Callable[[], None]] = {}
    quality: slice_hints.Quality | None = None
    early = pager._early
    if setting.hint_records:
        hints = slice_hints.make(trace, setting.hint_recall, SEED, depths)
        quality = slice_hints.Quality(trace, hints, streams)
        on_device = torch.from_numpy(hints).to(backend.experts._table.device)
        backend.experts.hint_from(slice_hints.Simulated(early, lambda: routing.step, on_device, streams))
        look = quality.look
        before = {step: lambda step=step: look(step, pager.where()) for step in range(times.warm // 2, times.warm)}  # type: ignore[misc]
    counted: dict[str, Any] = {}
    before[times.warm] = lambda: counted.update(backend.stats())
    try:
        row = slice_ours.decode(backend, routing, streams, times.warm, times.steps, deadline, before=before)
    finally:
        if setting.hint_records:
            backend.experts.hint_from(early)
    if not row["steps"]:
        return {**row, "error": "the time was over before the first measured step"}
    after = backend.stats()
    row |= setting.facts
    if setting.fast:
        row |= lanes(counted, after)
    if quality is not None:
        row |= quality.row() | hint_counts(counted, after, row["steps"]) | {"hint_records": setting.hint_records}
        if not row["hint_named_per_step"]:
            row["error"] = "no hint named a record that is in no slot"
    return row


def hint_counts(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """Records of hints in a decode step, and what share of those brought ahead was picked, and had landed by then."""
    counts = {name: after[f"hint_records_{name}"] - before[f"hint_records_{name}"] for name in COUNTERS}
    row: dict[str, Any] = {f"hint_{name}_per_step": round(count / steps, 2) for name, count in counts.items()}
    row["hint_mib_per_step"] = round((after["hint_bytes_copied"] - before["hint_bytes_copied"]) / steps / 2**20, 1)
    ended = counts["used"] + counts["late"] + counts["dropped"]
    row["hint_picked_share"] = round((counts["used"] + counts["late"]) / ended, 3) if ended else None
    row["hint_landed_share"] = round(counts["used"] / ended, 3) if ended else None
    return row

"""The dry run of `bench.gpu_fast`: made-up logits and times through everything that needs no GPU. None of its figures mean anything."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import fast_figures
from bench.fast_fidelity import Run, Setting
from bench.round_trip import bounds

VOCAB = 32


class DryRig:
    """Logits that depend on prompt, step and mode alone."""

    def __init__(self, deadline: float = float("inf")) -> None:
        self._deadline = deadline

    def time_left(self) -> bool:
        """As the GPU's rig."""
        return time.monotonic() < self._deadline

    def forced(self, setting: Setting, groups: list[list[list[int]]], continuations: Any, steps: int) -> tuple[Run, Any]:
        """As the GPU's rig."""
        logits: list[Any] = []
        prompts: list[int] = []
        fed: list[list[list[int]]] = []
        number = 0
        for index, group in enumerate(groups):
            tokens: list[list[int]] = [[] for _ in group]
            for step in range(steps):
                for stream in range(len(group)):
                    row = noise(number + stream, step) + np.float32(setting.noise) * noise(setting.seed, 9, step)
                    row += np.float32(1e-3 if setting.fast else 0.0) * noise(7, step)
                    logits.append(row)
                    prompts.append(number + stream)
                    tokens[stream].append(int(row.argmax()) if continuations is None else continuations[index][stream][step])
            fed.append(tokens)
            number += len(group)
        return Run(logits, prompts, {"restarts": setting.restarts}), fed

    def stock_error(self, group: list[list[int]]) -> dict[str, Any]:
        """Made up."""
        return {"stock": 1e-3, "ours": 4e-5, "entries": len(group)}


def hints(results: Any) -> None:
    """Rows of the hints part's shape."""
    exact = {fast_figures.EXACT_NO_HINTS: 10.0, fast_figures.EXACT_HINTS: 9.0, fast_figures.EXACT_HALF_HINTS: 9.5}
    ours = {fast_figures.NO_HINTS: 7.0, fast_figures.HINTS: 6.5, fast_figures.HALF_HINTS: 7.0, fast_figures.PERFECT_HINTS: 6.0}
    more = {fast_figures.TWO_HINTS: 6.6, fast_figures.EXACT_PERFECT_HINTS: 8.0}
    more |= {fast_figures.HINTS + fast_figures.AGAIN: 6.3, fast_figures.NO_HINTS + fast_figures.AGAIN: 7.4}
    for streams, names in ((1, exact | ours | more), (4, ours)):
        for name, ms in names.items():
            row: dict[str, Any] = {"part": fast_figures.HINT_PART, "name": name, "streams": streams}
            if not results.done(**row):
                good = {"hint_recall_on_misses": 0.55, "hint_precision_on_misses": 0.43} if "no hints" not in name else {}
                results.add(**row, ms=ms * streams, tok_s=1000 / ms, **good)


def noise(*seed: int) -> NDArray[np.float32]:
    """A row of it."""
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def speed(results: Any) -> None:
    """Rows of the speed part's shape."""
    results.kept.note(link_gb_s=51.5, link_half_gb_s=25.7, dram_gb_s=130.0, record_bytes=9_474_048)
    settings = (("exact in step", 10.0), ("exact between steps", 11.0), ("fast without the lane", 9.0), (fast_figures.FAST, 7.0))
    for derate in (1, 2):
        for streams in (1, 2, 4) if derate == 1 else (1,):
            for name, ms in settings:
                row: dict[str, Any] = {"part": "speed", "name": name, "streams": streams, "link_derate": derate}
                if results.done(**row):
                    continue
                row |= {"ms": ms * derate, "tok_s": 1000 * streams / ms / derate, "ram_extra_gib": 3.0, "vram_peak_mib": 11_000}
                extra = {"step_over_bound": 1.1, "planner_error_pct": 5.0, "planner_steps": 300} if name == fast_figures.FAST else {}
                results.add(**row, **extra)
    more = ((fast_figures.TWO_THREADS, 10.2, 300), (fast_figures.MANY_STEPS, 7.0, 2150))
    for name, ms, steps in more:
        results.add(part="speed", name=name, streams=1, link_derate=1, ms=ms, tok_s=1000 / ms, planner_error_pct=6.0, planner_steps=steps)
    trips = {"spin_p50_us": 1.6, "spin_p99_us": 1.8, "wait_p50_us": 4.0, "wait_p99_us": 5.0, "process_p50_us": 1.7, "process_p99_us": 2.0}
    results.add(part="speed", name=fast_figures.ROUND_TRIP, rounds=2000, **trips, **bounds(trips))
    results.add(part="hidden", name="hidden states: fast", relative_rms=[1e-4, 2e-4])
    results.add(part="idle", name="idle", worker_core_pct=0.5, cpu_expert_core_pct=0.2)

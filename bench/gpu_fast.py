"""`fast` on a GPU: `python -m bench.gpu_fast`. Needs an NVIDIA GPU with exllamav3 1.5.1; `--dry-run` needs neither.

fidelity: forced decode steps of the shipped checkpoint. Every placement of `fast` (all in VRAM, all on the CPU, all read in place, random,
also while cpu_expert is killed) must give the same bits; `fast` against `exact` is compared with exact under noise of stock's own size.
speed: decode of the full-shape slice (bench/gpu_exact_slice.py), `exact` and `fast` in one run, with the link as it is and at half rate.

Rows are written as they come: what a run has measured stays when it is cut off. A run takes about 4 minutes for the first part and, with
12 layers whose arena is there already, 6 for the second; `--seconds` leaves out what would begin later.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import fast_fidelity, report
from bench.fast_fidelity import Run, Setting
from kernels.python.fast_pager import Forced

OUT = report.ROOT / "docs" / "results" / "gpu_fast.json"
TINY = report.ROOT / "models" / "tiny" / "checkpoint"
# Streams of each group of prompts, decoded together; 40 prompts.
GROUPS = (1, 1, 2, 4, 8, 8, 8, 8)
STEPS = 56
NOISE_SEEDS = 8
ROUND_TRIP = "publish to reply"


class Rig(Protocol):
    """What runs decode steps: the GPU (bench/gpu_fast_rig.py), or the dry run's stand-in."""

    def time_left(self) -> bool:
        """False when nothing more should begin."""
        ...

    def forced(self, setting: Any, groups: list[list[list[int]]], continuations: Any, steps: int) -> tuple[Run, Any]:
        """Logits of forced decode steps, and the tokens that were fed."""
        ...

    def stock_error(self, group: list[list[int]]) -> dict[str, float]:
        """Relative RMS of stock's and our experts against fp64."""
        ...


class Results:
    """Rows and summary of the file, written after each row."""

    def __init__(self, out: Path, started: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._out, self._started = out, started

    def add(self, **row: Any) -> None:
        """One measurement."""
        self.rows.append(row)
        print(row, flush=True)
        self.save()

    def save(self) -> None:
        """The file as it stands."""
        with contextlib.redirect_stdout(io.StringIO()):
            report.write_result(self._out, self._started, self.rows, self.summary)


def placements(setting: Any) -> list[Any]:
    """Every placement of `fast`; setting: the class of a setting."""
    return [
        setting("every expert in VRAM", slots=1.0, placed=1.0, forced=Forced.NEVER_LANE, lane=False),
        setting("every pick on the CPU", forced=Forced.ALL_LANE),
        setting("every record read in place", slots=0.0, placed=0.0, forced=Forced.ALL_IN_PLACE, lane=False),
        setting("as the costs say", forced=Forced.BY_COST),
        setting("random", forced=Forced.RANDOM, seed=1),
        setting("random again", forced=Forced.RANDOM, seed=2, slots=0.05, placed=0.0),
        setting("every pick on the CPU, cpu_expert killed", forced=Forced.ALL_LANE, restarts=3),
        setting("random, cpu_expert killed", forced=Forced.RANDOM, seed=3, restarts=3),
    ]


def fidelity(rig: Rig, setting: Any, prompts: list[list[int]], results: Results, steps: int = STEPS) -> None:
    """Placement invariance, and the distance to `exact` beside the noise floor."""
    groups, first = [], 0
    for streams in GROUPS:
        groups.append(prompts[first : first + streams])
        first += streams
    exact, fed = rig.forced(setting("exact", fast=False), groups, None, steps)
    results.add(part="fidelity", name="exact", positions=len(exact.logits), hash=fast_fidelity.digest(exact), **exact.facts)
    again, _ = rig.forced(setting("exact", fast=False), groups, fed, steps)
    results.add(part="fidelity", name="exact again", differing=fast_fidelity.steps_differing(exact, again))
    runs: dict[str, Run] = {}
    for placement in placements(setting):
        if not rig.time_left():
            results.add(part="fidelity", name=placement.name, left_out=True)
            continue
        run, _ = rig.forced(placement, groups, fed, steps)
        runs[placement.name] = run
        reference = next(iter(runs.values()))
        differing = fast_fidelity.steps_differing(reference, run)
        results.add(part="fidelity", name=placement.name, hash=fast_fidelity.digest(run), differing=differing, **run.facts)
    error = rig.stock_error(groups[min(2, len(groups) - 1)])
    results.add(part="fidelity", name="relative RMS against fp64", **error)
    noisy: list[Run] = []
    for seed in range(NOISE_SEEDS):
        if not rig.time_left():
            break
        noisy.append(rig.forced(setting(f"exact, noise {seed}", fast=False, noise=error["stock"], seed=seed), groups, fed, steps)[0])
        values = fast_fidelity.divergences(exact, noisy[-1])
        results.add(part="fidelity", name="noise floor", seed=seed, kl=float(values.mean()), top1=fast_fidelity.agreement(exact, noisy[-1]))
    fast = next(iter(runs.values()))
    results.summary |= fast_fidelity.summary(exact, fast, noisy, runs)
    results.summary |= {"stock_relative_rms": error["stock"], "fast_relative_rms": error["ours"], "noise_seeds": len(noisy)}
    results.save()


def speed_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios from the speed part's rows; None where a row is missing."""
    times = {
        (row["name"], row["streams"], row["link_derate"]): row["tok_s"] for row in rows if row.get("part") == "speed" and "tok_s" in row
    }

    def ratio(streams: int, derate: int = 1) -> float | None:
        fast = times.get(("fast", streams, derate))
        exact = max((v for (name, s, d), v in times.items() if name.startswith("exact") and (s, d) == (streams, derate)), default=None)
        return round(fast / exact, 3) if fast and exact else None

    figures: dict[str, Any] = {f"c{n}_tok_s": times.get(("fast", n, 1)) for n in (1, 2, 4)}
    figures |= {f"c{n}_vs_exact": ratio(n) for n in (1, 2, 4)}
    figures["c1_vs_exact_derated"] = ratio(1, 2)
    one = next((row for row in rows if row.get("name") == "fast" and row.get("streams") == 1 and row.get("link_derate") == 1), {})
    figures |= {name: one.get(name) for name in ("step_over_bound", "planner_error_pct")}
    trip = next((row for row in rows if row.get("name") == ROUND_TRIP), {})
    return figures | {name: trip.get(name) for name in ("publish_to_reply_us", "publish_to_reply_p99_us")}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["fidelity", "speed"], help="one of the two parts")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--layers", type=int, default=12, choices=range(1, 13), help="MoE layers of the slice")
    parser.add_argument("--warm", type=int, default=150, help="decode steps before measuring")
    parser.add_argument("--steps", type=int, default=150, help="measured decode steps")
    parser.add_argument("--threads", type=int, default=14, help="of cpu_expert")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dry-run", action="store_true", help="the whole course with made-up figures, without a GPU")
    args = parser.parse_args()
    args.parts = [args.only] if args.only else ["fidelity", "speed"]
    return args


def run(args: argparse.Namespace, results: Results, deadline: float) -> None:
    if args.dry_run:
        from bench.gpu_fast_dry import DryRig, speed

        results.summary["dry_run"] = True
        if "fidelity" in args.parts:
            prompts = [[int(t) for t in np.random.default_rng(i).integers(10, 100, 5 + i)] for i in range(sum(GROUPS))]
            fidelity(DryRig(), Setting, prompts, results, steps=4)
        if "speed" in args.parts:
            speed(results)
    else:
        from bench import gpu_fast_parts

        if "fidelity" in args.parts:
            gpu_fast_parts.fidelity_on_gpu(args, results, deadline)
        if "speed" in args.parts:
            gpu_fast_parts.speed_on_gpu(args, results, deadline)
    results.summary |= speed_summary(results.rows)


def main() -> None:
    args = parse()
    began = time.monotonic()
    results = Results(args.out, report.start("bench.gpu_fast"))
    try:
        run(args, results, began + args.seconds)
    except Exception:
        results.summary["problem"] = traceback.format_exc().splitlines()[-1]
        traceback.print_exc()
        raise
    finally:
        results.summary["seconds"] = round(time.monotonic() - began, 1)
        report.write_result(args.out, results._started, results.rows, results.summary)
    if results.summary.get("placement_invariant") is False:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

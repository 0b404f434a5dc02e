"""`fast` on a GPU: `python -m bench.gpu_fast`. Needs an NVIDIA GPU with exllamav3 1.5.1; `--dry-run` needs neither.

fidelity: forced decode steps of the shipped checkpoint. Every placement of `fast` (all in VRAM, all on the CPU, all read in place, random,
also while cpu_expert is killed) must give the same bits; `fast` against `exact` is compared with exact under noise of stock's own size.
speed: decode of the full-shape slice (bench/gpu_exact_slice.py), `exact` and `fast` in one run, with the link as it is and at half rate.
hints (asked for alone): the same with records that are brought ahead by guesses of several qualities, beside rows without.

Each row is written as it comes, and a command goes on where an earlier one of the same boot was cut off (--state). Ratios to stock come
from `bench.gpu_exact_slice`'s result file of the same boot, those of the kernel from `bench.gpu_int_kernel`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import fast_fidelity, fast_figures, report
from bench.fast_fidelity import Run, Setting
from bench.kept_rows import Rows
from kernels.python.fast_pager import Forced

OUT = report.ROOT / "docs" / "results" / "gpu_fast.json"
TINY = report.ROOT / "models" / "tiny" / "checkpoint"
# Streams of each group of prompts, decoded together; 40 prompts.
GROUPS = (1, 1, 2, 4, 8, 8, 8, 8)
STEPS = 56
NOISE_SEEDS = 8
MOST_FAILURES = 2
RMS = {"part": "fidelity", "name": fast_figures.RMS}
RESULTS = report.ROOT / "docs" / "results"


class Rig(Protocol):
    """What runs decode steps: the GPU (bench/gpu_fast_rig.py), or the dry run's stand-in."""

    def time_left(self) -> bool:
        """False when nothing more should begin."""
        ...

    def forced(self, setting: Any, groups: list[list[list[int]]], continuations: Any, steps: int) -> tuple[Run, Any]:
        """Logits of forced decode steps, and the tokens that were fed."""
        ...

    def stock_error(self, group: list[list[int]]) -> dict[str, Any]:
        """Relative RMS of stock's and our experts against fp64; with an `error` when that was measured wrongly."""
        ...


class Results:
    """Rows and summary of both parts, written after each row and kept over commands.

    Args:
        out: the result file.
        started: bench.report.start()'s.
        state: what the next command goes on with; None: beside the result file.
        slice_file: bench.gpu_exact_slice's result, for ratios to stock.
        kernel_file: bench.gpu_int_kernel's.
    """

    def __init__(
        self, out: Path, started: dict[str, Any], state: Path | None = None, slice_file: Path | None = None, kernel_file: Path | None = None
    ) -> None:
        self.state = state or out.with_suffix(".rows")
        self._others = fast_figures.Others(slice_file, kernel_file)
        self.kept = Rows(self.state, out, started, self._summarise)
        self.left_out: list[str] = []
        self.errors = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """In the order in which they were first measured."""
        return list(self.kept.rows.values())

    @property
    def summary(self) -> dict[str, Any]:
        """Of the rows so far."""
        return self.kept.summary()

    def _summarise(self, rows: dict[str, dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
        return fast_figures.summarise(list(rows.values()), facts, self._others) | {"left_out": self.left_out}

    def add(self, **row: Any) -> None:
        """One measurement."""
        self.kept.put(fast_figures.key_of(row), row)

    def done(self, **names: Any) -> bool:
        """True when such a row is there."""
        return self.kept.done(fast_figures.key_of(names))

    def row(self, **names: Any) -> dict[str, Any]:
        """A row that is there."""
        return self.kept.rows[fast_figures.key_of(names)]

    def failed(self, **names: Any) -> bool:
        """True when the last try of such a row failed."""
        return "error" in self.kept.rows.get(fast_figures.key_of(names), {})

    @contextlib.contextmanager
    def trying(self, *rows: dict[str, Any]) -> Iterator[None]:
        """An error inside becomes a row: the first of these, by their names, that is not there; the second error of a command ends it."""
        try:
            yield
        except Exception as error:
            self.errors += 1
            traceback.print_exc()
            names = next((names for names in rows if not self.done(**names)), rows[-1])
            self.add(**names, error=f"{type(error).__name__}: {error}")
            if self.errors >= MOST_FAILURES:
                raise

    def quote(self, earlier: Path) -> None:
        """Takes over the fidelity of an earlier result, each row with the boot that it is of: it compares bits, not times.

        A noise floor is taken over only with a measurement of stock's error that would be believed today.
        """
        for row in fast_figures.quotable(earlier):
            if not self.done(**row):
                self.add(**row)

    def leave_out(self, name: str) -> None:
        """Says that there was no time for something."""
        print(f"no time for: {name}", flush=True)
        self.left_out.append(name)

    def save(self) -> None:
        """The file as it stands."""
        self.kept.save()


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
    exact, fed = _exact(rig, setting, groups, results, steps)
    _placements(rig, setting, groups, results, steps, exact, fed)
    if not results.done(**RMS):
        results.add(**RMS, **rig.stock_error(groups[min(2, len(groups) - 1)]))
    if not results.done(**RMS):
        print(f"no noise floor: {results.row(**RMS)['error']}", flush=True)
        return
    stock_rms = results.row(**RMS)["stock"]
    for seed in range(NOISE_SEEDS):
        if results.done(part="fidelity", name="noise floor", seed=seed):
            continue
        if not rig.time_left():
            results.leave_out(f"noise floor, seed {seed}")
            continue
        noisy, _ = rig.forced(setting(f"exact, noise {seed}", fast=False, noise=stock_rms, seed=seed), groups, fed, steps)
        kl = float(fast_fidelity.divergences(exact, noisy).mean())
        results.add(part="fidelity", name="noise floor", seed=seed, kl=kl, top1=fast_fidelity.agreement(exact, noisy))


def _exact(rig: Rig, setting: Any, groups: list[list[list[int]]], results: Results, steps: int) -> tuple[Run, Any]:
    """Logits of `exact` and the tokens that every other run is fed; those of an earlier command where they are still there."""
    kept = results.state.with_name(results.state.name + ".exact.npz")
    if results.done(part="fidelity", name="exact again") and kept.exists():
        return fast_fidelity.load(kept)
    exact, fed = rig.forced(setting("exact", fast=False), groups, None, steps)
    fast_fidelity.save(kept, exact, fed)
    row = {"positions": len(exact.logits), "hash": fast_fidelity.digest(exact), **exact.facts}
    if results.done(part="fidelity", name="exact") and (earlier := results.row(part="fidelity", name="exact")).get("boot_id"):
        row |= {"bits_of_an_earlier_boot": earlier["hash"] == row["hash"], "earlier_boot_id": earlier["boot_id"]}
    results.add(part="fidelity", name="exact", **row)
    if results.done(part="fidelity", name="exact again"):
        return exact, fed
    again, _ = rig.forced(setting("exact", fast=False), groups, fed, steps)
    results.add(part="fidelity", name="exact again", differing=fast_fidelity.steps_differing(exact, again))
    return exact, fed


def _placements(rig: Rig, setting: Any, groups: list[list[list[int]]], results: Results, steps: int, exact: Run, fed: Any) -> None:
    """A hash for every placement; the first one's distance to `exact`."""
    reference: Run | None = None
    every = sorted(placements(setting), key=lambda placement: results.failed(part="fidelity", name=placement.name))
    for placement in every:
        if results.done(part="fidelity", name=placement.name):
            continue
        if not rig.time_left():
            results.leave_out(placement.name)
            continue
        with results.trying({"part": "fidelity", "name": placement.name}):
            run, _ = rig.forced(placement, groups, fed, steps)
            reference = reference or run
            facts = {"differing": fast_fidelity.steps_differing(reference, run), **run.facts}
            results.add(part="fidelity", name=placement.name, placement=True, hash=fast_fidelity.digest(run), **facts)
            if not results.done(part="fidelity", name="fast against exact"):
                results.add(part="fidelity", name="fast against exact", **fast_fidelity.distance(exact, run))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["fidelity", "speed", "hidden", "hints", "stock-error"], help="one part")
    parser.add_argument("--first", action="store_true", help="of speed only what every session must have")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--layers", type=int, default=12, choices=range(1, 13), help="MoE layers of the slice")
    parser.add_argument("--warm", type=int, default=150, help="decode steps before measuring")
    parser.add_argument("--steps", type=int, default=150, help="measured decode steps")
    parser.add_argument("--threads", type=int, default=14, help="of cpu_expert")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--state", type=Path, default=Path("/dev/shm/glm53-fast-rows.json"), help="what a later command goes on with")
    parser.add_argument(
        "--slice", type=Path, default=RESULTS / "gpu_exact_slice.json", help="bench.gpu_exact_slice's result: stock's steps"
    )
    parser.add_argument("--int-kernel", type=Path, default=RESULTS / "gpu_int_kernel.json", help="bench.gpu_int_kernel's result")
    parser.add_argument("--fidelity-from", type=Path, help="an earlier result: rows of its fidelity that are not there yet, with its boot")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the file again")
    parser.add_argument("--dry-run", action="store_true", help="the whole course with made-up figures, without a GPU")
    args = parser.parse_args()
    # On a GPU hints load the slice a second time, into a process of their own.
    args.parts = [args.only] if args.only else ["fidelity", "speed", *(["hints"] if args.dry_run else [])]
    return args


def run(args: argparse.Namespace, results: Results, deadline: float) -> None:
    if args.dry_run:
        from bench.gpu_fast_dry import DryRig, hints, speed

        results.kept.note(dry_run=True)
        if "fidelity" in args.parts:
            prompts = [[int(t) for t in np.random.default_rng(i).integers(10, 100, 5 + i)] for i in range(sum(GROUPS))]
            fidelity(DryRig(deadline), Setting, prompts, results, steps=4)
        if "speed" in args.parts or "hidden" in args.parts:
            speed(results)
        if "hints" in args.parts:
            hints(results)
    else:
        from bench import gpu_fast_hints, gpu_fast_parts

        if "stock-error" in args.parts:
            gpu_fast_parts.stock_error_on_gpu(args, results, deadline)
        if "fidelity" in args.parts:
            gpu_fast_parts.fidelity_on_gpu(args, results, deadline)
        if "speed" in args.parts or "hidden" in args.parts:
            gpu_fast_parts.speed_on_gpu(args, results, deadline)
        if "hints" in args.parts:
            gpu_fast_hints.hints_on_gpu(args, results, deadline)


def main() -> None:
    args = parse()
    began = time.monotonic()
    started = report.start("bench.gpu_fast")
    results = Results(args.out, started, args.state, args.slice, args.int_kernel)
    problem: dict[str, Any] = {}
    if args.fidelity_from is not None:
        results.quote(args.fidelity_from)
    try:
        if not args.report:
            run(args, results, began + args.seconds)
    except Exception:
        problem["problem"] = traceback.format_exc().splitlines()[-1]
        traceback.print_exc()
        raise
    finally:
        results.kept.note(**{f"seconds_{args.only or 'both'}": round(time.monotonic() - began, 1)})
        report.write_result(args.out, {**started, "facts": results.kept.facts}, results.rows, results.summary | problem)
    if results.summary["placement_invariant"] is False:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

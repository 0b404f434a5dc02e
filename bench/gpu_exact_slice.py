"""A full-shape slice of GLM-5.3-Flash in `exact`, and stock exllamav3 1.5.1 beside it: `python -m bench.gpu_exact_slice COMMAND`.

Real widths and record sizes, random EXL3 bits, routing forced from a trace (bench/routing_trace.py) on both sides. Commands, each of its
own process, each going on where an earlier one was cut off (rows of one boot are kept in --state):

    prepare         the checkpoint, experts and all, into --folder (34 GB for 12 layers, in memory)
    ours            the arena filled from it, then decode and prefill of every placement
    stock           stock's CPU split at the same VRAM, the most popular experts placed in it
    stock_resident  stock with every expert in VRAM
    start           a worker's start, and a second one that finds the arena and Triton's choices
    all             these five
    report          the result file again, from the rows
    clean           takes everything out of memory

`--dry-run` goes the whole way without a GPU, with a stand-in for the loaded model. docs/measuring-on-a-gpu.md has the commands for a
machine that is rented by the minute.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, routing_trace, slice_cases, slice_checkpoint, slice_ours, slice_start, slice_traces
from bench.kept_rows import Row, Rows
from bench.slice_cases import MODES
from bench.slice_dry import DryEngine, dry_start
from bench.slice_ours import SHM, depths_of
from kernels.python import segments
from services.gpu_worker.patches import triton_tuners, upstream

INSTANCES = ("slice", "gpu-fast", "gpu-exact")  # of this bench and its neighbours
PINS = "triton_pins.json"  # beside the result file: what Triton chose
COMMANDS = ("prepare", "ours", "stock", "stock_resident", "start")


def make_engine(side: str, args: argparse.Namespace, trace: np.ndarray, deadline: float) -> slice_cases.Engine:
    """The loaded side, or its stand-in."""
    if args.dry_run:
        return DryEngine(side, args.layers, trace, args.steps)
    prepare_exllamav3(args)
    if side == "ours":
        return slice_ours.OurEngine(args, trace, deadline)
    from bench.slice_stock import StockEngine

    return StockEngine(side, args, trace, deadline)


def prepare_exllamav3(args: argparse.Namespace) -> None:
    """Imports it; its Triton kernels take their first configuration unless --tune: timing all takes over a minute, on both sides alike."""
    upstream.check()
    args.tuners = tune_or_pin(args.tune)


def tune_or_pin(tune: bool) -> dict[str, int]:
    """Imports exllamav3, of whatever version; how many autotuned kernels it has, and how many take their first configuration."""
    import exllamav3  # noqa: F401 - its kernels are looked for below
    from triton.runtime.autotuner import Autotuner

    importlib.import_module(upstream.TUNED)
    tuners = triton_tuners.find(Autotuner)
    return {"found": len(tuners), "pinned": 0 if tune else triton_tuners.use_first_configurations(tuners)}


def save_pins(out: Path) -> None:
    """Writes what Triton chose in this process beside the result file; without --tune it has chosen nothing, and no file is written."""
    from triton.runtime.autotuner import Autotuner

    tuners = triton_tuners.find(Autotuner)
    if any(tuner.cache for tuner in tuners.values()):
        count = triton_tuners.save(out.with_name(PINS), tuners, torch.cuda.get_device_name(0))
        print(f"{count} choices of Triton's kernels are in {PINS}", flush=True)


def measure(command: str, args: argparse.Namespace, rows: Rows, deadline: float) -> None:
    """One command's cases."""
    cases = slice_cases.cases(command, args.warm + args.steps, first=args.first)
    if args.only:
        cases = slice_cases.only(cases, args.only)
    todo = slice_cases.missing(cases, rows)
    if not todo:
        print(f"{command}: everything is measured", flush=True)
        return
    if args.dry_run:
        rows.note(dry_run=True)
    trace = routing_trace.make(args.seed, args.warm + args.steps, streams=8, depths=depths_of(args.layers))
    if command == "ours":
        depths = depths_of(args.layers)
        by_counts = slice_traces.all_rates(args.seed, args.warm + args.steps, args.warm, depths)
        rows.note(layers=args.layers, seed=args.seed, depths=depths, hit_rates=by_counts)
    began = time.monotonic()
    engine = make_engine(command, args, trace, deadline)
    try:
        rows.note(
            **engine.facts(), **{f"{command}_ready_s": round(time.monotonic() - began, 1)}, triton_tuners=getattr(args, "tuners", None)
        )
        skipped = slice_cases.run(todo, {mode.name: mode for mode in MODES}, engine, rows, deadline, check_for(args))
        rows.note(**engine.facts())
    finally:
        if not args.dry_run:
            save_pins(args.out)
        engine.close()
    if skipped:
        print(f"no time for: {', '.join(skipped)}; the same command goes on with them", flush=True)


def check_for(args: argparse.Namespace) -> Callable[[slice_cases.Case, Row], None] | None:
    """Stock's known times are those of twelve layers."""
    return slice_cases.refuse_slow_stock if args.layers == len(routing_trace.SLICE_DEPTHS) and not args.any_stock else None


def prepare(args: argparse.Namespace, rows: Rows) -> None:
    """The slice's files."""
    rows.save()
    if args.dry_run:
        return
    began = time.monotonic()
    if slice_checkpoint.write(args.folder, args.layers):
        rows.note(prepare_s=round(time.monotonic() - began, 1))
        print(f"written after {time.monotonic() - began:.1f} s", flush=True)


def start(args: argparse.Namespace, rows: Rows, deadline: float) -> None:
    """A worker's start on the slice's files."""
    pins = args.out.with_name(PINS)
    words = {"start": dry_start} if args.dry_run else {}
    skipped = slice_start.measure(rows, args.folder, pins, slice_ours.CARD_MIB, deadline, **words)
    if skipped:
        print(f"no time for: {', '.join(skipped)}; the same command goes on with them", flush=True)


def clean(args: argparse.Namespace) -> None:
    """Takes checkpoint, rows, and what this and other benches left in shared memory, away."""
    shutil.rmtree(args.folder, ignore_errors=True)
    left = [name(SHM, instance) for name in (segments.arena_path, segments.ctl_path) for instance in INSTANCES]
    for path in (*map(Path, left), args.state):
        path.unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("command", nargs="?", default="all", choices=(*COMMANDS, "all", "report", "clean", "estimate"))
    made.add_argument("--layers", type=int, default=12, choices=range(1, 13), help="MoE layers")
    made.add_argument("--folder", type=Path, default=Path(SHM) / "glm53-slice")
    made.add_argument("--state", type=Path, default=Path(SHM) / "glm53-slice-rows.json")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--warm", type=int, default=150, help="decode steps before measuring")
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--prefill", type=int, default=8192, help="tokens of the shorter prefill")
    made.add_argument("--context", type=int, default=32_768, help="tokens of the longer prefill, and behind which the @32k cases decode")
    made.add_argument("--admit-after", type=int, default=1)
    made.add_argument("--seconds", type=float, default=3600.0, help="of each command: no case begins that would end later")
    made.add_argument("--first", action="store_true", help="only what every session must have")
    made.add_argument(
        "--only", nargs="+", metavar="MODE/CASE", help="these cases alone, such as in_step/C1 or BEST/drift, of a side's own order"
    )
    made.add_argument("--tune", action="store_true", help="let Triton time its configurations")
    made.add_argument("--any-stock", action="store_true", help="go on when stock is slower than it is known to be")
    made.add_argument("--dry-run", action="store_true", help="no GPU: a stand-in for the model")
    made.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "gpu_exact_slice.json")
    return made


def run_all(argv: list[str], seconds: float) -> None:
    """Every command in a process of its own: what one leaves on the device is gone for the next. Raises SystemExit when one fails."""
    end = time.monotonic() + seconds
    for command in COMMANDS:
        left = max(1.0, end - time.monotonic())
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu_exact_slice", command, *argv, "--seconds", f"{left:.0f}"], cwd=report.ROOT, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{command} ended with {done.returncode}")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    began = time.monotonic()
    if args.command == "estimate":
        for command in COMMANDS:
            print(f"{command:16} {slice_cases.estimate(command, args.warm + args.steps):5.0f} s")
        return
    if args.command == "clean":
        clean(args)
        return
    if args.command == "all":
        run_all([word for word in argv if word != "all"], args.seconds)
        return
    started = report.start("bench.gpu_exact_slice")
    if not args.dry_run and torch.cuda.is_available():
        started["machine"]["gpu"] = torch.cuda.get_device_name(0)
    rows = Rows(args.state, args.out, started, slice_cases.summarise)
    if args.command == "report":
        rows.save()
    elif args.command == "prepare":
        prepare(args, rows)
    elif args.command == "start":
        start(args, rows, began + args.seconds)
    else:
        measure(args.command, args, rows, began + args.seconds)
    print(f"{args.command}: {time.monotonic() - began:.1f} s", flush=True)


def main_and_leave(run: Callable[[], None] = main) -> None:
    """`main`, or another bench's, then out without waiting for anybody's threads and processes: the rows are written."""
    code: Any = 0
    try:
        run()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, flush=True)
            code = 1
    except BaseException:  # noqa: BLE001 - told, and the exit code says so
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


if __name__ == "__main__":
    main_and_leave()

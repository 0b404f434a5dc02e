"""All 42 layers with routed experts of GLM-5.3-Flash's shape, as a card of 24 GB serves them: `python -m bench.gpu_full_size COMMAND`.

Real widths, vocabulary and record sizes, random bits, routing forced from a trace over all depths. No file holds the experts: random
records go straight into the arena, 107 GiB of shared memory. Commands (bench/gpu_full_size.sh runs them in this order):

    grow     touches the memory that the others need, on a machine whose memory comes when it is used
    prepare  everything but the experts, as files in --folder (6 GB, in memory)
    run      arena, pinning, load, and the rows of `exact` and `fast` in one process
    report   the result file again, from the rows
    clean    takes everything out of memory

VRAM is capped as that of a card of 24 GB and 1,376 experts have a slot. Rows with every expert in VRAM come last, on a GPU that has room
for them: they are what a step's bound is made of. Rows are kept (--state) and a command goes on where an earlier one of the same boot was
cut off. `--dry-run` goes the whole way without a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import gpu_check, gpu_exact_slice, gpu_fast_parts, report, routing_trace, slice_cases, slice_checkpoint, slice_machine
from bench.kept_rows import Row, Rows, reasons
from bench.slice_cases import Case, Mode
from bench.slice_dry import DryEngine
from bench.slice_ours import CARD_MIB, SHM
from bench.watch import Watch
from kernels.python import segments

LAYERS, VOCAB = slice_cases.MODEL_LAYERS, 154_880
STREAMS = 4
INSTANCE = "slice"  # names the arena: this bench's takes the place of a slice's
GROW_GIB = 125  # arena, files, and what the processes take
SIDE = "full"
SYSTEM_GIB = {"memory_gib_at_end": "MemTotal", "page_tables_gib_at_end": "PageTables"}
FAST, EXACT, FAST_RESIDENT, EXACT_RESIDENT, PREFILL = "fast", "exact", "fast_resident", "exact_resident", "prefill"
MODES = (
    Mode(FAST, "share", {}),
    Mode(EXACT, "share", {"on_demand": True}),
    Mode(PREFILL, "prefill", {"on_demand": True}),
    Mode(FAST_RESIDENT, "all", {"admit": False}),
    Mode(EXACT_RESIDENT, "all", {"admit": False}),
)
# ms a step, for the estimates: three and a half times those of twelve layers. The most valuable rows first.
_CASES = (
    (FAST, {"C1": 36, "C4": 100}),
    (EXACT, {"C1": 52, "C4": 160}),
    (FAST, {"C2": 60}),
    (PREFILL, {"prefill8k": 0}),
    (FAST_RESIDENT, {"C1": 17, "C2": 22, "C4": 32}),
    (EXACT_RESIDENT, {"C1": 20}),
)
CLOSE_S = 10.0  # behind the deadline the process ends whatever it does; bench/gpu_full_size.sh interrupts it a little later
ENTER_S, PREFILL_S = 3.0, 20.0
# What is quoted, with the rows that it is made of.
NEEDS: dict[str, tuple[str, ...]] = {
    "fast_c1_tok_s": ("fast/C1",),
    "fast_c2_tok_s": ("fast/C2",),
    "fast_c4_tok_s": ("fast/C4",),
    "exact_c1_tok_s": ("exact/C1",),
    "exact_c4_tok_s": ("exact/C4",),
    "c1_fast_vs_exact": ("fast/C1", "exact/C1"),
    "c4_fast_vs_exact": ("fast/C4", "exact/C4"),
    "fast_c1_step_over_bound": ("fast/C1", "fast_resident/C1"),
    "fast_c2_step_over_bound": ("fast/C2", "fast_resident/C2"),
    "fast_c4_step_over_bound": ("fast/C4", "fast_resident/C4"),
    "exact_c1_step_over_bound": ("exact/C1", "exact_resident/C1"),
    "hit_rate": ("fast/C1",),
    "planner_error_pct": ("fast/C1",),
    "prefill8k_tok_s": ("prefill/prefill8k",),
    "ram_total_gib_measured": ("fast/C1",),
    "vram_peak_gib": ("fast/C1",),
}


def cases(steps: int) -> list[Case]:
    """All of them, in the order in which they run.

    Args:
        steps: warm-up and measured ones together.
    """
    return [
        Case(SIDE, mode, what, PREFILL_S if mode == PREFILL else ENTER_S + steps * ms / 1000)
        for mode, rows in _CASES
        for what, ms in rows.items()
    ]


def trace_of(seed: int, tokens: int, layers: int) -> np.ndarray:
    """Picks over the model's depths, uint16 [tokens, STREAMS, layers, 8], made by a process for each processor."""
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        made = [pool.submit(routing_trace.make, seed, tokens, streams=STREAMS, depths=(depth,)) for depth in range(layers)]
        return np.concatenate([one.result() for one in made], axis=2)


class DryFullSize(DryEngine):
    """The slice's stand-in, with what rows of `fast` have besides."""

    def __init__(self, args: argparse.Namespace, trace: np.ndarray) -> None:
        super().__init__("ours", args.layers, trace, args.steps)

    def measure(self, case: Case) -> Row:
        row = super().measure(case)
        return row | ({"planner_error_pct": 2.0, "planner_steps": self._steps, "ct_b_us": 200.0} if case.mode == FAST else {})

    def after(self) -> Row:
        resident = self._mode is not None and self._mode.slots == "all"
        return {"vram_peak_mib": 120_000 if resident else 22_000, "ram_extra_gib": 4.0}

    def facts(self) -> Row:
        facts = super().facts()
        size = self.records * facts["record_bytes"]
        return facts | {"dram_gb_s": 110.0, "arena_bytes": size, "arena_s": 30.0, "arena_gb_s": 4.0, "pin_s": 9.0, "load_s": 20.0}


def make_engine(args: argparse.Namespace, trace: np.ndarray, deadline: float, told: Watch | None) -> slice_cases.Engine:
    """The loaded model, or its stand-in."""
    if args.dry_run:
        return DryFullSize(args, trace)
    from bench.full_size_engine import FullSizeEngine

    gpu_exact_slice.prepare_exllamav3(args)
    return FullSizeEngine(args, trace, deadline, told)


def measure(args: argparse.Namespace, rows: Rows, deadline: float) -> None:
    """Everything that is not there yet and that time allows."""
    todo = slice_cases.missing(cases(args.warm + args.steps), rows)
    if not todo:
        print("everything is measured", flush=True)
        return
    if args.dry_run:
        rows.note(dry_run=True)
    began = time.monotonic()
    trace = trace_of(args.seed, args.warm + args.steps, args.layers)
    rows.note(layers=args.layers, seed=args.seed, warm=args.warm, steps=args.steps, trace_s=round(time.monotonic() - began, 1))
    told = None if args.dry_run else Watch(deadline + CLOSE_S)
    engine = make_engine(args, trace, deadline, told)
    try:
        rows.note(**engine.facts(), ready_s=round(time.monotonic() - began, 1), triton_tuners=getattr(args, "tuners", None))
        skipped = slice_cases.run(todo, {mode.name: mode for mode in MODES}, engine, rows, deadline)
        # Tables of pages are the system's: no process counts them as its own.
        sizes = {name: round(gpu_check.mem_info(line) / 2**30, 2) for name, line in SYSTEM_GIB.items()}
        rows.note(**engine.facts(), **sizes)
    finally:
        if not args.dry_run:
            gpu_exact_slice.save_pins(args.out)
        engine.close()
        if told is not None:
            told.close()
    if skipped:
        print(f"no time for: {', '.join(skipped)}; the same command goes on with them", flush=True)


def summarise(rows: dict[str, Row], facts: Row) -> Row:
    """The figures that are quoted; None, with a reason, for what was not measured."""
    whole = {name.removeprefix(f"{SIDE}/"): row for name, row in rows.items()}
    good = {name: row for name, row in whole.items() if "error" not in row}

    def of(name: str, key: str) -> Any:
        return good.get(name, {}).get(key)

    figures: Row = {"dry_run": True} if facts.get("dry_run") else {}
    figures |= {f"{mode}_c{n}_tok_s": of(f"{mode}/C{n}", "tok_s") for mode, n in ((FAST, 1), (FAST, 2), (FAST, 4), (EXACT, 1), (EXACT, 4))}
    figures |= {f"c{n}_fast_vs_exact": slice_cases.ratio(of(f"{EXACT}/C{n}", "ms"), of(f"{FAST}/C{n}", "ms")) for n in (1, 4)}
    for mode, resident, n in ((FAST, FAST_RESIDENT, 1), (FAST, FAST_RESIDENT, 2), (FAST, FAST_RESIDENT, 4), (EXACT, EXACT_RESIDENT, 1)):
        figures |= bounds(f"{mode}_c{n}", good.get(f"{mode}/C{n}", {}), of(f"{resident}/C{n}", "ms"), facts)
    figures |= {"hit_rate": of(f"{FAST}/C1", "hit_rate"), "planner_error_pct": of(f"{FAST}/C1", "planner_error_pct")}
    figures |= {f"prefill8k_{key}": of(f"{PREFILL}/prefill8k", key) for key in ("s", "tok_s")}
    figures |= memory(good, facts)
    figures |= {name: facts.get(name) for name in ("slots", "arena_s", "arena_gb_s", "pin_s", "load_s", "link_gb_s", "dram_gb_s")}
    figures["errors"] = sorted(name for name in whole if name not in good)
    figures["reason_for_null"] = reasons(figures, tuple(NEEDS), lambda key: why_null(whole, key))
    return figures


def bounds(name: str, row: Row, resident_ms: float | None, facts: Row) -> Row:
    """A step over what it could take at best: every expert resident, and the missing bytes over link and CPU lane.

    In `fast` also over the two lanes' own rates, whatever threads that only read get of host memory (`gpu_fast_parts.over_bounds`).
    """
    if not row or resident_ms is None or not facts.get("link_gb_s") or not facts.get("dram_gb_s"):
        return {f"{name}_bound_ms": None, f"{name}_step_over_bound": None}
    rates = (facts["link_gb_s"] * 1e9, facts["dram_gb_s"] * 1e9, facts["record_bytes"])
    found = gpu_fast_parts.over_bounds(row, resident_ms, *rates)
    kind = "bound" if "bound_ms" in found else "link_bound"
    figures = {f"{name}_bound_ms": found[f"{kind}_ms"], f"{name}_step_over_bound": found[f"step_over_{kind}"]}
    if "lanes_bound_ms" in found:
        figures[f"{name}_step_over_lanes_bound"] = found["step_over_lanes_bound"]
    return figures


def memory(rows: dict[str, Row], facts: Row) -> Row:
    """Of the rows that a card of 24 GB runs, and the other rows' VRAM apart."""
    ours = {name: row for name, row in rows.items() if not name.startswith((FAST_RESIDENT, EXACT_RESIDENT))}
    extra = max((row["ram_extra_gib"] for row in ours.values() if row.get("ram_extra_gib") is not None), default=None)
    card = max((row["vram_peak_mib"] for row in ours.values() if row.get("vram_peak_mib")), default=None)
    resident = max((row["vram_peak_mib"] for name, row in rows.items() if name not in ours and row.get("vram_peak_mib")), default=None)
    arena = facts.get("arena_bytes")
    return {
        "ram_extra_gib": extra,
        "ram_total_gib_measured": round(arena / 2**30 + extra, 2) if arena and extra is not None else None,
        "vram_peak_gib": round(card / 1024, 2) if card else None,
        "fits_24_gb": card <= CARD_MIB if card else None,
        "vram_peak_gib_every_expert": round(resident / 1024, 2) if resident else None,
    }


def why_null(rows: dict[str, Row], key: str) -> str:
    """Why a figure is not there: the row that is missing or broke."""
    for name in NEEDS[key]:
        if name not in rows:
            return f"{name} was not measured in this run"
        if "error" in rows[name]:
            return f"{name} failed: {rows[name]['error']}"
    return "the machine does not tell it, or its rates were not measured"


def grow(args: argparse.Namespace) -> None:
    """The machine's memory, as far as it is not there yet."""
    wanted = 0 if args.dry_run else args.grow_gib << 30
    print(f"memory: {slice_machine.grow(wanted)}", flush=True)


def prepare(args: argparse.Namespace, rows: Rows) -> None:
    """The files."""
    rows.save()
    if args.dry_run:
        return
    began = time.monotonic()
    if slice_checkpoint.write(args.folder, args.layers, experts=False, vocab=VOCAB, processes=os.cpu_count() or 1):
        rows.note(prepare_s=round(time.monotonic() - began, 1))


def clean(args: argparse.Namespace) -> None:
    """Takes files, arena, control region and rows away."""
    shutil.rmtree(args.folder, ignore_errors=True)
    for path in (Path(segments.arena_path(SHM, INSTANCE)), Path(segments.ctl_path(SHM, INSTANCE)), args.state):
        path.unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("command", choices=("grow", "prepare", "run", "report", "clean", "estimate"))
    made.add_argument("--layers", type=int, default=LAYERS, choices=range(1, LAYERS + 1), help="with routed experts")
    made.add_argument("--folder", type=Path, default=Path(SHM) / "glm53-slice-full")
    made.add_argument("--state", type=Path, default=Path(SHM) / "glm53-full-size-rows.json")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--warm", type=int, default=100, help="decode steps before measuring")
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--prefill", type=int, default=8192, help="tokens of the prefill")
    made.add_argument("--threads", type=int, default=14, help="of cpu_expert")
    made.add_argument("--cache-tokens", type=int, default=131_072, help="of the key-value cache: the worker's own")
    made.add_argument("--grow-gib", type=int, default=GROW_GIB)
    made.add_argument("--seconds", type=float, default=540.0, help="no row begins that would end later")
    made.add_argument("--tune", action="store_true", help="let Triton time its configurations")
    made.add_argument("--dry-run", action="store_true", help="no GPU: a stand-in for the model")
    made.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "gpu_full_size.json")
    return made


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(sys.argv[1:] if argv is None else argv)
    began = time.monotonic()
    if args.command == "estimate":
        print(f"{sum(case.seconds for case in cases(args.warm + args.steps)):.0f} s of rows behind the load")
        return
    if args.command == "clean":
        clean(args)
        return
    if args.command == "grow":
        grow(args)
        return
    started = report.start("bench.gpu_full_size")
    rows = Rows(args.state, args.out, None if args.command == "report" else started, summarise)
    if args.command == "prepare":
        prepare(args, rows)
    elif args.command == "run":
        measure(args, rows, began + args.seconds)
    else:
        rows.save()
    print(f"{args.command}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    gpu_exact_slice.main_and_leave(main)

"""Stock exllamav3 1.6.5 on the slice, beside the other sides: `python -m bench.stock_latest`. Needs an NVIDIA GPU.

Its CPU split keeps a cache of experts in VRAM: an expert that the CPU had to compute may take a spare slot for the next tokens. Same
slice, trace, VRAM and rows (--state) as `bench.gpu_exact_slice`, whose options it takes; `prepare` of that bench writes the slice. The
other sides need 1.5.1, so 1.6.5 lies in a folder of its own, with its extension built:

    pip install --no-deps --target FOLDER exllamav3==1.6.5
    PYTHONPATH=FOLDER python -m bench.stock_latest --state ROWS --out FILE

STOCK_LATEST_UNPINNED=1 keeps it from pinning threads where the machine's topology can be read but is no use.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch

from bench import gpu_exact_slice, report, routing_trace, slice_cases
from bench.gpu_exact_slice import main_and_leave
from bench.kept_rows import Rows
from bench.slice_cases import STOCK_165
from bench.slice_dry import DryEngine
from bench.slice_ours import depths_of

VERSION = "1.6.5"
# Nothing is pinned to cores: with a topology that cannot be read there is nothing to pin to.
UNPINNED = {"EXL3_MOE_CPU_PIN": "0", "EXL3_MOE_HOST_CORES": "0"}


def leave_topology_alone() -> None:
    """Keeps exllamav3 from reading the machine's topology where that is not there: on such virtual machines its reader ends the process."""
    if os.path.isdir("/sys/devices/system/cpu/cpu0/topology") and not os.environ.get("STOCK_LATEST_UNPINNED"):
        return
    os.environ.update(UNPINNED)
    try:
        import exllamav3_ext
    except ImportError:
        return  # exllamav3 builds it at its first import
    exllamav3_ext.exl3_moe_cpu_core_order = lambda: ([], 0)


# At import: the process that computes experts is spawned, imports this module again, and must leave it alone too.
leave_topology_alone()


def check_version() -> str:
    """The installed version.

    Raises:
        SystemExit: it is another one; says where to put the right one.
    """
    import exllamav3.version

    found = str(exllamav3.version.__version__)
    if found != VERSION:
        raise SystemExit(
            f"exllamav3 {found} is on PYTHONPATH, this bench measures {VERSION}: pip install --target FOLDER, PYTHONPATH=FOLDER"
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = gpu_exact_slice.parser().parse_args(["stock", *(sys.argv[1:] if argv is None else argv)])
    began = time.monotonic()
    started = report.start("bench.stock_latest")
    if not args.dry_run:
        check_version()
        started["machine"]["gpu"] = torch.cuda.get_device_name(0)
    rows = Rows(args.state, args.out, started, slice_cases.summarise)
    cases = slice_cases.cases(STOCK_165, args.warm + args.steps, first=args.first)
    todo = slice_cases.missing(slice_cases.only(cases, args.only) if args.only else cases, rows)
    if not todo:
        print(f"{STOCK_165}: everything is measured", flush=True)
        return
    trace = routing_trace.make(args.seed, args.warm + args.steps, streams=8, depths=depths_of(args.layers))
    deadline = began + args.seconds
    engine: slice_cases.Engine
    if args.dry_run:
        rows.note(dry_run=True)
        engine = DryEngine(STOCK_165, args.layers, trace, args.steps)
    else:
        args.tuners = gpu_exact_slice.tune_or_pin(args.tune)
        from bench.slice_stock import StockEngine

        engine = StockEngine(STOCK_165, args, trace, deadline)
    try:
        pinned = "no" if os.environ.get("EXL3_MOE_CPU_PIN") == "0" else "as it likes"
        rows.note(**engine.facts(), stock165_ready_s=round(time.monotonic() - began, 1), stock165_cores_pinned=pinned)
        skipped = slice_cases.run(todo, {}, engine, rows, deadline)
    finally:
        engine.close()
    if skipped:
        print(f"no time for: {', '.join(skipped)}; the same command goes on with them", flush=True)
    print(f"{STOCK_165}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main_and_leave(main)

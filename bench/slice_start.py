"""How long a worker's start takes on the slice, from the process's first moment to a loaded, warm model; and what it then does for long.

`bench.gpu_exact_slice start` runs this module in a process of its own, twice unless the first one finds its arena and its choices of
Triton's kernels. The worker's own loader does everything; the gRPC server that it starts beside is left out. Slots are as many as fit on a
card of 24 GB, so that they are lent to prefills, which a start measures, as there. Behind a second start the same process has a long prompt
and a few decode steps in turns: whether the card's memory suffices, and whether every turn has the first one's bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.kept_rows import Row

FIRST, SECOND, TURNS = "start/first", "start/second", "start/alternate"
FIRST_S, SECOND_S = 150.0, 35.0  # what they should take; the first one times Triton's configurations
READY, TURNED = "ready: ", "alternated: "
INSTANCE = "slice"
MODE = "exact"
LEAST_TURNS_S = 20.0  # less is not worth it
TURNS_S = 200.0  # fifty rounds should take less


def ready(folder: Path, pins: Path, card_mib: int) -> tuple[Row, Any]:
    """Loads the checkpoint as a worker does; what it found, and the backend.

    Args:
        folder: the checkpoint.
        pins: GLM53_TRITON_PIN.
        card_mib: VRAM of the card that slots are made for, MiB.
    """
    import torch

    from bench.slice_machine import card_spare
    from services.gpu_worker.backends.exl3 import lending, loader
    from services.gpu_worker.checkpoint import Checkpoint
    from services.gpu_worker.patches import triton_tuners
    from services.gpu_worker.settings import GpuWorkerSettings

    def free_on_card() -> int:
        free, total = torch.cuda.mem_get_info(loader.DEVICE)
        return max(0, min(free, (card_mib << 20) - (total - free)))

    loader.free_bytes, lending.spare_bytes = free_on_card, lambda device: card_spare(card_mib << 20, device)
    before = pins.read_bytes() if pins.exists() else b""
    compiled = compiled_kernels()
    own = before or not triton_tuners.shipped(torch.cuda.get_device_name(loader.DEVICE)).exists()
    began = time.monotonic()
    settings = GpuWorkerSettings.load({}, model_dir=str(folder), instance=INSTANCE, triton_pin=str(pins), device="cuda", mode=MODE)
    backend = loader.load(settings, Checkpoint(folder), lambda _fraction, _words: None, "asked for")
    stats, after = backend.stats(), pins.read_bytes() if pins.exists() else b""
    row = {
        "load_s": round(time.monotonic() - began, 2),
        "arena": backend.info.arena,
        "slots": stats["slots"],
        "mode": backend.info.mode,
        "stages_s": stats["start_s"],
        "pins": "the setting's file" if own else "shipped",
        "tuned": after != before,
        "compiled": compiled_kernels() - compiled,
    }
    return row, backend


def compiled_kernels() -> int:
    """Kernels that Triton's cache on disk holds."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache")
    return sum(1 for _ in folder.glob("*/*.cubin"))


def turns(backend: Any, seconds: float) -> Row:
    """Long prompts and decode steps in turns, as many as fit into so many seconds; the peak of VRAM meanwhile."""
    from bench import slice_ours
    from bench.slice_machine import Nvml, PeakSampler, vram_of

    found: list[dict[str, int]] = []
    driver = Nvml()
    with PeakSampler(driver.used) as peak:
        began = vram_of(peak)
        tokens = backend.info.max_context - slice_ours.ROUND_STEPS

        def at_step(step: int) -> None:
            if step <= 0:  # behind the prompt, and behind the round's last step
                found.append(vram_of(peak))

        row = slice_ours.alternate(backend, tokens, time.monotonic() + seconds, at_step)
        row |= peaks(began, found)
        with contextlib.suppress(OSError):  # as with the peaks: a driver that does not answer costs its figures alone
            row["vram_reserved_mib"] = driver.reserved() >> 20
        stats = backend.stats()
        return row | {name: stats[name] for name in ("slots", "slot_lendings", "slot_bytes_lent") if name in stats}


def peaks(ready: dict[str, int], turn_by_turn: list[dict[str, int]]) -> dict[str, int]:
    """Peaks of VRAM, as fields of a row: in all, while prompts were computed, while steps were decoded, and before either.

    Args:
        ready: of `vram_of`, before the first turn.
        turn_by_turn: of each prompt and of the steps behind it, in turns.
    """
    taken = {"ready": [ready], "prefill": turn_by_turn[::2], "decode": turn_by_turn[1::2]}
    most = {name: max((one["vram_peak_mib"] for one in each if one), default=0) for name, each in taken.items()}
    if not all(most.values()):
        return {}
    row = {"vram_peak_mib": max(most.values()), "vram_samples": sum(one["vram_samples"] for one in turn_by_turn if one)}
    return row | {f"vram_peak_mib_{name}": value for name, value in most.items()}


def run(folder: Path, pins: Path, card_mib: int, limit_s: float, turns_s: float = 0.0) -> tuple[Row, Row | None]:
    """A row of one start, in a process of its own, and one of what came behind it.

    Args:
        turns_s: seconds for that, 0 for nothing.

    Raises:
        RuntimeError: it ended without being ready.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    command = [sys.executable, "-m", "bench.slice_start", str(folder), str(pins), "--card-mib", str(card_mib), "--turns-s", str(turns_s)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(READY)), None)
    if line is None:
        raise RuntimeError(f"the start ended with {done.returncode}, not ready: {done.stdout[-500:]}")
    row: Row = json.loads(line.removeprefix(READY))
    row["s"] = round(row.pop("ready_at") - began, 2)  # one clock for all processes of a machine
    behind = next((line for line in done.stdout.splitlines() if line.startswith(TURNED)), None)
    if behind is None:
        return row, {"error": f"it ended with {done.returncode}"} if turns_s else None
    return row, json.loads(behind.removeprefix(TURNED))


def is_second(row: Row) -> bool:
    """True when nothing was left to do that an earlier start has done."""
    return not row["tuned"] and not row.get("compiled") and str(row["arena"]).startswith("re-attached")


def measure(rows: Any, folder: Path, pins: Path, card_mib: int, deadline: float, start: Any = run) -> list[str]:
    """Rows of a first start, where there was anything to do that it leaves behind, of a second one, and of the turns behind it.

    Args:
        rows: bench.kept_rows.Rows.
        deadline: monotonic seconds; no start begins that would end later.
        start: makes the rows; another one in tests.

    Returns:
        what there was no time for.
    """
    for _ in range(2):
        if rows.done(SECOND):
            break
        first = not rows.done(FIRST)
        left = deadline - time.monotonic()
        needed = FIRST_S if first and not pins.exists() else SECOND_S
        if left < needed:
            return [SECOND]
        # Turns behind a start that may be a first one leave time for the second.
        spare_s = left - needed - (SECOND_S if first else 0.0)
        wanted = needed == SECOND_S and spare_s >= LEAST_TURNS_S and not rows.done(TURNS)
        turns_s = min(TURNS_S, spare_s) if wanted else 0.0
        try:
            row, behind = start(folder, pins, card_mib, left, turns_s)
        except subprocess.TimeoutExpired:
            return [SECOND]
        except RuntimeError as error:
            rows.put(FIRST if first else SECOND, {"error": str(error)})
            return []
        if behind is not None:
            rows.put(TURNS, behind)
        if first and not is_second(row):
            rows.put(FIRST, row)
        else:
            # What is chosen anew at every start belongs to a second one too.
            rows.put(SECOND, row if str(row["arena"]).startswith("re-attached") else row | {"error": f"the arena was {row['arena']}"})
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pins", type=Path)
    parser.add_argument("--card-mib", type=int, required=True)
    parser.add_argument("--turns-s", type=float, default=0.0)
    args = parser.parse_args()
    row, backend = ready(args.folder, args.pins, args.card_mib)
    print(READY + json.dumps(row | {"ready_at": time.monotonic()}), flush=True)
    if args.turns_s:
        print(TURNED + json.dumps(turns(backend, args.turns_s)), flush=True)
    os._exit(0)  # the arena stays, and nobody waits for what a worker would end


if __name__ == "__main__":
    main()

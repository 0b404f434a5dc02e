"""How fast a checkpoint's experts get into the arena, by threads: `python -m bench.arena_fill`. Needs no GPU.

Experts of GLM-5.3-Flash's shape (9.5 MB each) in files under --folder: in /dev/shm it measures our side alone, on a disk the disk too.
`cold` asks the system to forget the files before a run. The arena's memory is taken before the time begins.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import report, slice_checkpoint
from kernels.python.arena import Arena
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.pace import span


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def memory_kib(field: str) -> int:
    """One line of /proc/self/status, e.g. RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def fill_once(checkpoint: Checkpoint, path: Path, threads: int, *, keep_cached: bool) -> dict[str, Any]:
    """One arena, filled and sealed, and gone again."""
    shapes = cpu_arena.expert_shapes(checkpoint)
    began = time.perf_counter()
    arena = Arena.create(str(path), shapes, checkpoint.config.n_routed_experts, checkpoint.hash)
    created = time.perf_counter()
    anon, file, peak = memory_kib("RssAnon"), memory_kib("RssFile"), 0

    def look(_fraction: float, _words: str) -> None:
        nonlocal peak
        peak = max(peak, memory_kib("RssAnon") - anon + memory_kib("RssFile") - file)

    arena_fill.fill(checkpoint, shapes, arena, look, threads=threads, keep_cached=keep_cached)
    filled = time.perf_counter()
    arena.seal()
    sealed = time.perf_counter()
    size = arena.total_bytes
    arena.unlink()
    arena.close()
    return {
        "threads": threads,
        "gb": round(size / 1e9, 2),
        "reserve_s": round(created - began, 3),
        "fill_s": round(filled - created, 3),
        "seal_s": round(sealed - filled, 3),
        "gb_s": round(size / 1e9 / (filled - created), 2),
        "peak_beyond_arena_mib": round(peak / 1024, 1),
    }


def check_seconds(checkpoint: Checkpoint) -> float:
    """Checking every expert's tensors."""
    began = time.perf_counter()
    cpu_arena.check_experts(checkpoint)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/glm53-arena-fill"))
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm/glm53-arena-fill"))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=288, help="of each layer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "arena_fill.json")
    args = parser.parse_args()
    started = report.start("bench.arena_fill")
    slice_checkpoint.write_experts_only(args.folder, args.layers, args.experts)
    rows: list[dict[str, Any]] = []
    try:
        checkpoint = Checkpoint(args.folder)
        check_s = check_seconds(checkpoint)
        for _ in range(args.rounds):
            for cached in (True, False) if not str(args.folder).startswith("/dev/shm/") else (True,):
                for threads in args.threads:
                    if not cached:
                        forget(args.folder)
                    row = {"files": "cached" if cached else "cold", **fill_once(checkpoint, args.arena, threads, keep_cached=cached)}
                    rows.append(row)
                    print(row, flush=True)
    finally:
        args.arena.unlink(missing_ok=True)
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)
    summary: dict[str, Any] = {"check_experts_s": round(check_s, 3), "experts": args.layers * checkpoint.config.n_routed_experts}
    for files in ("cached", "cold"):
        for threads in args.threads:
            speeds = [row["gb_s"] for row in rows if row["files"] == files and row["threads"] == threads]
            if not speeds:
                continue
            summary[f"{files}_{threads}_threads_gb_s"] = float(np.median(speeds))
    summary["peak_beyond_arena_mib"] = max(row["peak_beyond_arena_mib"] for row in rows)
    print("at the cached rate the whole model takes", span(114.6 / max(v for k, v in summary.items() if k.startswith("cached"))))
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()

"""What a job of the CPU lane takes from its submission to its answer, without a GPU: `python -m bench.lane_probe [--out FILE]`.

An arena of GLM-5.3-Flash's records (4096 x 2048, 3 bits) lies in shared memory, a real cpu_expert process serves it with T threads, and
this process submits jobs as decoding does: through the protocol's own client, one every 800 us, each on records that no cache holds. It
polls for the answer without sleeping, as the pager's thread does. Sizes of jobs take turns, so that noise hits all of them alike. Twice:
on a machine that does nothing else, and beside processes that read memory. Then jobs after a pause, which find everybody asleep.

ct_a and ct_b are the straight line through the medians of 1 to 4 experts: microseconds of a job, and of each expert.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.cpu_kernel_quick import make_records
from kernels.python import _layout, host, segments, shm_lib
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from kernels.python.region import Region

HIDDEN, INTER, BITS, TOP_K, MAX_ROWS = 4096, 2048, 3, 8, 8
DISTINCT = 4  # records with bytes of their own; the others are copies at other addresses
EXPERTS, ROWS = (1, 2, 3, 4), (1, 4)
PERIOD_NS = 800_000
PAUSE_NS, PAUSED_JOBS, PAUSED_EXPERTS = 40_000_000, 12, 2
WARM_JOBS = 16
TURNS_S = 2.5
TIMEOUT_NS = 20_000_000_000
PENDING, DONE = 0, 1
Size = tuple[int, int]  # experts, rows


class Lane:
    """The worker's side of the protocol on a region."""

    def __init__(self, region: Region, arena: Arena) -> None:
        self._library, self._region, self._arena = shm_lib.load(), region, arena
        self._pointer = self._library.glm53_lane_create(region.handle.pointer, TIMEOUT_NS, TIMEOUT_NS)
        self._x = np.random.default_rng(1).standard_normal((MAX_ROWS, HIDDEN)).astype(np.float32)
        self._next = 0
        self._rows, self._buffer, self._status = ctypes.c_void_p(), ctypes.c_uint32(), ctypes.c_uint32()
        self._out = [ctypes.addressof(word) for word in (self._rows, self._buffer, self._status)]

    def wait_up(self, timeout_s: float) -> None:
        """Until cpu_expert serves."""
        deadline = time.monotonic() + timeout_s
        while not self._library.glm53_lane_tick(self._pointer, time.monotonic_ns()):
            if time.monotonic() > deadline:
                raise TimeoutError("cpu_expert has not attached")
            time.sleep(0.01)

    def job(self, size: Size) -> float:
        """Microseconds of one job on the next records."""
        experts, rows = size
        native = (_layout.AbiJobExpert * experts)()
        for i, expert in enumerate(native):
            record, self._next = self._next, (self._next + 1) % self._arena.num_records
            expert.arena_slot, expert.generation = record, self._arena.generation_of(0, record)
            expert.first_pick, expert.num_picks = i * rows, rows
        picked = np.tile(np.arange(rows, dtype=np.uint32), experts)
        outs = np.arange(experts * rows, dtype=np.uint32)
        poll, pointer = self._library.glm53_lane_poll, self._pointer
        start = time.monotonic_ns()
        seq = self._library.glm53_lane_submit(
            pointer, 0, rows, self._x.ctypes.data, experts, native, outs.size, picked.ctypes.data, outs.ctypes.data, start
        )
        while (state := poll(pointer, seq, time.monotonic_ns(), *self._out)) == PENDING:
            pass
        end = time.monotonic_ns()
        if seq == 0 or state != DONE:
            raise RuntimeError("cpu_expert gave a job up")
        self._library.glm53_lane_release(pointer, self._buffer.value)
        return (end - start) * 1e-3

    def close(self) -> None:
        """Ends the client."""
        self._library.glm53_lane_close(self._pointer)


@contextlib.contextmanager
def arena_of(path: str, records: int) -> Iterator[Arena]:
    """A sealed arena of one layer with so many records."""
    shape = ExpertShape.create(HIDDEN, INTER, BITS, act_limit=10.0)
    distinct = make_records(shape, DISTINCT)
    arena = Arena.create(path, [shape], records, bytes(32))
    for record in range(records):
        arena.record(0, record)[:] = distinct[record % DISTINCT]
    arena.seal()
    try:
        yield arena
    finally:
        arena.unlink()
        arena.close()


@contextlib.contextmanager
def cpu_expert(folder: str, instance: str, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """The real process. More threads than it would take by itself get the machine's last CPUs."""
    env = {**os.environ, "GLM53_INSTANCE": instance, "GLM53_SHM_DIR": folder, "GLM53_CT_THREADS": str(threads)}
    cpus = sorted(os.sched_getaffinity(0))
    if len(host.physical_cpus()) < threads <= len(cpus):
        env["GLM53_CT_CPUS"] = ",".join(map(str, cpus[-threads:]))
    process = subprocess.Popen([sys.executable, "-m", "services.cpu_expert"], env=env, cwd=report.ROOT, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


def read_memory(stop: Synchronized[int], read: Synchronized[float]) -> None:
    """Reads a quarter of a GiB again and again; `read`: GB/s so far."""
    memory = np.ones(1 << 25, np.int64)
    start, count = time.monotonic(), 0
    while not stop.value:
        memory.max()
        count += 1
        read.value = count * memory.nbytes / (time.monotonic() - start) / 1e9


@contextlib.contextmanager
def traffic(readers: int) -> Iterator[list[Synchronized[float]]]:
    """Processes that read memory; yields their rates."""
    stop = multiprocessing.Value("i", 0, lock=False)
    rates = [multiprocessing.Value("d", 0.0, lock=False) for _ in range(readers)]
    processes = [multiprocessing.Process(target=read_memory, args=(stop, rate), daemon=True) for rate in rates]
    for process in processes:
        process.start()
    while not all(rate.value for rate in rates):
        time.sleep(0.01)
    try:
        yield rates
    finally:
        stop.value = 1
        for process in processes:
            process.join(timeout=10)


def take_turns(lane: Lane, jobs: int) -> dict[Size, list[float]]:
    """So many jobs of every size, one every PERIOD_NS; fewer when that takes longer than TURNS_S."""
    sizes = list(itertools.product(EXPERTS, ROWS))
    for size in itertools.islice(itertools.cycle(sizes), WARM_JOBS):
        lane.job(size)
    times: dict[Size, list[float]] = {size: [] for size in sizes}
    due = time.monotonic_ns()
    deadline = time.monotonic() + TURNS_S
    for _ in range(jobs):
        if time.monotonic() > deadline:
            break
        for size in sizes:
            due = max(due + PERIOD_NS, time.monotonic_ns())
            while time.monotonic_ns() < due:
                pass
            times[size].append(lane.job(size))
    return times


def after_pauses(lane: Lane) -> dict[Size, list[float]]:
    """Jobs that find cpu_expert asleep."""
    size = (PAUSED_EXPERTS, 1)
    times = []
    for _ in range(PAUSED_JOBS):
        time.sleep(PAUSE_NS * 1e-9)
        times.append(lane.job(size))
    return {size: times}


def rows_of(threads: int, kind: str, times: dict[Size, list[float]]) -> list[dict[str, Any]]:
    """A line of the result for each size."""
    rows = []
    for (experts, tokens), values in times.items():
        p10, p50, p90, p99 = np.percentile(values, (10, 50, 90, 99)).round(1).tolist()
        row = {"threads": threads, "beside": kind, "experts": experts, "rows": tokens, "jobs": len(values)}
        rows.append({**row, "p10_us": p10, "p50_us": p50, "p90_us": p90, "p99_us": p99, "worst_us": round(max(values), 1)})
        print(f"T={threads:<3} {kind:9} {experts} experts {tokens} rows   p10 {p10:8.1f}  p50 {p50:8.1f}  p90 {p90:8.1f}  p99 {p99:8.1f}")
    return rows


def fits(rows: list[dict[str, Any]]) -> dict[str, float]:
    """ct_a and ct_b by threads, company and rows."""
    found: dict[str, float] = {}
    for threads, kind, tokens in sorted({(r["threads"], r["beside"], r["rows"]) for r in rows if r["beside"] != "a pause"}):
        points = [r for r in rows if (r["threads"], r["beside"], r["rows"]) == (threads, kind, tokens)]
        slope, base = np.polyfit([r["experts"] for r in points], [r["p50_us"] for r in points], 1)
        name = f"T={threads} {kind} rows={tokens}"
        found |= {f"{name} ct_a_us": round(float(base), 1), f"{name} ct_b_us": round(float(slope), 1)}
    return found


def measure(arena: Arena, folder: str, instance: str, threads: int, jobs: int, readers: int) -> list[dict[str, Any]]:
    """All lines of one number of threads."""
    region = Region.create(segments.ctl_path(folder, instance), arena, top_k=TOP_K, max_rows=MAX_ROWS)
    rows: list[dict[str, Any]] = []
    try:
        with cpu_expert(folder, instance, threads), contextlib.closing(Lane(region, arena)) as lane:
            lane.wait_up(60)
            rows += rows_of(threads, "nothing", take_turns(lane, jobs))
            rows += rows_of(threads, "a pause", after_pauses(lane))
            if readers > 0:
                with traffic(readers) as rates:
                    beside = rows_of(threads, "reading", take_turns(lane, jobs))
                    rate = round(sum(r.value for r in rates), 1)
                    print(f"T={threads:<3} {readers} readers had {rate} GB/s")
                    rows += [{**row, "read_gb_s": rate} for row in beside]
    finally:
        region.unlink()
        region.close()
    return rows


def main() -> None:
    """Prints a table and the fitted costs, and writes the result file when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 8, 12, 14, 15])
    parser.add_argument("--jobs", type=int, default=150, help="of each size")
    parser.add_argument("--records", type=int, default=96)
    parser.add_argument("--readers", type=int, default=1, help="processes that read memory in the second half; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="also write the result file here")
    args = parser.parse_args()
    started = report.start("bench.lane_probe")
    usable = len(os.sched_getaffinity(0))
    folder, instance = tempfile.mkdtemp(prefix="lane-probe-", dir="/dev/shm"), "probe"
    rows: list[dict[str, Any]] = []
    try:
        with arena_of(segments.arena_path(folder, instance), args.records) as arena:
            for threads in args.threads:
                if threads > usable:
                    print(f"T={threads}: left out, there are {usable} CPUs")
                    continue
                rows += measure(arena, folder, instance, threads, args.jobs, args.readers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    costs = fits(rows)
    if args.out is not None:
        report.write_result(args.out, started, rows, costs)
    else:
        for name, value in costs.items():
            print(f"{name:40} {value}")


if __name__ == "__main__":
    main()

"""The CPU expert kernel against exllamav3's own, on this machine: `make bench-kernel` or `python -m bench.cpu_kernel`.

Whole experts of GLM-5.3-Flash's shape (4096 x 2048, MUL1, 3 bits), 64 of them in turn, so that the weights come from memory. All
kernels get the same records (each in the layout it wants), the same inputs, the same CPUs and the same number of threads, and take
turns call by call, each at another expert, so that noise of the machine hits all of them alike. Every kernel's output is compared with
fp64. One process for each number of threads.
With --scaling, jobs of 8 cold experts, as a layer's step is, on more and more threads against what the memory gives as many readers.
Writes docs/results/cpu_kernel_<machine>.json and .svg. The stock kernels are compiled in build/stock (bench/stock_kernels.py).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import kernel_accuracy, kernel_plot, report, stock_kernels
from bench.cpu_kernel_quick import make_records
from kernels.python import expert, host, planar
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask

HIDDEN, INTER, BITS = 4096, 2048, 3
TRELLIS_BYTES = 3 * HIDDEN * INTER * BITS // 8
DISTINCT = 4  # experts with bytes of their own; the others are copies at other addresses
STOCK_FOLDER = report.ROOT / "build" / "stock"
RESULTS = report.ROOT / "docs" / "results"
CHILD_TIMEOUT_S = 3600
JOB_EXPERTS = 8  # of a job in the scaling runs
JOB_RECORDS = 128  # 1.2 GB: more than any cache
ALONE_SPANS, ALONE_SPAN_S = 5, 0.4

Prepare = Callable[[int, npt.NDArray[np.float16], npt.NDArray[np.float32]], Callable[[], None]]


def main() -> None:
    """Measures every number of threads in a child process and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    cpus = len(os.sched_getaffinity(0))
    powers = sorted({t for t in (1, 2, 4, 8, 16, 32, 64) if t < cpus} | {cpus})
    parser.add_argument("--threads", type=int, nargs="*", default=powers)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each number of rows, all kernels together")
    parser.add_argument("--scaling", type=int, nargs="*", default=[], help="numbers of threads for jobs of 8 experts")
    parser.add_argument("--no-stock", action="store_true", help="only our own kernels")
    parser.add_argument("--note", default="", help="kept in the result: how the libraries were built, what else ran")
    parser.add_argument("--json", type=pathlib.Path, help="default: docs/results/cpu_kernel_<machine>.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        what, threads = args.child.split(":")
        json.dump({"turns": measure, "scaling": measure_jobs}[what](args, int(threads)), sys.stdout)
        return
    started = report.start("bench.cpu_kernel") | ({"note": args.note} if args.note else {})
    if not args.no_stock:
        for version in stock_kernels.VERSIONS:
            print(f"stock {version}: {stock_kernels.library(version, STOCK_FOLDER)}", flush=True)
    accuracy = kernel_accuracy.errors()
    target = args.json or RESULTS / f"cpu_kernel_{machine_name(started['machine'])}.json"
    rows: list[dict[str, Any]] = []
    for child in [*(f"turns:{t}" for t in args.threads), *(f"scaling:{t}" for t in args.scaling)]:
        rows += run_child(child)
        with contextlib.redirect_stdout(io.StringIO()):  # what was measured by now stays when the time for all is up
            report.write_result(target, started, rows, {**summary(rows), **scaling_summary(rows), **accuracy})
    report.write_result(target, started, rows, {**summary(rows), **scaling_summary(rows), **accuracy})
    if args.threads:
        kernel_plot.write(target.with_suffix(".svg"), rows, f"{started['machine']['cpu']}: one expert, time by number of tokens")


def run_child(child: str) -> list[dict[str, Any]]:
    """The rows of one process of this module."""
    command = [sys.executable, "-m", "bench.cpu_kernel", *sys.argv[1:], "--child", child]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=CHILD_TIMEOUT_S, cwd=report.ROOT)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    for row in rows:
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def confine(threads: int) -> list[int]:
    """Keeps this process on as many CPUs as there are threads, one of each core before any second one; returns them."""
    cores = host.physical_cpus()
    cpus = (cores + sorted(os.sched_getaffinity(0) - set(cores)))[:threads]
    os.sched_setaffinity(0, cpus)
    return cpus


def machine_name(machine: dict[str, Any]) -> str:
    """A file name's part: the CPU and its family and model."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cpu_family_model']}".lower()).strip("-")


def measure(args: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """All kernels with one number of threads, on the first CPUs of this process's mask."""
    cpus = confine(threads)
    shape = ExpertShape.create(HIDDEN, INTER, BITS, act_limit=10.0)
    distinct = make_records(shape, min(DISTINCT, args.experts))
    records = copies(shape, distinct, args.experts)
    kernels = our_kernels(shape, records, distinct, threads)
    if not args.no_stock:
        kernels.update(stock_calls(shape, records, threads))
    rows: list[dict[str, Any]] = [{"threads": threads, "kernel": "read memory", "gb_s": read_rate(records, cpus)}] if threads == 1 else []
    exact = kernel_accuracy.Exact(shape, distinct[0])
    for num_rows in args.rows:
        x = np.random.default_rng(num_rows).standard_normal((num_rows, HIDDEN)).astype(np.float16)
        wanted = exact(x)
        for name, times, out in take_turns(kernels, x, args.experts, args.seconds):
            p10 = float(np.percentile(times, 10))
            rows.append({
                "threads": threads, "kernel": name, "rows": num_rows, "p10_ms": p10 * 1e3, "best_ms": min(times) * 1e3,
                "median_ms": float(np.median(times)) * 1e3, "calls": len(times), "gb_s": TRELLIS_BYTES / p10 / 1e9,
                "rms": kernel_accuracy.relative_rms(out, wanted),
            })  # fmt: skip
    return rows


def copies(shape: ExpertShape, distinct: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    """`count` records in memory of their own."""
    records = shape.empty_records(count)
    for i in range(count):
        records[i] = distinct[i % len(distinct)]
    return records


def our_kernels(shape: ExpertShape, records: npt.NDArray[np.uint8], distinct: npt.NDArray[np.uint8], threads: int) -> dict[str, Prepare]:
    """Every vector variant of this host in native order, AVX2 in planar order, and what "auto" takes when there is a choice."""
    repacked = copies(shape, np.stack([planar.repack(shape, record) for record in distinct]), len(records))
    planar_shape = planar.planar_shape(shape)
    names = [name for name in expert.variants() if name != "scalar"]
    kernels = {f"{name} native": ours(name, shape, records, threads) for name in names}
    kernels |= {f"{name} planar": ours(name, planar_shape, repacked, threads) for name in names}
    if len(names) > 1:
        kernels["auto native"] = ours("auto", shape, records, threads)
    return kernels


def ours(variant: str, shape: ExpertShape, records: npt.NDArray[np.uint8], threads: int) -> Prepare:
    """Calls of one variant."""
    workers = sorted(os.sched_getaffinity(0))[1:]
    pool = ExpertPool(variant, threads, cpus=workers or None)
    pool.tune(shape)
    print(f"{variant}: {pool.reason}", file=sys.stderr, flush=True)
    return lambda index, x, out: pool.prepare([ExpertTask(shape, records[index], x, out)])


def stock_calls(shape: ExpertShape, records: npt.NDArray[np.uint8], threads: int) -> dict[str, Prepare]:
    """Every tier of both versions that this host has."""
    kernels: dict[str, Prepare] = {}
    layouts: dict[str, npt.NDArray[np.uint8]] = {}
    for version in stock_kernels.VERSIONS:
        path = stock_kernels.library(version, STOCK_FOLDER)
        for tier in stock_kernels.TIERS[1:]:
            try:
                kernel = stock_kernels.StockKernel(path, version, tier, shape, records, layouts)
            except ValueError:
                break  # a higher tier needs what this one lacked
            kernels[kernel.name] = lambda index, x, out, kernel=kernel: kernel.prepare([index], x, out, threads)  # type: ignore[misc]
    return kernels


def take_turns(
    kernels: dict[str, Prepare], x: npt.NDArray[np.float16], experts: int, seconds: float
) -> list[tuple[str, list[float], npt.NDArray[np.float32]]]:
    """(name, seconds of every call, output of expert 0) of each kernel."""
    outs = {name: np.empty((x.shape[0], HIDDEN), np.float32) for name in kernels}
    calls = {name: [prepare(i, x, outs[name]) for i in range(experts)] for name, prepare in kernels.items()}
    times: dict[str, list[float]] = {name: [] for name in kernels}
    apart = max(1, experts // len(kernels))
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 2:
        for i, (name, prepared) in enumerate(calls.items()):
            call = prepared[(turn + i * apart) % experts]
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        turn += 1
    for prepared in calls.values():
        prepared[0]()
    return [(name, times[name], outs[name]) for name in kernels]


def measure_jobs(args: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """Jobs of 8 experts for one token, ours as the product runs them and stock's default tier, and the memory's own rate."""
    cpus = confine(threads)
    shape = ExpertShape.create(HIDDEN, INTER, BITS, act_limit=10.0)
    records = copies(shape, make_records(shape, DISTINCT), JOB_RECORDS)
    jobs = [list(range(first, first + JOB_EXPERTS)) for first in range(0, JOB_RECORDS, JOB_EXPERTS)]
    x = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float16)
    rows: list[dict[str, Any]] = [{"threads": threads, "kernel": "read memory", "gb_s": read_rate(records, cpus)}]
    rows.append({"threads": threads, "kernel": "each thread alone", "gb_s": alone_rate(shape, records, x, cpus)})
    calls: dict[str, list[Callable[[], None]]] = {}
    for variant in ["auto"] if threads > 1 else ["auto", *(name for name in expert.variants() if name != "scalar")]:
        pool = ExpertPool(variant, threads, cpus=cpus[1:] or None)
        pool.tune(shape)
        outs = np.empty((JOB_EXPERTS, 1, HIDDEN), np.float32)
        calls[f"{variant} native"] = [
            pool.prepare([ExpertTask(shape, records[e], x, out) for e, out in zip(job, outs, strict=True)]) for job in jobs
        ]
    if not args.no_stock:
        kernel = default_stock(shape, records)
        total = np.empty((1, HIDDEN), np.float32)
        calls[kernel.name] = [kernel.prepare(job, x, total, threads) for job in jobs]
    for name, times in time_jobs(calls, args.seconds).items():
        rows.append({
            "threads": threads, "kernel": name, "job_experts": JOB_EXPERTS, "best_ms": min(times) * 1e3,
            "median_ms": float(np.median(times)) * 1e3, "calls": len(times), "gb_s": JOB_EXPERTS * TRELLIS_BYTES / min(times) / 1e9,
            "gb_s_median": JOB_EXPERTS * TRELLIS_BYTES / float(np.median(times)) / 1e9,
        })  # fmt: skip
    return rows


def alone_rate(shape: ExpertShape, records: npt.NDArray[np.uint8], x: npt.NDArray[np.float16], cpus: Sequence[int]) -> float:
    """GB/s of all threads together when each computes jobs of its own and waits for none: what these CPUs have to give at once, which is
    less than one CPU's rate times their number where they share cores, power or memory. The median of spans in which all compute."""
    done = [0] * len(cpus)
    stop = threading.Event()
    ready = threading.Barrier(len(cpus) + 1, timeout=60)

    def work(index: int) -> None:
        os.sched_setaffinity(0, [cpus[index]])  # of this thread
        pool = ExpertPool("auto", 1)
        pool.tune(shape)
        out = np.empty((1, HIDDEN), np.float32)
        calls = [pool.prepare([ExpertTask(shape, record, x, out)]) for record in records[index :: len(cpus)]]
        ready.wait()
        while not stop.is_set():
            calls[done[index] % len(calls)]()
            done[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cpus))]
    for thread in threads:
        thread.start()
    ready.wait()
    rates = []
    for _ in range(ALONE_SPANS):
        before, start = sum(done), time.perf_counter()
        time.sleep(ALONE_SPAN_S)
        rates.append((sum(done) - before) * TRELLIS_BYTES / (time.perf_counter() - start) / 1e9)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    return float(np.median(rates))


def default_stock(shape: ExpertShape, records: npt.NDArray[np.uint8]) -> stock_kernels.StockKernel:
    """The tier of exllamav3 1.5.1 that it takes on this host by itself: the highest one that the host has."""
    path = stock_kernels.library("1.5.1", STOCK_FOLDER)
    for tier in reversed(stock_kernels.TIERS[1:]):
        try:
            return stock_kernels.StockKernel(path, "1.5.1", tier, shape, records, {})
        except ValueError:
            continue
    raise ValueError("this host has no AVX2")


def time_jobs(calls: dict[str, list[Callable[[], None]]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call; the kernels take turns, each at another job."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 2:
        for i, (name, prepared) in enumerate(calls.items()):
            call = prepared[(turn + i * len(prepared) // len(calls)) % len(prepared)]
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        turn += 1
    return times


def read_rate(records: npt.NDArray[np.uint8], cpus: Sequence[int]) -> float:
    """GB/s of one thread on each of these CPUs that only reads the records."""
    folder = STOCK_FOLDER.with_name("bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "read_memory.so"
    source = stock_kernels.SHIM / "read_memory.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-lpthread"], check=True, timeout=120)
    read = ctypes.CDLL(str(path)).read_memory
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    read.restype = ctypes.c_double
    numbers = (ctypes.c_int * len(cpus))(*cpus)
    return records.nbytes / min(read(records.ctypes.data, records.nbytes, len(cpus), numbers) for _ in range(5)) / 1e9


def scaling_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Jobs of 8 experts by number of threads: GB/s, per cent of the smaller of (threads x one thread's rate, the memory's rate), per cent
    of what the threads reach when each computes alone (medians), and the ratio to stock 1.5.1's default tier."""
    alone = {r["threads"]: r["gb_s"] for r in rows if r["kernel"] == "each thread alone"}
    medians = {r["threads"]: r["gb_s_median"] for r in rows if r["kernel"] == "auto native" and "job_experts" in r}
    jobs = {(r["kernel"], r["threads"]): r["gb_s"] for r in rows if "job_experts" in r}
    memory = {r["threads"]: r["gb_s"] for r in rows if r["kernel"] == "read memory"}
    one = jobs.get(("auto native", 1))
    result: dict[str, Any] = {}
    for (name, threads), rate in sorted(jobs.items(), key=lambda item: item[0][1]):
        if name.startswith("stock"):
            result[f"job8_{threads}t_vs_151_default"] = round(jobs["auto native", threads] / rate, 3)
        elif name == "auto native":
            result[f"job8_{threads}t_gbps"] = round(rate, 2)
            result[f"read_{threads}t_gbps"] = round(memory[threads], 2)
            if one is not None and threads > 1:
                result[f"job8_{threads}t_pct_of_bound"] = round(100 * rate / min(threads * one, memory[threads]), 1)
            if threads in alone and threads > 1:
                result[f"job8_{threads}t_pct_of_alone"] = round(100 * medians[threads] / alone[threads], 1)
    return result


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that documents quote. A ratio is stock's best time over ours: above 1 is faster.

    Best, not p10: on a machine that others use, longer calls meet more of their load, which would flatter the faster kernel.
    """
    best = {(r["kernel"], r["threads"], r["rows"]): r["best_ms"] for r in rows if "rows" in r}
    result: dict[str, Any] = {}

    def ratio(key: str, ours: Sequence[str], stock: Sequence[str], num_rows: int) -> None:
        mine = [best[name, 1, num_rows] for name in ours if (name, 1, num_rows) in best]
        theirs = [best[name, 1, num_rows] for name in stock if (name, 1, num_rows) in best]
        if mine and len(theirs) == len(stock):
            result[key] = round(min(theirs) / min(mine), 3)

    wide = ["avx512bw native", "avx512vbmi native"]
    tiers = ("avx2", "bw", "vnni", "vbmi")
    present = {
        version: [f"stock {version} {tier}" for tier in tiers if (f"stock {version} {tier}", 1, 1) in best]
        for version in ("1.5.1", "1.6.5")
    }
    for m in (1, 4, 8):
        ratio(f"avx2_m{m}_vs_151", ["avx2 native"], ["stock 1.5.1 avx2"], m)
        ratio(f"avx2_m{m}_vs_165", ["avx2 native"], ["stock 1.6.5 avx2"], m)
        ratio(f"avx2_planar_m{m}_vs_151", ["avx2 planar"], ["stock 1.5.1 avx2"], m)
        ratio(f"avx2_planar_m{m}_vs_165", ["avx2 planar"], ["stock 1.6.5 avx2"], m)
        if any((name, 1, m) in best for name in wide):
            ratio(f"avx512_m{m}_vs_151_default", wide, present["1.5.1"][-1:], m)
            ratio(f"avx512_m{m}_vs_151_best", wide, present["1.5.1"], m)
            ratio(f"avx512_m{m}_vs_165_best", wide, present["1.6.5"], m)
        if ("auto native", 1, m) in best:
            ratio(f"auto_m{m}_vs_151_best", ["auto native"], present["1.5.1"], m)
            ratio(f"auto_m{m}_vs_165_best", ["auto native"], present["1.6.5"], m)
    for family, names in (("avx2", ["avx2 native"]), ("avx512", wide)):
        mine = [best[name, 1, 1] for name in names if (name, 1, 1) in best]
        if not mine:
            continue
        result[f"gbps_per_core_{family}"] = round(TRELLIS_BYTES / min(mine) / 1e6, 2)
        for threads in sorted({key[1] for key in best} - {1}):
            more = [best[name, threads, 1] for name in names if (name, threads, 1) in best]
            result[f"scale_{threads}t" if family == "avx2" else f"scale_{threads}t_{family}"] = round(min(mine) / min(more), 3)
    for layout in ("native", "planar"):  # a line through the times of 2, 4, 8 rows: what is left at no row is decoding
        times = [(m, best[f"avx2 {layout}", 1, m]) for m in (2, 4, 8) if (f"avx2 {layout}", 1, m) in best]
        if len(times) == 3:
            decode_ms = np.polyfit(*zip(*times, strict=True), 1)[1]
            result[f"decode_only_gbps_avx2_{layout}"] = round(float(TRELLIS_BYTES / decode_ms / 1e6), 2)
    read = [r["gb_s"] for r in rows if r["kernel"] == "read memory"]
    if read:
        result["read_gbps_1t"] = round(read[0], 2)
    return result


if __name__ == "__main__":
    main()

"""Rates of the machine that a step's bound is made of: the link by the copy engine and by a gather, host memory by threads, device memory
by a copy."""

from __future__ import annotations

import concurrent.futures
import statistics
import time

import numpy as np
import torch

from kernels.python import cuda_expert
from services.gpu_worker.backends.exl3 import copy_way, loader
from services.gpu_worker.backends.exl3.experts import ExpertStore

COPIES = 64
VRAM_BYTES = 1 << 30


def link_rate(store: ExpertStore, loaded: loader.Loaded, derate: int = 1) -> float:
    """Bytes per second of the copy engine, record by record, best of five.

    Args:
        derate: every record is copied so many times and counted once, as the pager's `link_derate` does it.
    """
    count = min(COPIES, store.placement.num_slots)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(count):
            for _ in range(derate):
                store._slots[i].copy_(loaded.records.host[i], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, count * loaded.records.stride / (time.perf_counter() - began))
    return best


def gather_rate(store: ExpertStore, loaded: loader.Loaded) -> float | None:
    """Bytes per second of gathers by the multiprocessors, as many records at a time as a launch takes, best of five.

    None where there is no kernel for this GPU.
    """
    if copy_way.why_not():
        return None
    records, count = loaded.records, min(COPIES, store.placement.num_slots)
    copies = [(store._slots[i].data_ptr(), records.device_base + i * records.stride) for i in range(count)]
    best = 0.0
    for turn in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        cuda_expert.gather(copies, records.stride, stream=int(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        if turn:  # the first one loads the kernel's code
            best = max(best, count * records.stride / (time.perf_counter() - began))
    return best


def read_rate(loaded: loader.Loaded, threads: int) -> float:
    """Bytes per second at which so many threads read the arena, best of three."""
    words = loaded.records.host.numpy().view(np.uint64)
    share = max(1, min(len(words), 64 * threads) // threads)
    threads = min(threads, len(words) // share)
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(lambda i: int(words[i * share : (i + 1) * share].max()), range(threads)))
            best = max(best, share * threads * words.shape[1] * 8 / (time.perf_counter() - began))
    return best


def copy_rate(size: int = VRAM_BYTES) -> float:
    """Bytes read plus written per second by a copy within the device."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return 2 * source.numel() / statistics.median(times[2:]) * 1000

"""How long the device waits for the host: a word from the device to a polling thread and the answer back, on the device's clock.

The two have no common clock, so a direction cannot be measured by itself: the whole way is an upper bound of each. Three ways:

    spin     a kernel raises the word and polls for the answer; a thread of this process answers at once
    wait     as the product has it: a kernel raises the word, the stream waits (cuStreamWaitValue32), the next kernel notes the time
    process  as spin, answered by another process over shared memory, as cpu_expert polls

`python -m bench.round_trip PATH FIRST ROUNDS` is that other process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench import report
from kernels.python.cuda_expert import Words

ROUNDS, WARM = 2000, 64
BATCH = 100  # rounds enqueued before the first of them begins: they must not wait for the host's launches
LIMIT_NS = 2_000_000_000  # of a round
READY_S = 30.0
# Words of the page, in cache lines of their own.
REQUEST, REPLY, GATE, READY = 0, 128, 256, 384
Times = NDArray[np.float64]  # microseconds, one for each round


class Device(Protocol):
    """What goes round with the host's words."""

    def spin(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        """Rounds of one kernel; `answer` runs while they do."""
        ...

    def wait(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        """Rounds of the stream's wait; `answer` runs when all are enqueued."""
        ...


class Page:
    """A page of shared memory. Attributes: address."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._hold = (ctypes.c_uint8 * mmap.PAGESIZE).from_buffer(self._map)
        self.address = ctypes.addressof(self._hold)

    def words(self) -> Words:
        """As the host addresses them."""
        return Words(self.address + REQUEST, self.address + REPLY)

    def word(self, offset: int) -> ctypes.c_uint32:
        """One of the page's words."""
        return ctypes.c_uint32.from_address(self.address + offset)


class Gpu:
    """The device, with the page mapped for it."""

    def __init__(self, page: Page) -> None:
        import torch
        from exllamav3.ext import exllamav3_ext

        self._torch, self._page = torch, page
        self._driver = ctypes.CDLL("libcuda.so.1")
        if (code := int(torch.cuda.cudart().cudaHostRegister(page.address, mmap.PAGESIZE, 3))) != 0:  # portable, mapped
            raise OSError(f"the GPU driver refuses to map a page (CUDA error {code})")
        base = int(exllamav3_ext.cuda_host_get_device_pointer(page.address))
        self._base, self._words = base, Words(base + REQUEST, base + REPLY)
        self._gate = 0

    def spin(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        torch = self._torch
        cycles, total = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (rounds, 1))
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream().cuda_stream
        self._words.spin(first, rounds, cycles.data_ptr(), total.data_ptr(), limit_ns=LIMIT_NS, stream=stream)
        answer()
        torch.cuda.synchronize()
        return in_microseconds(cycles.cpu().numpy(), int(total.item()))

    def wait(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        from kernels.python.cuda_expert import stamp

        torch = self._torch
        times = torch.zeros((2, rounds), dtype=torch.int64, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        stamp(times.data_ptr(), stream=stream)  # loads the kernel: nothing may load while a wait is outstanding
        torch.cuda.synchronize()
        self._gate += 1
        self._wait_for(stream, GATE, self._gate)
        for i in range(rounds):
            at = times.data_ptr() + 8 * i
            stamp(at, word=self._words.request, value=first + i, stream=stream)
            self._wait_for(stream, REPLY, first + i)
            stamp(at + 8 * rounds, stream=stream)
        self._page.word(GATE).value = self._gate
        try:
            answer()
        finally:
            self._page.word(REPLY).value = first + rounds - 1  # whatever became of the answers, the device goes on
        torch.cuda.synchronize()
        began, ended = times.cpu().numpy()
        return np.asarray((ended - began) / 1000.0)

    def _wait_for(self, stream: int, offset: int, value: int) -> None:
        code = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream), ctypes.c_uint64(self._base + offset), ctypes.c_uint32(value), ctypes.c_uint(0)
        )
        if code != 0:
            raise OSError(f"the GPU driver refuses a wait (CUDA error {code})")

    def close(self) -> None:
        """Unmaps the page."""
        self._torch.cuda.synchronize()
        self._torch.cuda.cudart().cudaHostUnregister(self._page.address)


def in_microseconds(cycles: NDArray[np.int64], total_ns: int) -> Times:
    """Rounds in microseconds: the multiprocessor's clock has finer steps than the timer, which says how fast that clock ran.

    Raises:
        TimeoutError: a round took too long.
    """
    if total_ns <= 0 or not cycles.all():
        raise TimeoutError(f"round {int((cycles == 0).argmax())} of {len(cycles)} had no answer within {LIMIT_NS / 1e9:.0f} s")
    return np.asarray(cycles * (total_ns / float(cycles.sum()) / 1000.0))


def measure(device: Device, page: Page, path: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """All three ways, as fields of a row: p50 and p99 in microseconds."""
    first = 1

    def numbers(count: int) -> int:
        nonlocal first
        first += count
        return first - count

    def answered(way: Callable[[int, int, Callable[[], None]], Times], count: int) -> Times:
        begin = numbers(count)
        return way(begin, count, lambda: page.words().answer(begin, count, limit_ns=LIMIT_NS))

    answered(device.spin, WARM)
    row = quantiles("spin", answered(device.spin, rounds))
    answered(device.wait, min(BATCH, WARM))
    row |= quantiles("wait", np.concatenate([answered(device.wait, min(BATCH, rounds)) for _ in range(-(-rounds // BATCH))]))
    begin = numbers(WARM + rounds)
    with OtherProcess(page, path, begin, WARM + rounds):
        device.spin(begin, WARM, lambda: None)
        row |= quantiles("process", device.spin(begin + WARM, rounds, lambda: None))
    return {"rounds": rounds, **row, **bounds(row)}


def bounds(row: dict[str, Any]) -> dict[str, Any]:
    """Upper bounds of both directions: the device's word until the host has seen it, the host's until the device's next kernel runs."""
    return {"publish_to_seen_us": row["spin_p50_us"], "flag_to_add_us": row["wait_p50_us"]}


def quantiles(name: str, times: Times) -> dict[str, float]:
    """p50 and p99."""
    return {f"{name}_p50_us": round(float(np.median(times)), 2), f"{name}_p99_us": round(float(np.percentile(times, 99)), 2)}


class OtherProcess:
    """The answers from a process of its own, which polls when this is entered.

    Raises:
        TimeoutError: it does not come up. RuntimeError, at the end: it failed.
    """

    def __init__(self, page: Page, path: Path, first: int, rounds: int) -> None:
        page.word(READY).value = 0
        command = [sys.executable, "-m", "bench.round_trip", str(path), str(first), str(rounds)]
        self._process = subprocess.Popen(command, cwd=report.ROOT)
        self._page = page

    def __enter__(self) -> OtherProcess:
        deadline = time.monotonic() + READY_S
        while self._page.word(READY).value == 0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._process.kill()
                raise TimeoutError("the process that answers does not come up")
            time.sleep(0.001)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        if self._process.wait(timeout=READY_S) != 0 and kind is None:
            raise RuntimeError("the process that answers failed")


def on_gpu() -> dict[str, Any]:
    """The row, measured on the current device. Nothing else may run on it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="glm53-round-trip-") as folder:
        path = Path(folder) / "words"
        path.touch()
        page = Page(path)
        gpu = Gpu(page)
        try:
            return measure(gpu, page, path)
        finally:
            gpu.close()


def main(argv: list[str]) -> None:
    """Answers."""
    page = Page(Path(argv[0]))
    page.words().answer(int(argv[1]), 0, limit_ns=1)  # loads the library
    page.word(READY).value = 1
    page.words().answer(int(argv[1]), int(argv[2]), limit_ns=int(READY_S * 1e9))
    sys.stdout.flush()
    os._exit(0)  # nobody waits for the end of an interpreter


if __name__ == "__main__":
    main(sys.argv[1:])

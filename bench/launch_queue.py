"""What blocks in the GPU's driver while the device waits for a word of the host: `python -m bench.launch_queue [--out FILE]`. Seconds.

The pager lets the device go on with driver calls of its own (kernels/cuda/device_pager.h). If the forward pass's thread blocks in the
driver meanwhile, with locks that those calls need, nobody goes on.
Ways to block, each while a stream waits for a word:

    launches     a stream takes so many launches that wait; the next one blocks
    graphs       the same with captured graphs of GRAPH_KERNELS kernels
    words        the same with words that the stream writes
    synchronise  the host waits for the device
    first_use    a kernel is launched for the first time, so that its code is loaded
    pageable     one number is copied from ordinary host memory, as torch.tensor([1], device="cuda") does

For each: whether the thread blocks, and how long another thread's copy to the device, on a stream of its own, takes to be enqueued then.
The word is raised by a store, which needs no driver: whatever blocks goes on after RELEASE_S.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bench import report

MOST_LAUNCHES = 4096
BLOCKED_S = 0.5  # a call that takes longer waits for the device
RELEASE_S = 4.0
END_S = 60.0
BYTES = 9_474_048  # of a record
GRAPH_KERNELS = 20
FILLS = ("launches", "graphs", "words")
WAYS = (*FILLS, "synchronise", "first_use", "pageable")


class Device(Protocol):
    """A GPU whose compute stream can be made to wait."""

    def hold(self) -> None:
        """The compute stream waits for the word."""
        ...

    def launches(self) -> None:
        """A small kernel on the compute stream, used before."""
        ...

    def graphs(self) -> None:
        """A captured graph on the compute stream, used before."""
        ...

    def words(self) -> None:
        """The compute stream writes a word."""
        ...

    def synchronise(self) -> None:
        """Waits for the device."""
        ...

    def first_use(self) -> None:
        """A kernel on the compute stream that was never launched in this process."""
        ...

    def pageable(self) -> None:
        """A number in ordinary memory is copied to the device on the compute stream."""
        ...

    def copy(self) -> None:
        """Enqueues a copy to the device on a stream of its own."""
        ...

    def release(self) -> None:
        """Raises the word, without the driver."""
        ...


class Gpu:
    """The real one."""

    def __init__(self) -> None:
        import ctypes

        import torch

        self._torch = torch
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._compute, self._beside = torch.cuda.Stream(), torch.cuda.Stream()
        self._word = torch.zeros(32, dtype=torch.int32, pin_memory=True)
        self._host = torch.ones(BYTES, dtype=torch.uint8, pin_memory=True)
        self._to, self._small = torch.zeros(BYTES, dtype=torch.uint8, device="cuda"), torch.zeros(64, device="cuda")
        on_device = ctypes.c_uint64()
        self._done(self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), ctypes.c_void_p(self._word.data_ptr()), 0))
        self._at, self._value = on_device, 0
        self._pointer, self._address, self._u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
        with torch.cuda.stream(self._compute):
            self._small.add_(1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._compute):
            for _ in range(GRAPH_KERNELS):
                self._small.add_(1)
        self.graphs()
        self.words()
        self.pageable()
        self.copy()
        torch.cuda.synchronize()

    def _done(self, code: int) -> None:
        if code != 0:
            raise OSError(f"the GPU driver refuses a call: {code}")

    def hold(self) -> None:
        self._value += 1
        stream = self._pointer(self._compute.cuda_stream)
        self._done(self._driver.cuStreamWaitValue32_v2(stream, self._at, self._u32(self._value), self._u32(0)))

    def graphs(self) -> None:
        with self._torch.cuda.stream(self._compute):
            self._graph.replay()

    def words(self) -> None:
        stream = self._pointer(self._compute.cuda_stream)
        scratch = self._address(self._at.value + 64)
        self._done(self._driver.cuStreamWriteValue32_v2(stream, scratch, self._u32(1), self._u32(0)))

    def launches(self) -> None:
        with self._torch.cuda.stream(self._compute):
            self._small.add_(1)

    def synchronise(self) -> None:
        self._torch.cuda.synchronize()

    def first_use(self) -> None:
        with self._torch.cuda.stream(self._compute):
            self._small.erfinv_()

    def pageable(self) -> None:
        with self._torch.cuda.stream(self._compute):
            self._torch.tensor([1], device="cuda")

    def copy(self) -> None:
        self._torch.cuda.set_device(0)  # this thread's context
        with self._torch.cuda.stream(self._beside):
            self._to.copy_(self._host, non_blocking=True)

    def release(self) -> None:
        self._word[0] = self._value


def measure(device: Device, way: str, blocked_s: float = BLOCKED_S, release_s: float = RELEASE_S) -> dict[str, Any]:
    """One way to block.

    Raises:
        TimeoutError: what was blocked does not go on when the word is raised.
    """
    device.hold()
    done = threading.Event()
    progress = [0, time.monotonic()]  # calls that returned, and when the last one did
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None], over: threading.Event) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that measures
                errors.append(error)
            over.set()

        return run

    def block() -> None:
        call = getattr(device, way)
        for _ in range(MOST_LAUNCHES if way in FILLS else 1):
            call()
            progress[:] = progress[0] + 1, time.monotonic()

    thread = threading.Thread(target=guarded(block, done), daemon=True)
    thread.start()
    try:
        while not done.is_set() and time.monotonic() - progress[1] < blocked_s:
            time.sleep(0.01)
        blocks, calls = not done.is_set(), int(progress[0])
        copied = threading.Event()
        began = time.monotonic()
        threading.Thread(target=guarded(device.copy, copied), daemon=True).start()
        copies = copied.wait(release_s)
        took = time.monotonic() - began
    finally:
        device.release()
    if not (done.wait(END_S) and copied.wait(END_S)):
        raise TimeoutError(f"{way}: the driver does not go on although the device does")
    if errors:
        raise errors[0]
    device.synchronise()
    return {"name": way, "blocks": blocks, "calls": calls, "copy_is_enqueued": copies, "copy_ms": round(1000 * took, 3)}


def main(argv: list[str] | None = None, make: Callable[[], Device] = Gpu) -> None:
    """Prints a line for each way, and writes the result file when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the result file here")
    args = parser.parse_args(argv)
    started, device = report.start("bench.launch_queue"), make()
    rows = [measure(device, way) for way in WAYS]
    for row in rows:
        print(row, flush=True)
    if args.out is not None:
        summary: dict[str, Any] = {f"{row['name']}_that_wait": row["calls"] for row in rows if row["name"] in FILLS and row["blocks"]}
        summary |= {f"{row['name']}_stops_the_pager": row["blocks"] and not row["copy_is_enqueued"] for row in rows}
        report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()

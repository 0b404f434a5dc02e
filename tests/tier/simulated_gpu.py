"""A GPU for tests: streams of operations that run when a scheduler says, in every order that streams allow.

`FastKernels` are the kernels of `fast` on it: they read what their arguments name when they run, and compute with the CPU's expert kernel.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.python import cuda_expert, reference
from kernels.python.cuda_expert import CombineArguments, PublishArguments, StepArguments, StepFunctions
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from kernels.python.pager import PagerDriver

COMPUTE, COPY = 1, 2
DEADLINE_S = 90.0


class SimulatedGpu:
    """Two streams. A thread takes the head of one or the other at random; a wait that does not hold keeps its stream standing."""

    def __init__(self, seed: int, record_bytes: int, *, gathers: bool = False) -> None:
        self._record_bytes = record_bytes
        self.one_queue = (
            False  # what the copy stream is given stands behind the compute stream's, as where the hardware has one queue for both
        )
        self.launches: list[list[tuple[int, int]]] = []  # of gathers: (to, source) of each
        self._random = random.Random(seed)
        self._lock = threading.Condition()
        self._streams: dict[int, deque[tuple[str, Callable[[], Any]]]] = {COMPUTE: deque(), COPY: deque()}
        self._stop = False
        self._held: set[int] = set()
        self.refuse_copies = False
        # What the driver was asked for, "copy", "gather" or "word" and an address on the device: True has it refused.
        self.refuse: Callable[[str, int], bool] = lambda _kind, _address: False
        self.problems: list[str] = []
        self.copied = 0  # records
        # Copies to the device, ranges of gathers and words: (kind, address, bytes or value), in order
        self.asked: list[tuple[str, int, int]] = []
        self.driver = PagerDriver(
            PagerDriver.CONTEXT_GET(lambda _out: 0),
            PagerDriver.CONTEXT_SET(lambda _context: 0),
            PagerDriver.COPY_TO_HOST(
                lambda to, source, size, stream: self.enqueue(stream, "run", lambda: ctypes.memmove(to, source, size))
            ),
            PagerDriver.COPY_TO_DEVICE(self._copy_to_device),
            PagerDriver.WORD(self._write_word),
            PagerDriver.WORD(lambda stream, at, value, _flags: self.enqueue(stream, "wait", lambda: int(word(at)[0]) >= value)),
            PagerDriver.GATHER(self._gather) if gathers else PagerDriver.GATHER(),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _copy_to_device(self, to: int, source: int, size: int, stream: int) -> int:
        if (self.refuse_copies and size == self._record_bytes) or self.refuse("copy", to):
            return 700
        self.asked.append(("copy", to, size))
        self.copied += size == self._record_bytes
        # In two halves: a reader in between would see a torn record.
        half = size // 2
        self.enqueue(stream, "run", lambda: ctypes.memmove(to, source, half))
        return self.enqueue(stream, "run", lambda: ctypes.memmove(to + half, source + half, size - half))

    def _gather(self, copies: Any, count: int, size: int, stream: int) -> int:
        ranges = [(int(copies[i].to), int(copies[i].source)) for i in range(count)]
        if self.refuse_copies or any(self.refuse("gather", to) for to, _source in ranges):
            return -1
        self.launches.append(ranges)
        self.asked += [("gather", to, size) for to, _source in ranges]
        self.copied += count
        half = size // 2

        def part(first: int, length: int) -> None:
            for to, source in ranges:
                ctypes.memmove(to + first, source + first, length)

        # Of every range one half after the other: a reader in between would see torn records.
        self.enqueue(stream, "run", lambda: part(0, half))
        return self.enqueue(stream, "run", lambda: part(half, size - half))

    def _write_word(self, stream: int, at: int, value: int, _flags: int) -> int:
        if self.refuse("word", at):
            return 700
        self.asked.append(("word", at, value))
        return self.enqueue(stream, "run", lambda: word(at).__setitem__(0, value))

    def enqueue(self, stream: int, kind: str, action: Callable[[], Any]) -> int:
        with self._lock:
            self._streams[COMPUTE if self.one_queue else stream].append((kind, action))
            self._lock.notify_all()
        return 0

    def _run(self) -> None:
        while True:
            with self._lock:
                ready = [s for s, queue in self._streams.items() if queue and s not in self._held]
                if self._stop and not ready:
                    return
                if not ready:
                    self._lock.wait(0.05)
                    continue
                stream = self._random.choice(ready)
                kind, action = self._streams[stream][0]
            done = action()
            if kind == "wait" and not done:
                time.sleep(0.0001)
                continue
            with self._lock:
                self._streams[stream].popleft()
                self._lock.notify_all()

    def hold(self, stream: int) -> None:
        """Nothing more of the stream runs, as if it were busy, until `release`."""
        with self._lock:
            self._held.add(stream)

    def release(self, stream: int) -> None:
        """Lets a stream that was held go on."""
        with self._lock:
            self._held.discard(stream)
            self._lock.notify_all()

    def synchronize(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with self._lock:
            while any(self._streams.values()):
                assert time.monotonic() < deadline, "the simulated GPU stands still"
                self._lock.wait(0.1)

    def close(self) -> None:
        self._stop = True
        self._thread.join(DEADLINE_S)

    def fail(self) -> None:
        """Notes the exception that is being handled."""
        self.problems.append(traceback.format_exc())


def word(address: int) -> Any:
    """The 32-bit word at an address, as an array of one."""
    return (ctypes.c_uint32 * 1).from_address(address)


def array(address: int, dtype: Any, *shape: int) -> Any:
    """A view of memory."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype).reshape(shape)


class FastKernels:
    """publish, run and combine of `kernels/include/moe_cuda.h`. A handle is the layer's number plus one."""

    _ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    _RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def __init__(self, gpu: SimulatedGpu, shapes: list[ExpertShape]) -> None:
        self._gpu, self._shapes = gpu, shapes
        self._pool = ExpertPool("scalar")
        self.steps = self.steps_with_x = 0
        self._callbacks = (self._ONE(self._publish), self._RUN(self._run), self._ONE(self._combine))
        self.functions = StepFunctions(*(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._callbacks))
        self.handles = [layer + 1 for layer in range(len(shapes))]

    def _publish(self, pointer: int, stream: int) -> int:
        a = PublishArguments.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(PublishArguments)))
        self.steps += 1
        self.steps_with_x += bool(a.x)

        def run() -> None:
            ctypes.memmove(a.selected_to, a.selected, a.rows * a.top_k * 8)
            if a.x:
                ctypes.memmove(a.x_to, a.x, a.rows * a.hidden * 2)
            word(a.word)[0] = a.value

        return self._gpu.enqueue(stream, "run", run)

    def _run(self, handle: int, pointer: int, stream: int) -> int:
        a = StepArguments.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(StepArguments)))
        shape = self._shapes[handle - 1]
        return self._gpu.enqueue(stream, "run", lambda: self._guarded(lambda: self._step(a, shape)))

    def _combine(self, pointer: int, stream: int) -> int:
        a = CombineArguments.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(CombineArguments)))
        return self._gpu.enqueue(stream, "run", lambda: self._guarded(lambda: self._sum(a)))

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception:  # noqa: BLE001 - a stream has nobody to raise to
            self._gpu.fail()

    def _step(self, a: Any, shape: ExpertShape) -> None:
        assert (a.x_dtype, a.selected_type, a.weights_dtype) == (cuda_expert.DTYPE_F16, cuda_expert.INDEX_I64, cuda_expert.DTYPE_F16)
        all_here = bool(a.flags & cuda_expert.FLAG_ALL_HERE)
        assert all_here == bool(a.out)  # rows are asked for when the lane may have taken picks, and only then
        picks = a.rows * a.top_k
        selected, records = array(a.selected, np.int64, picks), array(a.records, np.uint64, a.num_experts)
        x = array(a.x, np.float16, a.rows, shape.hidden)
        y = array(a.y, np.float32, picks, shape.hidden) if a.y else np.zeros((picks, shape.hidden), np.float32)
        y[:] = np.nan  # what is not computed here must not be read
        tasks = []
        for pick, expert in enumerate(selected.tolist()):
            if not 0 <= expert < a.num_experts:
                continue
            assert records[expert] or not all_here
            if not records[expert]:
                continue
            record = array(int(records[expert]), np.uint8, shape.record_bytes)
            tasks.append(ExpertTask(shape, record, x, y, np.array([pick // a.top_k], np.uint32), np.array([pick], np.uint32)))
        if tasks:
            self._pool.run(tasks)
        if a.out:
            self._add(a, shape.hidden, y, None)

    def _sum(self, a: Any) -> None:
        picks = a.rows * a.top_k
        at = int(array(a.other_from, np.uint64, 1)[0])
        other = array(at, np.float32, picks, a.hidden) if at else None
        self._add(a, a.hidden, array(a.y, np.float32, picks, a.hidden), other)

    def _add(self, a: Any, hidden: int, y: Any, other: Any) -> None:
        selected = array(a.selected, np.int64, a.rows, a.top_k)
        records = array(a.records, np.uint64, a.num_experts)
        weights = array(a.weights, np.float16, a.rows, a.top_k).astype(np.float32)
        out = array(a.out, np.float32, a.rows, hidden)
        shared = array(a.shared, np.float32, a.rows, hidden) if a.shared else None
        for row in range(a.rows):
            total = np.zeros(hidden, np.float32)
            for slot, expert in enumerate(selected[row].tolist()):
                if not 0 <= expert < a.num_experts:
                    continue
                source = y if records[expert] else other
                if source is not None:
                    total = reference.fma(weights[row, slot], source[row * a.top_k + slot], total)
            out[row] = total if shared is None else total + shared[row]

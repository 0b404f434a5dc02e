"""Fills the arena from the checkpoint's files: threads read each expert straight into its record and take its checksum while it is in the
processor's cache. No byte is held anywhere in between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.python.expert import ExpertShape
from services.common.errors import CheckpointError
from services.gpu_worker.backends.cpu_arena import fill_record
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.pace import Pace
from services.gpu_worker.safetensors_files import TensorReader

Progress = Callable[[float, str], None]

MAX_THREADS = 16
# A disk or network file system that gives nothing for so long will not give anything any more.
STALLED_S = 120.0
END_WAIT_S = 5.0
_LOOK_S = 0.05


class RecordStore(Protocol):
    """The part of kernels.python.arena.Arena that filling needs; called from several threads."""

    def record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The bytes of one record, writable until the arena is sealed."""
        ...

    def finish(self, layer: int, first_expert: int = 0, count: int | None = None) -> None:
        """Takes the checksums of filled records."""
        ...


def resolve_threads(asked: int) -> int:
    """Reading threads: what was asked for, or (0) one per processor that this process may use, at most MAX_THREADS."""
    return asked or min(MAX_THREADS, len(os.sched_getaffinity(0)))


def fill(
    checkpoint: Checkpoint,
    shapes: Sequence[ExpertShape],
    arena: RecordStore,
    progress: Progress,
    *,
    threads: int = 0,
    keep_cached: bool = True,
    stalled_s: float = STALLED_S,
) -> None:
    """Fills every record of the arena; arena layer i is the i-th layer with routed experts.

    Args:
        shapes: of every arena layer.
        progress: called in this thread with a fraction 0..1 and words; what it raises ends the reading.
        threads: 0 for as many as there are processors.
        keep_cached: see TensorReader.
        stalled_s: seconds without a single record until this fails.

    Raises:
        CheckpointError: a tensor cannot be read or used, or nothing has arrived for `stalled_s`.
    """
    with TensorReader(checkpoint.files, keep_cached=keep_cached) as reader:
        work = _Work(checkpoint, shapes, arena, reader)
        readers = [threading.Thread(target=work.run, name=f"fill-{i}", daemon=True) for i in range(resolve_threads(threads))]
        for thread in readers:
            thread.start()
        try:
            _watch(work, readers, progress, stalled_s)
        finally:
            work.stop.set()
            deadline = time.monotonic() + END_WAIT_S
            for thread in readers:
                thread.join(max(0.0, deadline - time.monotonic()))
            # A thread that hangs in a read keeps its file open for good: better than reading from another file under its number.
            if any(thread.is_alive() for thread in readers):
                reader.abandon()
    if work.error is not None:
        raise work.error


class _Work:
    """What the threads share: which record is next, how much is done, what went wrong first."""

    def __init__(self, checkpoint: Checkpoint, shapes: Sequence[ExpertShape], arena: RecordStore, reader: TensorReader) -> None:
        self.checkpoint, self._shapes, self._arena, self._reader = checkpoint, shapes, arena, reader
        self._lock = threading.Lock()
        self._records = self._all_records()
        self.bytes_total = sum(shape.record_bytes for shape in shapes) * checkpoint.config.n_routed_experts
        self.bytes_done = 0
        self.error: BaseException | None = None
        self.stop = threading.Event()

    def _all_records(self) -> Iterator[tuple[int, int]]:
        for index in range(len(self._shapes)):
            for expert in range(self.checkpoint.config.n_routed_experts):
                yield index, expert

    def run(self) -> None:
        """Fills records until there are none left or somebody failed."""
        layers = self.checkpoint.config.moe_layers
        try:
            while not self.stop.is_set():
                with self._lock:
                    index, expert = next(self._records)
                shape = self._shapes[index]
                fill_record(self.checkpoint, layers[index], expert, shape, self._arena.record(index, expert), self._reader)
                self._arena.finish(index, expert, 1)
                with self._lock:
                    self.bytes_done += shape.record_bytes
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = self.error or error
            self.stop.set()


def _watch(work: _Work, readers: Sequence[threading.Thread], progress: Progress, stalled_s: float) -> None:
    pace = Pace(work.bytes_total)
    seen, moved = 0, time.monotonic()
    progress(0.0, f"experts: {pace.words(0)}")
    while alive := [thread for thread in readers if thread.is_alive()]:
        alive[0].join(_LOOK_S)
        now = time.monotonic()
        if work.bytes_done != seen:
            seen, moved = work.bytes_done, now
        elif now - moved > stalled_s:
            raise CheckpointError(f"reading the experts from {work.checkpoint.path} has stalled: nothing came for {stalled_s:g} s")
        progress(seen / work.bytes_total, f"experts: {pace.words(seen)}")
    progress(work.bytes_done / work.bytes_total, f"experts: {pace.words(work.bytes_done)}")

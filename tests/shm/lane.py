"""The worker's side of the protocol, one call at a time and with the test's own clock."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import _layout, shm_lib
from kernels.python.errors import raise_last
from kernels.python.region import Region

PENDING, DONE, FAILED = 0, 1, 2
STATUS_OK, STATUS_STALE, STATUS_BAD = 1, 2, 3
HEARTBEAT_NS, JOB_NS = 1000, 500


@dataclasses.dataclass
class Job:
    """One expert after the other, each with some rows of x."""

    layer: int
    x: npt.NDArray[np.float32]
    experts: list[tuple[int, int, list[int]]]  # (arena slot, generation, rows of x)


@dataclasses.dataclass
class Answer:
    """What poll saw."""

    poll: int
    status: int
    rows: npt.NDArray[np.float32] | None  # [picks, hidden], a view of shared memory
    buffer: int


class Lane:
    """glm53_lane_* on a region."""

    def __init__(self, region: Region) -> None:
        self._library = shm_lib.load()
        self._region = region.handle
        self._pointer = self._library.glm53_lane_create(region.handle.pointer, HEARTBEAT_NS, JOB_NS)
        self.words = _layout.AbiCtlHeader.from_address(self._library.glm53_region_header(region.handle.pointer))
        self.base = ctypes.addressof(self.words)

    def tick(self, now: int) -> bool:
        return bool(self._library.glm53_lane_tick(self._pointer, now))

    def submit(self, job: Job, now: int) -> int:
        """The job's sequence number, 0 when it was not taken."""
        experts = (_layout.AbiJobExpert * len(job.experts))()
        rows: list[int] = []
        for native, (slot, generation, of_expert) in zip(experts, job.experts, strict=True):
            native.arena_slot, native.generation, native.first_pick, native.num_picks = slot, generation, len(rows), len(of_expert)
            rows.extend(of_expert)
        native_rows = np.array(rows, np.uint32)
        outs = np.arange(len(rows), dtype=np.uint32)
        x = np.ascontiguousarray(job.x)
        seq = int(
            self._library.glm53_lane_submit(
                self._pointer,
                job.layer,
                len(x),
                x.ctypes.data,
                len(experts),
                experts,
                len(rows),
                native_rows.ctypes.data,
                outs.ctypes.data,
                now,
            )
        )
        if seq == 0 and self._library.glm53_error_code() not in (0,) and len(x) > self.words.max_rows:
            raise_last(self._library)
        return seq

    def poll(self, seq: int, now: int, picks: int = 0) -> Answer:
        rows, buffer, status = ctypes.c_void_p(), ctypes.c_uint32(), ctypes.c_uint32()
        poll = self._library.glm53_lane_poll(
            self._pointer, seq, now, ctypes.addressof(rows), ctypes.addressof(buffer), ctypes.addressof(status)
        )
        view = None
        if poll == DONE and rows.value is not None:
            count = picks * int(self.words.hidden)
            view = np.ctypeslib.as_array((ctypes.c_float * count).from_address(rows.value)).reshape(picks, -1)
        return Answer(int(poll), status.value, view, buffer.value)

    def release(self, buffer: int) -> None:
        self._library.glm53_lane_release(self._pointer, buffer)

    def abort(self, now: int) -> None:
        self._library.glm53_lane_abort(self._pointer, now)

    @property
    def epoch(self) -> int:
        return int(self._library.glm53_lane_epoch(self._pointer))

    @property
    def free_buffers(self) -> int:
        return int(self._library.glm53_lane_free_buffers(self._pointer))

    @property
    def reason(self) -> str:
        text: bytes = self._library.glm53_lane_reason(self._pointer)
        return text.decode()

    def descriptor(self, seq: int) -> Any:
        """The job descriptor in shared memory."""
        entry = seq % int(self.words.ring_len)
        return _layout.AbiJob.from_address(self.base + int(self.words.jobs_offset) + entry * int(self.words.job_stride))

    def poison(self, seq: int) -> None:
        """NaN in every result row of the job's buffer: a row that is read without having been computed shows."""
        buffer = int(self.descriptor(seq).buffer)
        address = self.base + int(self.words.buffers_offset) + buffer * int(self.words.buffer_stride) + int(self.words.out_offset)
        count = int(self.words.max_picks) * int(self.words.hidden)
        np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))[:] = np.nan

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._library.glm53_lane_close(pointer)

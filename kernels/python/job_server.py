"""cpu_expert's side of shared memory: attaches to arena and control region, and serves jobs."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Sequence
from typing import Any

from kernels.python import shm_lib
from kernels.python.errors import raise_last


class ServerStep(enum.IntEnum):
    """The protocol action that was done last (kernels/tier/job_server.h)."""

    IDLE = 0
    CLAIMED = 1
    CHECKED = 2
    COMPUTING = 3
    COMPUTED = 4
    FILLED = 5
    PUBLISHED = 6
    PASSED = 7
    ACKNOWLEDGED = 8
    DRAINED = 9
    QUIT = 10


class JobServer:
    """One attachment to one control region; a new worker means a new JobServer.

    `run` serves without the GIL; `step` does one protocol action, so that tests can stop the server anywhere.
    """

    def __init__(
        self,
        ctl_path: str,
        arena_path: str,
        *,
        variant: str = "auto",
        threads: int = 1,
        cpus: Sequence[int] = (),
        beat_thread: bool = True,
        experts_per_step: int = 0,
        spin_us: int = -1,
        tune: bool = False,
        huge_pages: bool = False,
    ) -> None:
        """Attaches, takes the region's lease and starts to beat.

        threads: of the kernel, the serving one counts; cpus: of the others, which are pinned to them. tune: "auto" takes the variant that
        is fastest on the arena's own shape for each number of rows. huge_pages: ask for 2 MiB pages in the arena, and enter all of it into
        this process's page table while it serves. spin_us: polling after a job before sleeping, -1 by the CPUs that there are to spare.
        beat_thread, experts_per_step: for tests that beat and compute by hand.
        Raises ShmAbsent when a segment is not there, ShmMismatch with both values, ShmInUse while another server lives, ValueError for
        a kernel variant that this host lacks.
        """
        self._library = shm_lib.load()
        options = {
            "variant": variant,
            "threads": threads,
            "cpus": ",".join(map(str, cpus)),
            "beat_thread": int(beat_thread),
            "experts_per_step": experts_per_step,
            "spin_us": spin_us,
            "tune": int(tune),
            "huge_pages": int(huge_pages),
        }
        text = "\n".join(f"{name}={value}" for name, value in options.items())
        pointer = self._library.glm53_server_attach(os.fsencode(ctl_path), os.fsencode(arena_path), text.encode())
        if not pointer:
            raise_last(self._library)
        self._pointer: int | None = pointer

    def run(self, max_ms: int) -> ServerStep:
        """Serves for up to max_ms milliseconds; returns earlier with QUIT (the worker closed the region) or DRAINED (after `drain`)."""
        return ServerStep(self._library.glm53_server_run(self._open(), max_ms))

    def step(self, now_ns: int) -> ServerStep:
        """One protocol action at the time now_ns (CLOCK_MONOTONIC or the test's own)."""
        return ServerStep(self._library.glm53_server_step(self._open(), now_ns))

    @property
    def state(self) -> ServerStep:
        """The action done last."""
        return ServerStep(self._library.glm53_server_state(self._open()))

    @property
    def current(self) -> bool:
        """False once the region's name is gone or names another region: a worker has restarted."""
        return bool(self._library.glm53_server_current(self._open()))

    def drain(self) -> None:
        """Take no more than what is published; `run` then returns DRAINED."""
        self._library.glm53_server_drain(self._open())

    def beat(self, now_ns: int) -> None:
        """Stores the heartbeat (only without beat_thread)."""
        self._library.glm53_server_beat(self._open(), now_ns)

    def stats(self) -> dict[str, Any]:
        """Counters: jobs, picks, experts, bytes (of records), dropped, stale, bad, acks; kernel and kernel_reason;
        huge_bytes (of the arena in 2 MiB pages when it was attached, -1: unknown) and huge_note; mapped_bytes (of the records in this
        process's page table so far, with huge_pages).
        """
        result: dict[str, Any] = json.loads(self._library.glm53_server_stats(self._open()))
        return result

    def close(self, *, kill: bool = False) -> None:
        """Detaches. kill: leave every word as it is, as a killed process does (tests). Closing twice is harmless."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._library.glm53_server_close(pointer, int(kill))

    def _open(self) -> int:
        if self._pointer is None:
            raise ValueError("the server is closed")
        return self._pointer

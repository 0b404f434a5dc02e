"""Says in the worker's log when the CPU lane goes down and when it is back: answers stay the same meanwhile, only slower."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from services.gpu_worker.backends.base import BackendLostError

log = logging.getLogger(__name__)

LOOK_S = 1.0
_END_S = 5.0


class LaneLog:
    """Compares readings of the lane's state, at most one line a reading."""

    def __init__(self) -> None:
        self._state = ""
        self._ups = 0
        self._down_since = 0.0

    def look(self, lane: dict[str, Any], now: float) -> None:
        """Logs what has changed since the last reading.

        Args:
            lane: `lane` of the backend's stats: state (UP, DOWN or OFF), reason, for_s (seconds in this state), ups, aborts. Empty where
                the backend has none.
            now: monotonic seconds.
        """
        before, ups_before = self._state, self._ups
        self._state, self._ups = str(lane.get("state", "OFF")), int(lane.get("ups", 0))
        since = now - float(lane.get("for_s", 0.0))
        if self._state == "DOWN":
            if before == "DOWN":
                return
            self._down_since = since
            # A worker that has just started waits for its cpu_expert: nothing was lost.
            level = logging.WARNING if before else logging.INFO
            log.log(level, "CPU lane down: %s. gpu_worker does its share until cpu_expert is back", lane.get("reason", ""))
        elif self._state == "UP":
            if not before:
                log.info("CPU lane up")
            elif before != "UP":
                log.info("CPU lane up after %.1f s", since - self._down_since)
            elif self._ups != ups_before:
                log.warning("CPU lane was down for less than %g s and is up again; %s jobs given up so far", LOOK_S, lane.get("aborts", 0))


class LaneWatch:
    """Takes the readings, each in a thread: a backend that hangs must not keep the watchdog from noticing.

    Args:
        stats: the backend's; callable from any thread.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self._log = LaneLog()
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Begins a reading when one is due and none runs. Called from the event loop, more often than `LOOK_S`."""
        now = asyncio.get_running_loop().time()
        if now >= self._due and (self._reading is None or self._reading.done()):
            self._due = now + LOOK_S
            self._reading = asyncio.create_task(self._read(now))

    async def end(self) -> None:
        """Waits for a reading that runs, a few seconds at most: the backend is closed afterwards."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_END_S)

    async def _read(self, now: float) -> None:
        try:
            stats = await asyncio.to_thread(self._stats)
        except BackendLostError as error:
            # The engine's thread meets that too, and ends the worker with it.
            log.debug("the CPU lane's state cannot be read: %s", error)
            return
        self._log.look(stats.get("lane", {}), now)

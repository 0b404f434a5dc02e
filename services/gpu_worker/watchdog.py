"""Notices an engine that has work but does not get on with it."""

from __future__ import annotations

# A gap between two looks that is longer than this means that the whole process was stopped, not the engine.
SUSPENDED_S = 1.0


class Watchdog:
    """Compares readings of the engine's progress.

    Args:
        limit_s: how long work may be pending without progress.
        now: monotonic seconds.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._progress = -1
        self._since = now
        self._looked = now

    def wedged_s(self, *, has_work: bool, progress: int, now: float) -> float:
        """Seconds without progress if they exceed the limit, else 0."""
        suspended = now - self._looked > SUSPENDED_S
        self._looked = now
        if not has_work or progress != self._progress or suspended:
            self._progress, self._since = progress, now
            return 0.0
        waited = now - self._since
        return waited if waited > self._limit_s else 0.0

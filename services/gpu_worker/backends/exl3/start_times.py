"""How long each stage of a start takes: where the time goes is asked on other machines than those that a start was made quick on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class StartTimes:
    """Stages follow one another; the same name again adds to what it has.

    Args:
        clock: seconds.

    Attributes:
        seconds: of each stage that is over, in their order.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._name, self._began = "", clock()

    def begin(self, name: str) -> None:
        """The stage before is over, this one begins."""
        self.end()
        self._name, self._began = name, self._clock()

    def end(self) -> None:
        """The last stage is over; nothing without one."""
        if self._name:
            took = self._clock() - self._began
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + took
            log.info("start: %s took %.1f s", self._name, took)
        self._name = ""

    def stats(self) -> dict[str, float]:
        """Seconds by stage and their sum, JSON-ready."""
        return {**{name: round(took, 2) for name, took in self.seconds.items()}, "total": round(sum(self.seconds.values()), 2)}

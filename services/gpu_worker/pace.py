"""How far a long transfer is, in words that change seldom enough to be logged."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 2.0
# Later in a long transfer words change more seldom: a log of three hours has some dozens of lines.
SHARE = 0.05


class Pace:
    """Bytes done, rate and time left.

    Args:
        total: bytes of the whole.
        done: bytes that are there before it begins; they count as done, and not to the rate.
        clock: monotonic seconds.
    """

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._at_start, self._clock = total, done, clock
        self._began = clock()
        self._said_at = float("-inf")
        self._words = ""

    def words(self, done: int) -> str:
        """`12.3 of 114.6 GB, 5.21 GB/s, 20 s left`; the same words again until it is time for new ones."""
        now = self._clock()
        elapsed = now - self._began
        if done < self._total and now - self._said_at < max(LEAST_S, SHARE * elapsed):
            return self._words
        self._said_at = now
        self._words = f"{done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        if elapsed > 0 and done > self._at_start:
            rate = (done - self._at_start) / elapsed
            self._words += f", {rate / 1e9:.2f} GB/s" if rate >= 1e8 else f", {rate / 1e6:.1f} MB/s"
            self._words += f", {span((self._total - done) / rate)} left" if done < self._total else ""
        return self._words


def span(seconds: float) -> str:
    """Seconds for people: `45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"

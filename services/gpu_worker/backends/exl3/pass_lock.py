"""Passes, and a thread that works between two of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class PassLock:
    """One pass at a time. Who waits to work between two passes is let in before the next one begins, however close they follow."""

    def __init__(self) -> None:
        # Held by whoever waits for a pass to end; a new pass has to go through it.
        self._door = threading.Lock()
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Nobody works between passes meanwhile."""
        with self._door:
            pass
        with self._busy:
            yield

    @contextlib.contextmanager
    def between_passes(self, timeout_s: float) -> Iterator[None]:
        """No pass runs meanwhile.

        Raises:
            TimeoutError: the pass that runs does not end.
        """
        with self._door:
            if not self._busy.acquire(timeout=timeout_s):
                raise TimeoutError(f"a pass has not ended for {timeout_s:g} s")
            try:
                yield
            finally:
                self._busy.release()

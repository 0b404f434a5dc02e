"""A worker process that lets no other Python of it run for `HELD_S`, at its third decode pass; then it goes on."""

from __future__ import annotations

import ctypes
import sys

from tests.worker.failing_worker import FailingBackend, run

HELD_S = 10


class GreedyBackend(FailingBackend):
    """Keeps the interpreter's lock, as a long call into a library may."""

    def fail(self) -> None:
        """Sleeps in C with the lock held: PyDLL does not give it back around a call."""
        ctypes.PyDLL(None).sleep(HELD_S)


if __name__ == "__main__":
    sys.exit(run(GreedyBackend))

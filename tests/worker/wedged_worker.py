"""A worker process whose backend never returns from its third decode pass."""

from __future__ import annotations

import sys
import threading

from tests.worker.failing_worker import FailingBackend, run


class WedgedBackend(FailingBackend):
    """Hangs, as in a call into a device that does not answer."""

    def fail(self) -> None:
        """Never returns."""
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(run(WedgedBackend))

"""A worker process whose backend is lost at its third decode pass."""

from __future__ import annotations

import sys

from services.gpu_worker.backends.base import BackendLostError
from tests.worker.failing_worker import FailingBackend, run


class LostBackend(FailingBackend):
    """Lost, as after an error of the device."""

    def fail(self) -> None:
        """Says that it is lost."""
        raise BackendLostError("the device fell off")


if __name__ == "__main__":
    sys.exit(run(LostBackend))

"""What the worker tells about itself: its state, how far loading is, and the facts that are known once it is loaded."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.lifecycle import ALLOWED, ServiceState
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the served model, known after loading."""

    model_name: str
    architecture: str
    checkpoint_hash: str
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    backend: BackendInfo
    max_queued: int


class WorkerStatus:
    """State and progress; written by the loader and the main thread, read from anywhere."""

    def __init__(self) -> None:
        self.instance_id = secrets.token_hex(8)
        self.created_unix_s = int(time.time())
        self.facts: ModelFacts | None = None
        self._lock = threading.Lock()
        self._state = ServiceState.STARTING
        self._progress = 0.0
        self._step = "starting"
        self._listeners: list[Callable[[ServiceState], None]] = []

    @property
    def state(self) -> ServiceState:
        """Current state."""
        return self._state

    @property
    def progress(self) -> tuple[float, str]:
        """Fraction 0..1 of loading and what is being loaded, in words."""
        return self._progress, self._step

    def listen(self, listener: Callable[[ServiceState], None]) -> None:
        """Calls `listener` with every new state, in the thread that changed it."""
        self._listeners.append(listener)

    def note(self, fraction: float, step: str) -> None:
        """Loading got on."""
        self._progress, self._step = fraction, step

    def advance(self, new: ServiceState) -> None:
        """Moves to another state; a move that the lifecycle does not allow is a bug and raises RuntimeError."""
        with self._lock:
            if new is self._state:
                return
            if new not in ALLOWED[self._state]:
                raise RuntimeError(f"illegal service transition {self._state.name} -> {new.name}")
            self._state = new
        log.info("state %s", new.name)
        for listener in self._listeners:
            listener(new)

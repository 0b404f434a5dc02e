"""A worker process with the real backend, until its third decode pass: what happens then is for a subclass to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.common.logs import configure_logging
from services.gpu_worker.backends import cpu
from services.gpu_worker.backends.base import Logits, Stream
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker


class FailingBackend(cpu.CpuBackend):
    """The real backend for two decode passes."""

    passes_left = 2

    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        if self.passes_left == 0:
            self.fail()
        self.passes_left -= 1
        return super().decode(streams, token_ids)

    def fail(self) -> None:
        """What a subclass does instead of the third pass."""
        raise AssertionError("a subclass says how the backend fails")


def run(backend_class: type[FailingBackend]) -> int:
    """Serves with such a backend; returns the exit code."""

    def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Callable[[float, str], None]) -> cpu.CpuBackend:
        backend = cpu.load(settings, checkpoint, note)
        backend.__class__ = backend_class
        return backend

    async def serve() -> int:
        settings = GpuWorkerSettings.load()
        configure_logging("gpu_worker")
        return await Worker(settings, load).run()

    return asyncio.run(serve())

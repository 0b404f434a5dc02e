"""A worker process whose backend is lost at its third decode pass."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from services.common.logs import configure_logging
from services.gpu_worker.backends import cpu
from services.gpu_worker.backends.base import BackendLostError, Logits, Stream
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker


class LostBackend(cpu.CpuBackend):
    """The real backend, until it is lost."""

    passes_left = 2

    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        if self.passes_left == 0:
            raise BackendLostError("the device fell off")
        self.passes_left -= 1
        return super().decode(streams, token_ids)


def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Callable[[float, str], None]) -> LostBackend:
    backend = cpu.load(settings, checkpoint, note)
    backend.__class__ = LostBackend
    assert isinstance(backend, LostBackend)
    return backend


async def main() -> int:
    settings = GpuWorkerSettings.load()
    configure_logging("gpu_worker")
    return await Worker(settings, load).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

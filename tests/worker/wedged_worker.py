"""A worker process whose backend never returns from its third decode pass."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence

from services.common.logs import configure_logging
from services.gpu_worker.backends import cpu
from services.gpu_worker.backends.base import Logits, Stream
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker


class WedgedBackend(cpu.CpuBackend):
    """The real backend, until it hangs."""

    passes_left = 2

    def decode(self, streams: Sequence[Stream], token_ids: Sequence[int]) -> Logits:
        if self.passes_left == 0:
            threading.Event().wait()
        self.passes_left -= 1
        return super().decode(streams, token_ids)


def load(settings: GpuWorkerSettings, checkpoint: Checkpoint, note: Callable[[float, str], None]) -> WedgedBackend:
    backend = cpu.load(settings, checkpoint, note)
    backend.__class__ = WedgedBackend
    assert isinstance(backend, WedgedBackend)
    return backend


async def main() -> int:
    settings = GpuWorkerSettings.load()
    configure_logging("gpu_worker")
    return await Worker(settings, load).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

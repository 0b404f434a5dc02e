"""Slots in ordinary memory whose end can be lent, and the books of a device that has no more memory than it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.python.errors import KernelError
from services.gpu_worker.backends.exl3.slots import ElasticSlots

POISON = 0xEE


@dataclass
class Vram:
    """Bytes that nobody has, and that torch has but does not use."""

    free: int
    cached: int = 0
    now: float = 0.0
    wasted: int = 0  # of what torch keeps from one pass the next one cannot use so much
    least_free: int = 1 << 60

    def spare(self) -> int:
        return self.free + self.cached

    def activations(self, num_bytes: int) -> None:
        """A pass takes and gives back so much, which torch keeps."""
        assert num_bytes <= self.spare(), "out of memory"
        grown = max(0, num_bytes - max(0, self.cached - self.wasted))
        self.free, self.cached = self.free - grown, self.cached + grown
        self.least_free = min(self.least_free, self.free)

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


class LentMemory:
    """As `SlotMemory`; what is lent has bytes that no record has."""

    def __init__(self, vram: Vram, num_slots: int, stride: int, chunk_bytes: int) -> None:
        self.tensor = torch.full((num_slots, stride), POISON, dtype=torch.uint8)
        self.num_bytes, self.chunk_bytes = num_slots * stride, chunk_bytes
        self.mapped_bytes = self.num_bytes
        self.refuse = self.closed = False
        self.idle: Callable[[], bool] = lambda: True
        self.vram = vram

    def left_after(self, lent_bytes: int) -> int:
        kept = max(0, self.num_bytes - lent_bytes)
        return min(self.mapped_bytes, kept if kept == self.num_bytes else kept // self.chunk_bytes * self.chunk_bytes)

    def lend(self, lent_bytes: int) -> None:
        assert self.idle(), "memory goes while the device works with it"
        left = self.left_after(lent_bytes)
        self.vram.free += self.mapped_bytes - left
        self.mapped_bytes = left
        self._lent[:] = POISON

    @property
    def _lent(self) -> torch.Tensor:
        return self.tensor.view(-1)[self.mapped_bytes :]

    def take_back(self, leave_free: int = 0) -> bool:
        assert bool((self._lent == POISON).all()), "something was written into slots that are lent"
        while self.mapped_bytes < self.num_bytes:
            size = min(self.chunk_bytes, self.num_bytes - self.mapped_bytes)
            if self.vram.free < leave_free + size:
                return False
            if self.refuse:
                raise KernelError("the GPU driver refuses to map memory for expert slots (CUDA error 999)")
            self.vram.free -= size
            self.mapped_bytes += size
        return True

    def close(self) -> None:
        self.closed = True


def elastic_slots(vram: Vram, num_slots: int, stride: int, *, most: int, reserve: int) -> tuple[ElasticSlots, LentMemory]:
    """Slots in chunks that end inside slots."""
    memory = LentMemory(vram, num_slots, stride, stride * 3 // 2)
    slots = ElasticSlots(memory, memory.tensor, most=most, reserve=reserve, spare=vram.spare, clock=lambda: vram.now)
    return slots, memory

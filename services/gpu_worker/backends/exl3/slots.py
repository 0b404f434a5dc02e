"""Lends the end of the slots' memory to long prefills: what a chunk of thousands of tokens takes for activations need not lie idle else.

Between two passes, before a prefill that needs more than is free: the last slots are emptied, nobody may use them, and their memory goes to
the device, where torch finds it. The next decode step or short prefill comes to the slots again: torch gives back what it does not use,
and the memory is mapped under the old addresses. What else uses the GPU may have taken some of it: then fewer slots are used, and it is
tried again later. Staged prefills have their halves in front of what is lent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kernels.python.errors import KernelError

log = logging.getLogger(__name__)

MIB = 1 << 20
RETRY_S = 10.0  # between two tries to get back what somebody else has
_SLACK = 16  # a pass may take a sixteenth more than was measured


def kept_by_torch(device: int | None = None) -> int:
    """Bytes of a device's memory, None for the current one, that torch holds and does not use."""
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class Memory(Protocol):
    """What is asked of the slots' memory: `SlotMemory`, or what tests put in its place."""

    num_bytes: int
    chunk_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """Bytes from the first one on that may be used."""
        ...

    def left_after(self, lent_bytes: int) -> int:
        """`mapped_bytes` if at least so many bytes in all were lent."""
        ...

    def lend(self, lent_bytes: int) -> None:
        """Lends at least so many bytes in all."""
        ...

    def take_back(self, leave_free: int = 0) -> bool:
        """Maps what is lent again; False when not all of it could be had."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


@dataclass
class ActivationNeed:
    """VRAM that a prefill pass takes beside weights, cache and slots.

    Attributes:
        known: bytes of a pass of so many rows; linear in between, proportional beyond, constant below.
    """

    known: dict[int, int] = field(default_factory=dict)

    def of(self, rows: int) -> int | None:
        """Bytes for a pass of so many rows; None when nothing is known."""
        if not self.known:
            return None
        points = sorted(self.known.items())
        below = [point for point in points if point[0] <= rows]
        above = [point for point in points if point[0] > rows]
        if not below:
            return above[0][1]
        (at, need) = below[-1]
        if not above:
            return need * rows // at
        (end, most) = above[0]
        return need + (most - need) * (rows - at) // (end - at)


class ElasticSlots:
    """Slots whose last ones can be lent. The forward pass's thread calls everything but `stats`.

    Args:
        memory: of the slots.
        tensor: uint8 [slots, stride] over it.
        most: bytes that may be lent.
        reserve: bytes of VRAM that stay free beside what a pass takes.
        spare: tells how many bytes of VRAM torch could have now.
        clock: seconds.
    """

    def __init__(
        self,
        memory: Memory,
        tensor: torch.Tensor,
        *,
        most: int,
        reserve: int,
        spare: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tensor, self.need = tensor, ActivationNeed()
        self.usable = len(tensor)
        self._memory, self._most, self._reserve = memory, most, reserve
        self._spare, self._clock = spare, clock
        self._vacate: Callable[[int], None] = lambda _first: None
        self._limit: Callable[[int], None] = lambda _usable: None
        self._lock: Any = threading.Lock()
        self._missing = False  # some slots have no memory
        self._retry_at = 0.0
        self._told = self.usable
        self._counters = {"slot_lendings": 0, "slot_bytes_lent": 0}

    def attach(self, vacate: Callable[[int], None], limit: Callable[[int], None], lock: Any, least: int) -> None:
        """Says whose slots they are.

        Args:
            vacate: empties the slots from one on, for tables and copies too.
            limit: says how many slots may be used; those beyond are empty.
            lock: held by other threads that read a slot.
            least: slots that are never lent.
        """
        self._vacate, self._limit, self._lock = vacate, limit, lock
        self._most = min(self._most, self._memory.num_bytes - least * self._stride)
        # Whole chunks are lent, so more may go than was asked for.
        while self._most > 0 and self._memory.left_after(self._most) < least * self._stride:
            self._most = max(0, self._most - self._memory.chunk_bytes)

    @property
    def _stride(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def _least_free(self) -> int:
        """Half of the reserve: no pass that is measured takes it, and slots leave it when they come back."""
        return self._reserve // 2

    @property
    def _lent(self) -> int:
        return self._memory.num_bytes - self._memory.mapped_bytes

    def before_prefill(self, rows: int) -> None:
        """A prefill pass of so many rows is next, no other is under way. Waits for the device when slots are lent for it."""
        wanted = self._wanted(rows)
        if self._memory.left_after(wanted) < self._memory.mapped_bytes:
            self._lend(wanted)
        elif wanted == 0:
            self.before_decode()
        # Of what torch keeps from the passes before this one can only use what has its sizes: beside the rest they took of the reserve. A
        # pass for which nothing is lent lives on the reserve itself, half of it at most.
        if self._spare() - kept_by_torch() < (self._reserve if wanted > 0 else self._least_free):
            torch.cuda.empty_cache()

    def before_decode(self) -> None:
        """A step that needs no more than half of the reserve is next: what is lent comes back, as far as the device has it."""
        if self._missing and self._clock() >= self._retry_at:
            self._take_back()

    def _wanted(self, rows: int) -> int:
        """Bytes that are to be lent to such a pass."""
        need = self.need.of(rows)
        if need is None:
            return self._most
        need += need // _SLACK + self._least_free
        spare, lent = self._spare(), self._lent
        if need <= spare - lent:
            return 0  # also if everything came back
        return lent if need <= spare else min(self._most, lent + need + self._reserve - self._least_free - spare)

    def _lend(self, wanted: int) -> None:
        usable = self._memory.left_after(wanted) // self._stride
        if usable < self.usable:
            self._vacate(usable)
            self._limit(usable)
            self.usable = usable
        before = self._lent
        # Kernels that read the slots, and copies into them, are over before their memory goes.
        torch.cuda.synchronize(self.tensor.device)
        try:
            with self._lock:
                self._memory.lend(wanted)
        except KernelError as error:
            log.warning("slots cannot be lent to a prefill: %s", error)
        self._missing, self._retry_at = True, 0.0
        self._counters["slot_lendings"] += 1
        self._counters["slot_bytes_lent"] += self._lent - before
        log.debug("%d of %d slots are usable while a prefill has the memory of the others", usable, len(self.tensor))

    def _take_back(self) -> None:
        torch.cuda.empty_cache()
        try:
            whole = self._memory.take_back(self._least_free)
        except KernelError as error:
            log.warning("slots that were lent do not come back: %s", error)
            whole = False
        self.usable = self._memory.mapped_bytes // self._stride
        self._limit(self.usable)
        self._missing = not whole
        if not whole:
            self._retry_at = self._clock() + RETRY_S
        if self.usable != self._told:
            log.warning("%d of %d slots have memory: what is missing of it is in use elsewhere", self.usable, len(self.tensor))
            self._told = self.usable

    def stats(self) -> dict[str, int]:
        """Counters, JSON-ready."""
        return {"slots_usable": self.usable, **self._counters}

    def close(self) -> None:
        """Gives the memory back. Nothing points at a slot any more, and the device is idle."""
        self._memory.close()

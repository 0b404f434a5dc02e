"""Rate limits of a key: sliding window counters, in this process or shared through Redis.

A request is charged an estimate before it runs (one request, its prompt and the answer it may get) and settled with what it really
took. A window's count is what the current window has plus the part of the one before that still overlaps: two numbers a limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from limits.aio.storage import MemoryStorage

from services.gateway.access.keys import ApiKey

# Charges that must be booked whatever the limit says.
_NO_LIMIT = 2**53


@dataclass(frozen=True)
class Limit:
    """One limit of a key.

    Attributes:
        name: requests, tokens or tokens_day.
        amount: most units in a window.
        window_s: length of the window in seconds.
    """

    name: str
    amount: int
    window_s: int

    @property
    def unit(self) -> str:
        """What it counts: requests or tokens."""
        return "requests" if self.name == "requests" else "tokens"

    @property
    def words(self) -> str:
        """For messages: "60 requests a minute"."""
        return f"{self.amount} {self.unit} a {'day' if self.window_s == 86_400 else 'minute'}"


@dataclass(frozen=True)
class Standing:
    """Where a limit stands.

    Attributes:
        limit: the limit.
        previous: units of the window before this one.
        current: units of this window.
        elapsed_s: how much of this window is over, in seconds.
    """

    limit: Limit
    previous: int
    current: int
    elapsed_s: float

    @property
    def used(self) -> int:
        """Units that count now."""
        rest = max(0.0, 1 - self.elapsed_s / self.limit.window_s)
        return math.floor(self.previous * rest) + self.current

    @property
    def remaining(self) -> int:
        """Units that are left."""
        return max(0, self.limit.amount - self.used)

    def wait_s(self, cost: int) -> float | None:
        """Seconds until `cost` units are free if nobody else takes them; None when the limit never has so many."""
        window, room = self.limit.window_s, self.limit.amount - cost
        if room < 0:
            return None
        if self.used <= room:
            return 0.0
        if self.current <= room and self.previous > 0:
            # The window before must fade until previous * rest < room - current + 1.
            rest = (room - self.current) / self.previous
            return max(0.001, window * (1 - rest) - self.elapsed_s)
        # This window must end, and then fade.
        fade = window * (1 - room / self.current) if self.current > 0 else 0.0
        return max(0.001, window - self.elapsed_s + fade)

    @property
    def reset_s(self) -> float:
        """Seconds until nothing counts any more."""
        if self.current > 0:
            return 2 * self.limit.window_s - self.elapsed_s
        return self.limit.window_s - self.elapsed_s if self.previous > 0 else 0.0


@dataclass(frozen=True)
class Charge:
    """Units to take from one limit."""

    limit: Limit
    cost: int


@dataclass(frozen=True)
class Lease:
    """A place among the requests that a key may have at the same time in all gateways.

    Attributes:
        holder: id of the request.
        most: places.
    """

    holder: str
    most: int


@dataclass(frozen=True)
class Verdict:
    """The answer to a charge.

    Attributes:
        standings: every limit asked about, in order, after the charge if it was taken.
        refused: index of the limit that has too little left; None when the charge was taken or the lease was refused.
        busy: every place is taken.
    """

    standings: tuple[Standing, ...]
    refused: int | None = None
    busy: bool = False

    @property
    def taken(self) -> bool:
        """True when everything was booked; otherwise nothing was."""
        return self.refused is None and not self.busy


class Counters(Protocol):
    """Where limits are counted. Every method books everything or nothing."""

    async def take(self, key_id: str, charges: Sequence[Charge], lease: Lease | None) -> Verdict:
        """Books charges if all limits have room and the lease has a place."""

    async def settle(self, key_id: str, corrections: Sequence[Charge], lease: Lease | None) -> None:
        """Adds the difference to what was charged, negative for a refund, whatever the limits say; ends the lease."""


class LocalCounters:
    """Counters of this process.

    Args:
        share: part of every limit that this process may give away, 1.0 for all of it.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._storage = MemoryStorage()
        self._share = share
        self._lock = asyncio.Lock()
        self._leases: dict[str, set[str]] = {}

    async def take(self, key_id: str, charges: Sequence[Charge], lease: Lease | None) -> Verdict:
        """Books charges if all limits have room and the lease has a place."""
        async with self._lock:
            holders = self._leases.get(key_id, set())
            if lease is not None and lease.holder not in holders and len(holders) >= self._part(lease.most):
                return Verdict((), busy=True)
            before = [await self._standing(key_id, self._shared(charge.limit)) for charge in charges]
            for index, (charge, standing) in enumerate(zip(charges, before, strict=True)):
                if charge.cost > standing.limit.amount - standing.used:
                    return Verdict(tuple(before), refused=index)
            for charge in charges:
                await self._add(key_id, self._shared(charge.limit), charge.cost)
            if lease is not None:
                self._leases.setdefault(key_id, set()).add(lease.holder)
            return Verdict(tuple([await self._standing(key_id, standing.limit) for standing in before]))

    async def settle(self, key_id: str, corrections: Sequence[Charge], lease: Lease | None) -> None:
        """Adds the difference to what was charged, negative for a refund, whatever the limits say; ends the lease."""
        async with self._lock:
            if lease is not None:
                self.end_lease(key_id, lease.holder)
            for correction in corrections:
                if correction.cost:
                    await self._add(key_id, self._shared(correction.limit), correction.cost)

    def end_lease(self, key_id: str, holder: str) -> None:
        """Gives a place back; nothing happens when it was not taken here."""
        holders = self._leases.get(key_id)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                del self._leases[key_id]

    @property
    def num_leases(self) -> int:
        """Places taken."""
        return sum(len(holders) for holders in self._leases.values())

    def _part(self, amount: int) -> int:
        return max(1, math.floor(amount * self._share))

    def _shared(self, limit: Limit) -> Limit:
        return limit if self._share == 1.0 else Limit(limit.name, self._part(limit.amount), limit.window_s)

    async def _standing(self, key_id: str, limit: Limit) -> Standing:
        previous, _, current, current_ttl = await self._storage.get_sliding_window(_name(key_id, limit), limit.window_s)
        # The library tells a current window's rest plus one whole window.
        return Standing(limit, previous, current, max(0.0, 2 * limit.window_s - current_ttl))

    async def _add(self, key_id: str, limit: Limit, cost: int) -> None:
        await self._storage.acquire_sliding_window_entry(_name(key_id, limit), _NO_LIMIT, limit.window_s, cost)


def _name(key_id: str, limit: Limit) -> str:
    return f"rl:{key_id}:{limit.name}"


def limits_of(key: ApiKey) -> tuple[Limit, ...]:
    """The limits that a key has."""
    wanted = (
        ("requests", key.requests_per_minute, 60),
        ("tokens", key.tokens_per_minute, 60),
        ("tokens_day", key.tokens_per_day, 86_400),
    )
    return tuple(Limit(name, amount, window_s) for name, amount, window_s in wanted if amount is not None)
